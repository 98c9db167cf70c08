//! The schema of a tool's parameters.

use jsonschema::{PatternOptions, Validator};
use serde_json::{Value, json};

use super::mapping::{MAX_ECHO, quoted};
use super::parameter::Reference;
use super::place::{Findings, Place};
use super::problem::truncate;
use super::references::{self, Weight};
use super::yaml::Node;

/// Maximum depth of arguments, and their maximum size.
const MAX_DEPTH: usize = 64;
const MAX_ARGUMENTS: usize = 4 << 20;
/// Maximum number of errors in one reply, and the maximum length of each.
const MAX_FAULTS: usize = 4;
const MAX_FAULT: usize = 200;
const PATTERN_SIZE: usize = 1 << 20;
/// Maximum number of subschema visits in one check: a few seconds at worst, even on a slow machine.
const MAX_WORK: u64 = 1 << 26;
/// Maximum number of visits for which all errors are reported, and not only the first.
const MAX_WORK_FOR_ALL: u64 = 1 << 20;
/// The number of bytes of text that cost about as much as one visit.
const BYTES_A_VISIT: usize = 16;

/// Keywords that permit members that `properties` does not list.
const OPENERS: [&str; 8] =
    ["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties", "additionalProperties"];

/// A compiled schema.
#[derive(Debug)]
pub(super) struct Schema {
    value: Value,
    validator: Validator,
    weight: Weight,
}

impl Schema {
    pub(super) fn read(node: Option<&Node>, place: &Place, findings: &Findings) -> Option<Self> {
        let value = node.map_or_else(|| json!({"type": "object", "properties": {}}), Node::to_value);
        let kind = value.get("type");
        if !value.is_object() {
            findings.problem(place, "must be a JSON Schema of type object");
            return None;
        }
        if kind != Some(&json!("object")) {
            findings.problem(&place.key("type"), "must be object");
            return None;
        }
        // Checked before compiling, which follows references too.
        let weight = match references::weight(&value, place) {
            Ok(weight) => weight,
            Err((place, why)) => {
                findings.problem(&place, why);
                return None;
            }
        };
        match compile(&value) {
            Ok(validator) => Some(Self { value, validator, weight }),
            Err(why) => {
                findings.problem(place, why);
                None
            }
        }
    }

    pub(super) fn value(&self) -> &Value {
        &self.value
    }

    /// Reports what is wrong with arguments, by pointer and rule and never by value.
    pub(super) fn check(&self, arguments: &Value) -> Result<(), String> {
        let work = self.work(bounded(arguments)?);
        if work > MAX_WORK {
            return Err("arguments are too many for a schema of this size".to_owned());
        }
        // The validator collects all errors before it returns the first.
        let most = if work > MAX_WORK_FOR_ALL { 0 } else { MAX_FAULTS };
        let several = (most > 0).then(|| self.validator.iter_errors(arguments)).into_iter().flatten();
        let first = if most > 0 { None } else { self.validator.validate(arguments).err() };
        let faults: Vec<String> = several
            .take(most)
            .chain(first)
            .map(|error| {
                let pointer = truncate(error.instance_path().as_str(), MAX_ECHO);
                let at = if pointer.is_empty() { String::new() } else { format!(" at {pointer}") };
                let rule = truncate(error.kind().keyword(), MAX_ECHO);
                format!("arguments{at}: {} ({rule})", truncate(&error.masked().to_string(), MAX_FAULT))
            })
            .collect();
        if faults.is_empty() { Ok(()) } else { Err(faults.join("; ")) }
    }

    /// Returns the maximum number of visits for a check of this many values. In a recursive schema, `anyOf` and `oneOf`
    /// visit everything below them once more on each level.
    fn work(&self, values: usize) -> u64 {
        let levels = if self.weight.recurs { MAX_DEPTH as u64 } else { 1 };
        self.weight.visits.saturating_mul(levels).saturating_mul(values as u64)
    }
}

/// Compiles a schema. Nothing is fetched, and patterns take linear time.
fn compile(schema: &Value) -> Result<Validator, String> {
    let patterns = PatternOptions::regex().size_limit(PATTERN_SIZE).dfa_size_limit(PATTERN_SIZE);
    let options = jsonschema::options().offline().with_pattern_options(patterns);
    options.build(schema).map_err(|error| {
        let at = truncate(error.instance_path().as_str(), MAX_ECHO);
        let at = if at.is_empty() { at } else { format!(" at {at}") };
        format!("no valid JSON Schema{at}: {}", truncate(&error.masked().to_string(), MAX_FAULT))
    })
}

