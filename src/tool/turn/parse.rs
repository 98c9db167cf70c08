//! Parses the calls in a model's message.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::Value;

use super::unique;

/// Maximum number of calls in one message.
const MAX_CALLS: usize = 256;
/// Maximum length of an id, in characters.
const MAX_ID: usize = 64;
/// The start of a line with a call.
const OPEN: &str = "[TOOL_CALL:";
/// Replaces an invalid id.
const NO_ID: &str = "?";
const BLANK: [char; 2] = [' ', '\t'];

/// A call as written.
#[derive(Debug)]
pub(super) struct Block<'a> {
    /// The id for the answer.
    pub(super) id: &'a str,
    /// The payload.
    pub(super) payload: Result<Value, Malformed>,
    /// The range of its lines.
    lines: Range<usize>,
}

/// Why a call is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("something follows the JSON object; a call stands on a line of its own")]
    Behind,
    #[error("the id is not 1 to {MAX_ID} visible ASCII characters without '[' and ']'")]
    Id,
    #[error("what follows the id is not valid JSON, or has a member twice")]
    Json,
    #[error("no JSON object follows the id on its line")]
    NoObject,
    #[error("another call of this message has the same id")]
    SameId,
    #[error("a message may have {MAX_CALLS} calls, and this is one more")]
    TooMany,
    #[error("the JSON object has no end: its braces or quotes are not balanced")]
    Unbalanced,
}

/// Returns the calls of a message, in order. Everything that is not on a line of its own is text.
pub(super) fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut ids = HashSet::new();
    let mut at = 0;
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        let length = match block(rest) {
            None => line(rest).len(),
            Some((id, payload, length)) => {
                let payload = match payload {
                    Err(Malformed::Id) => Err(Malformed::Id),
                    _ if !ids.insert(id) => Err(Malformed::SameId),
                    Ok(_) if blocks.len() >= MAX_CALLS => Err(Malformed::TooMany),
                    payload => payload,
                };
                blocks.push(Block { id, payload, lines: at..at.saturating_add(length) });
                length
            }
        };
        at = at.saturating_add(length);
    }
    blocks
}

/// Returns the message without its calls, for people.
pub(super) fn without_calls(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut at = 0;
    for block in blocks(text) {
        kept.push_str(text.get(at..block.lines.start).unwrap_or_default());
        at = block.lines.end;
    }
    kept.push_str(text.get(at..).unwrap_or_default());
    kept
}

/// Parses the call that a text begins with. Returns its id, its payload and its length.
fn block(text: &str) -> Option<(&str, Result<Value, Malformed>, usize)> {
    let first = line(text);
    let begun = opened(first)?;
    let Some((id, _)) = begun.split_once(']').filter(|(id, _)| is_id(id)) else {
        return Some((NO_ID, Err(Malformed::Id), first.len()));
    };
    let json = begun.get(id.len().saturating_add(1)..).unwrap_or_default().trim_start_matches(BLANK);
    if !json.starts_with('{') {
        return Some((id, Err(Malformed::NoObject), first.len()));
    }
    let begin = first.len().saturating_sub(json.len());
    let rest = text.get(begin..).unwrap_or_default();
    let Some((object, behind)) = object(rest).and_then(|length| rest.split_at_checked(length)) else {
        return Some((id, Err(Malformed::Unbalanced), first.len()));
    };
    let behind = line(behind);
    let payload = match unique::from_str(object) {
        _ if !behind.trim().is_empty() => Err(Malformed::Behind),
        Ok(payload) => Ok(payload),
        Err(_) => Err(Malformed::Json),
    };
    Some((id, payload, begin.saturating_add(object.len()).saturating_add(behind.len())))
}

/// Returns the text after the opening of a call, if the line is one.
fn opened(line: &str) -> Option<&str> {
    line.trim_start_matches(BLANK).strip_prefix(OPEN)
}

/// Returns the first line of a text, including its line end.
fn line(text: &str) -> &str {
    text.split_inclusive('\n').next().unwrap_or_default()
}

