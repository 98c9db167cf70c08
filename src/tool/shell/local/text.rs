//! `Text*`: texts.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::hash::hashed;
use super::{Args, MAX_OUTPUT, Output, failed, pattern, truth};

/// The characters that RFC 3986 reserves for nothing stay as they are.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const MAX_REPEATS: usize = 256;
const MAX_WIDTH: usize = 10_000;
const MAX_COLUMN: usize = 100;
const MAX_PARTS: usize = 33;

pub(super) fn run(verb: &str, args: Args<'_>) -> Option<Output> {
    let (input, second) = (args.text(0), args.text(1));
    let done = |text: &str| Ok(text.to_owned());
    Some(match verb {
        "TextRegex" => pattern(second).map(|pattern| joined(pattern.find_iter(input).map(|found| found.as_str()))),
        "TextMatch" => pattern(second).and_then(|pattern| truth(pattern.is_match(input))),
        "TextRegexGroups" => groups(input, second),
        "TextReplace" => replaced(input, second, args.text(2)),
        "TextRemove" => replaced(input, second, ""),
        "TextSplit" if second.is_empty() => failed("the delimiter is not empty"),
        "TextSplit" => Ok(joined(input.split(second))),
        "TextJoin" if !(2..=MAX_PARTS).contains(&args.0.len()) => failed("TextJoin takes 1 to 32 parts"),
        "TextJoin" => Ok(args.0.get(1..).unwrap_or_default().join(input)),
        "TextTrim" => done(input.trim()),
        "TextLength" => Ok(input.chars().count().to_string()),
        "TextSubstring" => substring(args),
        "TextLines" => Ok(format!("{}\n{input}", input.lines().count())),
        "TextToUpper" => Ok(input.to_uppercase()),
        "TextToLower" => Ok(input.to_lowercase()),
        "TextBase64Encode" => Ok(STANDARD.encode(input)),
        "TextBase64Decode" => {
            let bytes = STANDARD.decode(input.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            bytes.map_or_else(|| failed("not the Base64 of a UTF-8 text"), Ok)
        }
        "TextUrlEncode" => Ok(utf8_percent_encode(input, ENCODED).to_string()),
        "TextUrlDecode" => match percent_decode_str(input).decode_utf8() {
            Ok(text) => done(&text),
            Err(_) => failed("not the percent-encoding of a UTF-8 text"),
        },
        "TextHtmlEncode" => Ok(html(input)),
        "TextContains" => truth(input.contains(second)),
        "TextStartsWith" => truth(input.starts_with(second)),
        "TextEndsWith" => truth(input.ends_with(second)),
        "TextHash" => hashed(input.as_bytes(), args.optional(1)),
        "TextSort" => sorted(input, args.optional(1)),
        "TextUniq" => {
            let mut lines: Vec<&str> = input.lines().collect();
            lines.dedup();
            Ok(joined(lines.into_iter()))
        }
        "TextCount" => Ok(match args.optional(1) {
            Some("") => return Some(failed("the text to count is not empty")),
            Some(substring) => input.matches(substring).count().to_string(),
            None => format!(
                "lines: {}\nwords: {}\ncharacters: {}",
                input.lines().count(),
                input.split_whitespace().count(),
                input.chars().count()
            ),
        }),
        "TextIndexOf" => Ok(position(input, input.find(second))),
        "TextLastIndexOf" => Ok(position(input, input.rfind(second))),
        "TextWordCount" => Ok(input.split_whitespace().count().to_string()),
        "TextReverse" => Ok(input.chars().rev().collect()),
        "TextPadLeft" => padding(args).map(|padding| format!("{padding}{input}")),
        "TextPadRight" => padding(args).map(|padding| format!("{input}{padding}")),
        "TextRepeat" => repeated(args),
        "TextColumn" => column(args),
        "TextTable" => table(input, args.optional(1).unwrap_or("\t")),
        _ => return None,
    })
}

fn joined<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    lines.collect::<Vec<_>>().join("\n")
}

/// The groups of the first match as a JSON object, by number and by name.
fn groups(input: &str, text: &str) -> Output {
    let pattern = pattern(text)?;
    let mut groups = serde_json::Map::new();
    if let Some(found) = pattern.captures(input) {
        for (index, (name, group)) in pattern.capture_names().zip(found.iter()).enumerate() {
            let value = group.map(|group| group.as_str().to_owned());
            groups.insert(name.map_or_else(|| index.to_string(), str::to_owned), value.into());
        }
    }
    Ok(serde_json::Value::Object(groups).to_string())
}