/// Returns the number of values, with long texts counted as several. It does not recurse, because the depth is not
/// bounded yet.
fn bounded(arguments: &Value) -> Result<usize, String> {
    if !arguments.is_object() {
        return Err("arguments must be an object".to_owned());
    }
    let mut left = MAX_ARGUMENTS;
    let mut values = 0_usize;
    let mut pending = vec![(arguments, 0)];
    while let Some((value, depth)) = pending.pop() {
        if depth > MAX_DEPTH {
            return Err(format!("arguments are nested deeper than {MAX_DEPTH}"));
        }
        let bytes = match value {
            Value::String(text) => text.len(),
            Value::Array(items) => {
                pending.extend(items.iter().map(|item| (item, depth + 1)));
                0
            }
            Value::Object(members) => {
                pending.extend(members.values().map(|member| (member, depth + 1)));
                members.keys().map(String::len).sum()
            }
            Value::Bool(_) | Value::Null | Value::Number(_) => 0,
        };
        left = left.checked_sub(bytes.saturating_add(1)).ok_or("the arguments exceed 4 MiB")?;
        values = values.saturating_add(bytes / BYTES_A_VISIT).saturating_add(1);
    }
    Ok(values)
}

/// Checks that a schema declares a parameter, as far as it lists its members. The first name must be in `properties`,
/// even if other members are permitted.
pub(super) fn declares(schema: &Value, reference: &Reference) -> Result<(), String> {
    let mut here = Some(schema);
    for (depth, step) in reference.0.iter().enumerate() {
        let Some(schema) = here else { return Ok(()) };
        here = member(schema, step, depth == 0).ok_or_else(|| {
            let path = truncate(&reference.0.join("."), MAX_ECHO);
            if depth == 0 {
                format!("unknown placeholder ${{{path}}}: parameters have no {}", quoted(step))
            } else {
                let parent: Vec<&str> = reference.0.iter().take(depth).map(String::as_str).collect();
                format!(
                    "unknown placeholder ${{{path}}}: {} has no {}",
                    truncate(&parent.join("."), MAX_ECHO),
                    quoted(step)
                )
            }
        })?;
    }
    Ok(())
}

/// Returns the schema of a member: `None` if there is no such member, `Some(None)` if the schema does not tell.
fn member<'s>(schema: &'s Value, step: &str, strict: bool) -> Option<Option<&'s Value>> {
    let properties = schema.get("properties");
    if let Some(member) = properties.and_then(|properties| properties.get(step)) {
        return Some(Some(member));
    }
    let opened = OPENERS.iter().any(|key| schema.get(key).is_some_and(|value| *value != Value::Bool(false)));
    match schema.get("type").and_then(Value::as_str) {
        _ if strict => None,
        _ if opened => Some(None),
        Some("array") => step.parse::<usize>().ok().map(|at| item(schema, at)),
        Some("object") | None if properties.is_some() => None,
        Some("boolean" | "integer" | "null" | "number" | "string") => None,
        Some(_) | None => Some(None),
    }
}

