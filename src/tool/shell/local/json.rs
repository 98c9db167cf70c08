//! `Json*`: JSON documents.

use serde_json::{Map, Value};
use serde_json_path::JsonPath;

use super::{Args, Output, VerbError, failed};

const MAX_ENTRIES: usize = 64;
const MAX_PATH: usize = 1024;

pub(super) fn run(verb: &str, args: Args<'_>) -> Option<Output> {
    let input = args.text(0);
    Some(match verb {
        "JsonParse" => parsed(input).map(|value| format!("{value:#}")),
        "JsonQuery" => query(input, args.text(1)),
        "JsonMerge" => merged(input, args.text(1)),
        "JsonKeys" => object(input).map(|members| members.keys().map(String::as_str).collect::<Vec<_>>().join("\n")),
        "JsonCount" => parsed(input).and_then(|value| match value {
            Value::Array(items) => Ok(items.len().to_string()),
            Value::Object(members) => Ok(members.len().to_string()),
            _ => failed("not a JSON array or object"),
        }),
        "JsonType" => parsed(input).map(|value| kind(&value).to_owned()),
        "JsonFromPairs" => pairs(args),
        "JsonSet" => object(input).map(|mut members| {
            members.insert(args.text(1).to_owned(), value(args.text(2)));
            Value::Object(members).to_string()
        }),
        "JsonRemoveKey" => object(input).map(|mut members| {
            members.remove(args.text(1));
            Value::Object(members).to_string()
        }),
        "JsonGet" => get(input, args.text(1)),
        "JsonCompact" => parsed(input).map(|value| value.to_string()),
        "JsonStringify" => Ok(Value::from(input).to_string()),
        "JsonArrayFrom" if args.0.len() > MAX_ENTRIES => {
            failed(format!("JsonArrayFrom takes at most {MAX_ENTRIES} items"))
        }
        "JsonArrayFrom" => Ok(Value::from(args.0.to_vec()).to_string()),
        _ => return None,
    })
}

fn parsed(text: &str) -> Result<Value, VerbError> {
    serde_json::from_str(text).map_err(|error| VerbError::Failed(format!("not JSON: {error}")))
}

fn object(text: &str) -> Result<Map<String, Value>, VerbError> {
    match parsed(text)? {
        Value::Object(members) => Ok(members),
        _ => failed("not a JSON object"),
    }
}

/// Returns a value that is written as JSON, or the text as a string.
fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

/// Returns a string as it is, and everything else as JSON.
fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The values at a path (RFC 9535): the only one as it is, several as an array.
pub(super) fn query(input: &str, path: &str) -> Output {
    if path.len() > MAX_PATH {
        return failed(format!("a JSONPath has at most {MAX_PATH} bytes"));
    }
    let path = JsonPath::parse(path).map_err(|error| VerbError::Failed(format!("not a JSONPath: {error}")))?;
    let input = parsed(input)?;
    let found = path.query(&input).all();
    match found.as_slice() {
        [] => failed("no value is at this path"),
        [only] => Ok(shown(only)),
        all => Ok(Value::Array(all.iter().map(|value| (*value).clone()).collect()).to_string()),
    }
}

fn merged(first: &str, second: &str) -> Output {
    let mut members = object(first)?;
    members.extend(object(second)?);
    Ok(Value::Object(members).to_string())
}

fn pairs(args: Args<'_>) -> Output {
    if !args.0.len().is_multiple_of(2) {
        return failed("each key needs a value");
    }
    if args.0.len() > MAX_ENTRIES.saturating_mul(2) {
        return failed(format!("JsonFromPairs takes at most {MAX_ENTRIES} pairs of a key and a value"));
    }
    let mut members = Map::new();
    for pair in args.0.chunks_exact(2) {
        if let [key, value] = pair {
            members.insert(key.clone(), Value::from(value.as_str()));
        }
    }
    Ok(Value::Object(members).to_string())
}

fn get(input: &str, key: &str) -> Output {
    let input = parsed(input)?;
    let found = match &input {
        Value::Object(members) => members.get(key),
        Value::Array(items) => {
            key.parse::<usize>().ok().filter(|index| index.to_string() == key).and_then(|index| items.get(index))
        }
        _ => return failed("not a JSON object or array"),
    };
    found.map(shown).map_or_else(|| failed("no value has this key or index"), Ok)
}