fn replaced(input: &str, old: &str, new: &str) -> Output {
    if old.is_empty() {
        return failed("the text to replace is not empty");
    }
    let count = input.matches(old).count();
    let size = input.len().saturating_add(count.saturating_mul(new.len()));
    if size.saturating_sub(count.saturating_mul(old.len())) > MAX_OUTPUT {
        return failed(format!("the output has more than {MAX_OUTPUT} bytes"));
    }
    Ok(input.replace(old, new))
}

fn substring(args: Args<'_>) -> Output {
    let input = args.text(0);
    let start = args.number(1, "start", 0..=usize::MAX, None)?;
    let length = args.number(2, "len", 0..=usize::MAX, Some(usize::MAX))?;
    if start > input.chars().count() {
        return failed("start is beyond the end of the text");
    }
    Ok(input.chars().skip(start).take(length).collect())
}

fn html(input: &str) -> String {
    let mut text = String::with_capacity(input.len());
    for c in input.chars() {
        match c {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            '"' => text.push_str("&quot;"),
            '\'' => text.push_str("&#39;"),
            c => text.push(c),
        }
    }
    text
}

fn sorted(input: &str, direction: Option<&str>) -> Output {
    let mut lines: Vec<&str> = input.lines().collect();
    match direction {
        None | Some("asc") => lines.sort_unstable(),
        Some("desc") => lines.sort_unstable_by(|a, b| b.cmp(a)),
        Some("numeric") => {
            // Lines without a number come last, as they are.
            let number = |line: &str| line.trim().parse::<f64>().unwrap_or(f64::INFINITY);
            lines.sort_by(|a, b| number(a).total_cmp(&number(b)));
        }
        Some(_) => return failed("the direction is asc, desc or numeric"),
    }
    Ok(joined(lines.into_iter()))
}

/// Returns the position in characters, or -1.
fn position(input: &str, found: Option<usize>) -> String {
    let before = found.and_then(|at| input.get(..at));
    before.map_or_else(|| "-1".to_owned(), |before| before.chars().count().to_string())
}

fn padding(args: Args<'_>) -> Output {
    let width = args.number(1, "width", 0..=MAX_WIDTH, None)?;
    let mut fill = args.optional(2).unwrap_or(" ").chars();
    let (Some(fill), None) = (fill.next(), fill.next()) else { return failed("char is one character") };
    if fill.is_control() {
        return failed("char is a printable character");
    }
    Ok(std::iter::repeat_n(fill, width.saturating_sub(args.text(0).chars().count())).collect())
}

fn repeated(args: Args<'_>) -> Output {
    let count = args.number(1, "count", 0..=MAX_REPEATS, None)?;
    if args.text(0).len().saturating_mul(count) > MAX_OUTPUT {
        return failed(format!("the output has more than {MAX_OUTPUT} bytes"));
    }
    Ok(args.text(0).repeat(count))
}

fn column(args: Args<'_>) -> Output {
    let index = args.number(1, "colIndex", 0..=MAX_COLUMN, None)?;
    let cell = |line: &'_ str| -> Option<String> {
        match args.optional(2).filter(|delimiter| !delimiter.is_empty()) {
            Some(delimiter) => line.split(delimiter).nth(index).map(str::to_owned),
            None => line.split_whitespace().nth(index).map(str::to_owned),
        }
    };
    Ok(args.text(0).lines().map(|line| cell(line).unwrap_or_default()).collect::<Vec<_>>().join("\n"))
}

/// Pads the cells of each column to its width.
fn table(input: &str, delimiter: &str) -> Output {
    if delimiter.is_empty() {
        return failed("the delimiter is not empty");
    }
    let rows: Vec<Vec<&str>> = input.lines().map(|line| line.split(delimiter).collect()).collect();
    let mut widths: Vec<usize> = Vec::new();
    for row in &rows {
        for (index, cell) in row.iter().enumerate() {
            let width = cell.chars().count();
            match widths.get_mut(index) {
                Some(most) => *most = width.max(*most),
                None => widths.push(width),
            }
        }
    }
    let width: usize = widths.iter().map(|width| width.saturating_add(2)).sum();
    if width.saturating_mul(rows.len()) > MAX_OUTPUT {
        return failed(format!("the output has more than {MAX_OUTPUT} bytes"));
    }
    let line = |row: &Vec<&str>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| {
            let blanks = width.saturating_sub(cell.chars().count());
            format!("{cell}{}", " ".repeat(blanks))
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    Ok(rows.iter().map(line).collect::<Vec<_>>().join("\n"))
}