fn item(schema: &Value, at: usize) -> Option<&Value> {
    schema.get("prefixItems").and_then(|items| items.get(at)).or_else(|| schema.get("items"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(value: &Value) -> Result<Schema, String> {
        let weight = references::weight(value, &Place::default()).map_err(|(place, why)| format!("{place}: {why}"))?;
        compile(value).map(|validator| Schema { value: value.clone(), validator, weight })
    }

    #[test]
    fn an_error_names_pointer_and_rule_and_never_a_value() {
        let schema = schema(&json!({
            "type": "object",
            "properties": {
                "sku": {"type": "string", "pattern": "^[a-z]+$"},
                "order": {"type": "object", "properties": {"id": {"type": "integer", "maximum": 9}}},
                "size": {"enum": ["s", "m"]},
            },
            "required": ["sku"],
            "additionalProperties": false,
        }))
        .unwrap();
        let rows = [
            (json!({"sku": "a"}), Ok(())),
            (json!({}), Err("arguments: \"sku\" is a required property (required)")),
            (json!({"sku": "SEEN"}), Err("arguments at /sku: value does not match \"^[a-z]+$\" (pattern)")),
            (json!({"sku": 41}), Err("arguments at /sku: value is not of type \"string\" (type)")),
            (
                json!({"sku": "a", "order": {"id": 4711}}),
                Err("arguments at /order/id: value is greater than the maximum of 9 (maximum)"),
            ),
            (json!({"sku": "a", "size": "x"}), Err("arguments at /size: value is not one of \"s\" or \"m\" (enum)")),
            (
                json!({"sku": "a", "x": "SEEN"}),
                Err("arguments: Additional properties are not allowed ('x' was unexpected) (additionalProperties)"),
            ),
            (json!([1]), Err("arguments must be an object")),
            (json!("SEEN"), Err("arguments must be an object")),
        ];
        for (arguments, want) in rows {
            assert_eq!(schema.check(&arguments), want.map_err(str::to_owned), "{arguments}");
        }
    }

    #[test]
    fn bounds_arguments_and_error_texts() {
        let schema = schema(&json!({"type": "object", "additionalProperties": false})).unwrap();
        let deep = (0..5000).fold(Value::Null, |inner, _| json!([inner]));
        let wide: serde_json::Map<_, _> = (0..1000).map(|n| (format!("k{n}\u{7}").repeat(50), json!(n))).collect();
        let rows = [json!({"a": deep}), json!({"a": "x".repeat(5 << 20)}), Value::Object(wide)];
        for arguments in rows {
            let error = schema.check(&arguments).unwrap_err();
            assert!(error.len() < 2000 && !error.contains('\u{7}'), "{error}");
        }
    }

    #[test]
    fn fetches_nothing_and_refuses_backtracking_patterns() {
        let rows = [
            (json!({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}), true),
            (json!({"$ref": "https://example.com/schema.json"}), false),
            (json!({"$ref": "file:///etc/passwd"}), false),
            (json!({"$ref": "#/$defs/none"}), false),
            (json!({"pattern": "(a)\\1"}), false),
            (json!({"pattern": "(?=a)"}), false),
            (json!({"pattern": "["}), false),
            (json!({"pattern": "(a{1000}){1000}"}), false),
            (json!({"type": "objekt"}), false),
            (json!({"required": "a"}), false),
            (json!({"properties": {"a": {"minimum": "1"}}}), false),
            (json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}), true),
            (json!({"$schema": "https://example.com/mine"}), false),
        ];
        for (schema, want) in rows {
            assert_eq!(compile(&schema).is_ok(), want, "{schema}: {:?}", compile(&schema).err());
        }
    }

    #[test]
    fn a_recursive_schema_terminates() {
        let around = [
            json!({"type": "object", "$ref": "#"}),
            json!({"type": "object", "allOf": [{"$ref": "#"}]}),
            json!({"type": "object", "properties": {"a": {"$ref": "#"}}}),
            json!({"type": "object", "not": {"$ref": "#"}}),
        ];
        let taken: Vec<bool> = around.iter().map(|value| schema(value).is_ok()).collect();
        assert_eq!(taken, [false, false, true, false]);
        assert_eq!(schema(&around[2]).unwrap().check(&json!({"a": {"a": {}}})), Ok(()));
    }

    /// The checks of the largest accepted schemas and arguments end within seconds.
    #[test]
    fn the_heaviest_check_terminates() {
        let many: Vec<Value> = (0..250).map(|n| json!({"pattern": format!("x{n}y$")})).collect();
        let text = json!({"type": "object", "properties": {"a": {"allOf": many}}});
        let nested = (0..14).fold(json!({"type": "integer"}), |inner, _| json!({"anyOf": [inner, {"type": "null"}]}));
        let list = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"anyOf": [
            {"type": "array", "items": {"oneOf": [{"type": "string"}, {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}]}},
            {"type": "string"}]}}});
        let leaves = json!(vec![1; 1200]);
        let deep = (0..55).fold(leaves.clone(), |inner, _| json!([inner, leaves]));
        let rows = [
            (text, json!({"a": "x".repeat(4_000_000)})),
            (json!({"type": "object", "additionalProperties": {"items": nested}}), json!({"a": vec!["x"; 1_000_000]})),
            (list, json!({"a": deep})),
        ];
        for (value, arguments) in rows {
            let begun = std::time::Instant::now();
            let said = schema(&value).unwrap().check(&arguments);
            let took = begun.elapsed();
            assert!(said.as_ref().is_err_and(|why| why.starts_with("arguments at /a")), "{said:?}");
            assert!(took < std::time::Duration::from_secs(60), "{took:?}");
        }
    }

    #[test]
    fn checks_parameters_against_the_schema() {
        let schema = json!({"type": "object", "additionalProperties": true, "properties": {
            "any": {},
            "text": {"type": "string"},
            "order": {"type": "object", "properties": {"id": {"type": "string"}}},
            "open": {"type": "object", "additionalProperties": true, "properties": {"id": {}}},
            "shut": {"type": "object", "additionalProperties": false, "properties": {"id": {}}},
            "items": {"type": "array", "items": {"type": "object", "properties": {"sku": {}}}},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "object"}},
        }});
        let rows = [
            ("text", true),
            ("none", false),
            ("text.x", false),
            ("any.x.y", true),
            ("order.id", true),
            ("order.none", false),
            ("order.id.x", false),
            ("open.none.x", true),
            ("shut.none", false),
            ("items.0.sku", true),
            ("items.0.none", false),
            ("items.first", false),
            ("pair.0.x", false),
            ("pair.1.x", true),
        ];
        for (path, want) in rows {
            let reference = Reference(path.split('.').map(str::to_owned).collect());
            assert_eq!(declares(&schema, &reference).is_ok(), want, "{path}");
        }
    }
}
