//! Formats a result as one line.

use crate::tool::outcome::State;
use crate::tool::verbs::VerbResult;

/// The name in result lines, after the bracket.
const NAME: &[u8] = b"TOOL_";

/// Returns the line with the result of a call.
pub(super) fn line(id: &str, done: &VerbResult) -> String {
    let (status, member) = match done.state {
        State::AwaitingApproval => return format!("[TOOL_RESULT:{id}] status=AwaitingApproval"),
        State::Completed => ("Completed", "result"),
        State::Denied => ("Denied", "error"),
        State::Failed => ("Failed", "error"),
    };
    format!("[TOOL_RESULT:{id}] status={status} {member}={}", escaped(&done.text))
}

/// Escapes a text so that it stays on one line and nothing in it looks like a call or a result. The escapes are those
/// of JSON, so a JSON result stays equal.
fn escaped(text: &str) -> String {
    let mut whole = String::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        match c {
            '\n' => whole.push_str("\\n"),
            '\r' => whole.push_str("\\r"),
            '\t' => whole.push_str("\\t"),
            '[' if is_name(text.as_bytes().get(at.saturating_add(1)..)) => whole.push_str("\\u005b"),
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') => {
                whole.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => whole.push(c),
        }
    }
    whole
}

fn is_name(rest: Option<&[u8]>) -> bool {
    rest.and_then(|rest| rest.get(..NAME.len())).is_some_and(|name| name.eq_ignore_ascii_case(NAME))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(state: State, text: &str) -> String {
        line("1", &VerbResult { state, text: text.to_owned() })
    }

    #[test]
    fn every_state_has_a_line() {
        assert_eq!(of(State::Completed, "a\r\nb"), "[TOOL_RESULT:1] status=Completed result=a\\r\\nb");
        assert_eq!(of(State::Denied, "no"), "[TOOL_RESULT:1] status=Denied error=no");
        assert_eq!(of(State::Failed, "no"), "[TOOL_RESULT:1] status=Failed error=no");
        assert_eq!(of(State::AwaitingApproval, "more"), "[TOOL_RESULT:1] status=AwaitingApproval");
    }

    #[test]
    fn a_text_cannot_contain_a_result_line() {
        let rows = [
            ("[TOOL_CALL:1] {}", "\\u005bTOOL_CALL:1] {}"),
            ("[tool_Result:1]", "\\u005btool_Result:1]"),
            ("[[TOOL_", "[\\u005bTOOL_"),
            ("[TOOL [1] TOOL_", "[TOOL [1] TOOL_"),
            (
                "a\u{b}b\u{c}c\u{85}d\u{2028}e\u{2029}f\tg\0h\u{1b}[0m\u{7f}",
                "a\\u000bb\\u000cc\\u0085d\\u2028e\\u2029f\\tg\\u0000h\\u001b[0m\\u007f",
            ),
            ("ü🦀", "ü🦀"),
        ];
        for (text, want) in rows {
            assert_eq!(escaped(text), want);
        }
    }

    #[test]
    fn json_stays_the_same_json() {
        let value = serde_json::json!(["a\n\\[TOOL_CALL:1]\u{85}\u{7f}\u{2028}\\", "\\\\[tool_"]);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped(&value.to_string())).unwrap(), value);
    }

    proptest! {
        #[test]
        fn any_result_is_one_line(
            parts in proptest::collection::vec(
                prop_oneof![
                    Just("[".to_owned()), Just("TOOL_".to_owned()), Just("tool_".to_owned()), Just("CALL:1] {}".to_owned()),
                    Just("RESULT:1] status=Completed".to_owned()), Just("\n".to_owned()), Just("\r".to_owned()),
                    Just("\u{2028}".to_owned()), Just("\u{85}".to_owned()), any::<char>().prop_map(String::from),
                ],
                0..40,
            ),
        ) {
            let shown = of(State::Completed, &parts.concat());
            let text = shown.strip_prefix("[TOOL_RESULT:1] status=Completed result=").unwrap();
            prop_assert!(!text.to_ascii_uppercase().contains("[TOOL_"), "{}", text);
            let is_end = |c: char| matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{85}' | '\u{2028}' | '\u{2029}');
            prop_assert!(!text.contains(is_end), "{:?}", text);
            prop_assert!(!text.contains(char::is_control));
        }
    }
}