fn is_id(text: &str) -> bool {
    (1..=MAX_ID).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic() && b != b'[')
}

/// Returns the length of the object that a text begins with. A string that contains a line break, and a line that
/// begins another call, are never part of it, so an unclosed object does not include what follows.
fn object(text: &str) -> Option<usize> {
    let (mut depth, mut is_text, mut is_escaped) = (0_usize, false, false);
    for (at, byte) in text.bytes().enumerate() {
        let next = at.saturating_add(1);
        match byte {
            _ if is_escaped && byte != b'\n' => is_escaped = false,
            b'\n' if is_text || opened(line(text.get(next..).unwrap_or_default())).is_some() => return None,
            b'"' => is_text = !is_text,
            b'\\' if is_text => is_escaped = true,
            b'{' if !is_text => depth = depth.saturating_add(1),
            b'}' if !is_text => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return Some(next);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Vec<(&str, Result<Value, Malformed>)> {
        blocks(text).into_iter().map(|block| (block.id, block.payload)).collect()
    }

    #[test]
    fn a_call_is_a_line_of_its_own() {
        type Row = (&'static str, Vec<(&'static str, Result<Value, Malformed>)>);
        let a = || json!({"a": 1});
        let rows: Vec<Row> = vec![
            ("", vec![]),
            ("no call\nat all", vec![]),
            ("[TOOL_CALL:1] {\"a\":1}", vec![("1", Ok(a()))]),
            ("Let me look.\n\n  \t[TOOL_CALL:x-1]{\"a\":1} \t\r\nSo.", vec![("x-1", Ok(a()))]),
            ("```\n[TOOL_CALL:1] {\"a\":1}\n```\n", vec![("1", Ok(a()))]),
            ("[TOOL_CALL:1] {\n  \"a\": 1\n}\n[TOOL_CALL:2] {}", vec![("1", Ok(a())), ("2", Ok(json!({})))]),
            ("[TOOL_CALL:1] {\"a\":\"}{\\\"}\\\\\"}", vec![("1", Ok(json!({"a": "}{\"}\\"})))]),
            // After other text on the line, it is plain text.
            ("I shall write [TOOL_CALL:1] {\"a\":1}", vec![]),
            ("> [TOOL_CALL:1] {\"a\":1}\n[tool_call:1] {}\n[TOOL_CALL 1] {}", vec![]),
            ("[TOOL_CALL:1]", vec![("1", Err(Malformed::NoObject))]),
            ("[TOOL_CALL:1] [1]", vec![("1", Err(Malformed::NoObject))]),
            ("[TOOL_CALL:1]\n{\"a\":1}", vec![("1", Err(Malformed::NoObject))]),
            ("[TOOL_CALL:1] {\"a\":1} {}", vec![("1", Err(Malformed::Behind))]),
            ("[TOOL_CALL:1] {\"a\":1}}", vec![("1", Err(Malformed::Behind))]),
            ("[TOOL_CALL:1] {} [TOOL_CALL:2] {}", vec![("1", Err(Malformed::Behind))]),
            ("[TOOL_CALL:1] {a:1}", vec![("1", Err(Malformed::Json))]),
            ("[TOOL_CALL:1] {\"a\":1", vec![("1", Err(Malformed::Unbalanced))]),
            (
                "[TOOL_CALL:1] {\"a\":\"\n[TOOL_CALL:2] {}",
                vec![("1", Err(Malformed::Unbalanced)), ("2", Ok(json!({})))],
            ),
            ("[TOOL_CALL:1] {\"a\":\"\\\n\"}", vec![("1", Err(Malformed::Unbalanced))]),
            (
                "[TOOL_CALL:1] {\"a\":\n [TOOL_CALL:2] {}}",
                vec![("1", Err(Malformed::Unbalanced)), ("2", Err(Malformed::Behind))],
            ),
            ("[TOOL_CALL:] {}", vec![("?", Err(Malformed::Id))]),
            ("[TOOL_CALL:a b] {}\n[TOOL_CALL:a b] {}", vec![("?", Err(Malformed::Id)), ("?", Err(Malformed::Id))]),
            ("[TOOL_CALL:[x] {}", vec![("?", Err(Malformed::Id))]),
            ("[TOOL_CALL:ü] {}", vec![("?", Err(Malformed::Id))]),
            ("[TOOL_CALL:1 {}", vec![("?", Err(Malformed::Id))]),
            ("[TOOL_CALL:?] {}\n[TOOL_CALL:?] {}", vec![("?", Ok(json!({}))), ("?", Err(Malformed::SameId))]),
            ("[TOOL_CALL:1] {}\n[TOOL_CALL:1] {}", vec![("1", Ok(json!({}))), ("1", Err(Malformed::SameId))]),
            (
                "[TOOL_CALL:1] {\n[TOOL_CALL:1] {}",
                vec![("1", Err(Malformed::Unbalanced)), ("1", Err(Malformed::SameId))],
            ),
        ];
        for (text, want) in rows {
            assert_eq!(read(text), want, "{text}");
        }
        let long = |n: usize| format!("[TOOL_CALL:{}] {{}}", "x".repeat(n));
        assert!(read(&long(64))[0].1.is_ok());
        assert_eq!(read(&long(65))[0].1, Err(Malformed::Id));
        let deep = format!("[TOOL_CALL:1] {}1{}", "{\"a\":".repeat(1000), "}".repeat(1000));
        assert_eq!(read(&deep), [("1", Err(Malformed::Json))]);
    }

    #[test]
    fn calls_over_the_limit_are_answered_too() {
        let text: String = (0..300).map(|n| format!("[TOOL_CALL:{n}] {{}}\n")).collect();
        let all = read(&text);
        assert_eq!(all.iter().filter(|(_, payload)| payload.is_ok()).count(), MAX_CALLS);
        assert_eq!((all.len(), &all[MAX_CALLS].1), (300, &Err(Malformed::TooMany)));
    }

    #[test]
    fn many_unclosed_calls_are_parsed_in_one_pass() {
        let text = "[TOOL_CALL:1] {\n{\n".repeat(50_000);
        assert_eq!(read(&text).len(), 50_000);
        assert_eq!(read(&format!("[TOOL_CALL:1] {}", "{".repeat(900_000))).len(), 1);
    }

    #[test]
    fn a_final_answer_has_no_calls() {
        let rows = [
            ("Done.\n", "Done.\n"),
            ("One.\n[TOOL_CALL:1] {\n\"a\":1\n}\nTwo.\n", "One.\nTwo.\n"),
            ("One.\n[TOOL_CALL:1] {\"a\":1} and more\nTwo.", "One.\nTwo."),
            ("One.\n[TOOL_CALL:1] {\"a\":\nTwo.\n", "One.\nTwo.\n"),
            ("One.\n[TOOL_CALL:a b] {}\n[TOOL_CALL", "One.\n[TOOL_CALL"),
        ];
        for (text, want) in rows {
            assert_eq!(without_calls(text), want, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_loses_no_call_and_no_byte(
            parts in proptest::collection::vec(
                prop_oneof![
                    Just("[TOOL_CALL:".to_owned()), Just("1]".to_owned()), Just("{".to_owned()), Just("}".to_owned()),
                    Just("\"".to_owned()), Just("\\".to_owned()), Just("\n".to_owned()), Just(" ".to_owned()), ".{0,3}",
                ],
                0..60,
            ),
        ) {
            let text = parts.concat();
            let found = blocks(&text);
            let mut at = 0;
            for block in &found {
                prop_assert!(block.lines.start >= at && block.lines.end > block.lines.start);
                prop_assert!(opened(line(&text[block.lines.clone()])).is_some());
                at = block.lines.end;
            }
            let left = without_calls(&text);
            let taken: usize = found.iter().map(|block| block.lines.len()).sum();
            prop_assert_eq!(left.len() + taken, text.len());
            prop_assert!(blocks(&left).is_empty(), "{:?}", left);
        }
    }
}
