//! Classifies a payload by its shape.

use serde_json::{Map, Value};

/// An action.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A registered tool.
    Tool { name: String, input: Value },
    /// A script of mk8.shell.
    Script { resource: String, sandbox: String, script: Value },
    /// A command line for an interpreter.
    Shell { resource: String, shell: String, command: String },
    /// A transcription from an audio device.
    Transcription,
    /// An action that is not implemented, with its name if known.
    Stub(Option<&'static str>),
}

/// Permissions for the agent as a whole.
const GLOBAL: [&str; 4] = ["create_sub_agent", "create_container", "register_info_store", "edit_any_task"];
/// Permissions for one resource.
const OF_ONE: [&str; 8] = [
    "access_local_info_store",
    "access_external_info_store",
    "access_website",
    "query_search_engine",
    "access_container",
    "manage_agent",
    "edit_task",
    "access_skill",
];
const HEARING: [&str; 2] = ["transcribe_from_audio_stream", "transcribe_from_audio_file"];
const SHELLS: [&str; 4] = ["Bash", "PowerShell", "CommandPrompt", "Git"];

/// The type of a member.
#[derive(Clone, Copy)]
enum Is {
    Guid,
    Object,
    Shell,
    Text,
}

#[derive(Clone, Copy)]
enum Kind {
    Tool,
    Script,
    Shell,
    Transcription,
    Permission,
}

/// The shape of a payload. It is recognized by a member that no other shape has.
struct Shape {
    kind: Kind,
    marks: &'static [&'static str],
    required: &'static [(&'static str, Is)],
    optional: &'static [(&'static str, Is)],
    expected: &'static str,
}

const SHAPES: [Shape; 5] = [
    Shape {
        kind: Kind::Tool,
        marks: &["tool"],
        required: &[("tool", Is::Text)],
        optional: &[("input", Is::Object)],
        expected: r#"{"tool":"<name>","input":{...}}"#,
    },
    Shape {
        kind: Kind::Script,
        marks: &["sandboxId", "script"],
        required: &[("resourceId", Is::Guid), ("sandboxId", Is::Text), ("script", Is::Object)],
        optional: &[],
        expected: r#"{"resourceId":"<guid>","sandboxId":"<name>","script":{...}}"#,
    },
    Shape {
        kind: Kind::Shell,
        marks: &["shellType", "command"],
        required: &[("resourceId", Is::Guid), ("shellType", Is::Shell), ("command", Is::Text)],
        optional: &[],
        expected: r#"{"resourceId":"<guid>","shellType":"Bash|PowerShell|CommandPrompt|Git","command":"<text>"}"#,
    },
    Shape {
        kind: Kind::Transcription,
        marks: &["transcriptionModelId"],
        required: &[("targetId", Is::Guid), ("transcriptionModelId", Is::Guid)],
        optional: &[("language", Is::Text), ("action", Is::Text)],
        expected: r#"{"targetId":"<guid>","transcriptionModelId":"<guid>","language"?:"<tag>","action"?:"<name>"}"#,
    },
    Shape {
        kind: Kind::Permission,
        marks: &[],
        required: &[],
        optional: &[("targetId", Is::Guid), ("action", Is::Text)],
        expected: r#"{"action"?:"<name>"} or {"targetId":"<guid>","action"?:"<name>"}"#,
    },
];

impl Is {
    fn admits(self, value: &Value) -> bool {
        match self {
            Self::Guid => value.as_str().is_some_and(is_guid),
            Self::Object => value.is_object(),
            Self::Shell => value.as_str().is_some_and(|text| SHELLS.contains(&text)),
            Self::Text => value.as_str().is_some_and(|text| !text.is_empty()),
        }
    }
}

impl Shape {
    fn is_meant(&self, payload: &Map<String, Value>) -> bool {
        self.marks.is_empty() || self.marks.iter().any(|mark| payload.contains_key(*mark))
    }

    fn admits(&self, payload: &Map<String, Value>) -> bool {
        let known = |name: &String, value: &Value| {
            self.required.iter().chain(self.optional).any(|(known, is)| known == name && is.admits(value))
        };
        payload.iter().all(|(name, value)| known(name, value))
            && self.required.iter().all(|(name, _)| payload.contains_key(*name))
    }
}

/// Parses a payload. The error states what is expected and repeats nothing of the payload.
pub(super) fn read(payload: &Value) -> Result<Action, String> {
    let unknown = || "a payload is a JSON object".to_owned();
    let payload = payload.as_object().ok_or_else(unknown)?;
    let shape = SHAPES.iter().find(|shape| shape.is_meant(payload)).ok_or_else(unknown)?;
    let expected = || format!("the payload is not as expected: {}", shape.expected);
    if !shape.admits(payload) {
        return Err(expected());
    }
    let text = |name: &str| payload.get(name).and_then(Value::as_str);
    let owned = |name: &str| text(name).unwrap_or_default().to_owned();
    let value = |name: &str| payload.get(name).cloned().unwrap_or_default();
    Ok(match shape.kind {
        Kind::Tool => Action::Tool { name: owned("tool"), input: value("input") },
        Kind::Script => {
            Action::Script { resource: owned("resourceId"), sandbox: owned("sandboxId"), script: value("script") }
        }
        Kind::Shell => {
            Action::Shell { resource: owned("resourceId"), shell: owned("shellType"), command: owned("command") }
        }
        Kind::Transcription => match text("action") {
            None => Action::Transcription,
            Some(name) => Action::Stub(Some(among(&HEARING, name).ok_or_else(expected)?)),
        },
        Kind::Permission => Action::Stub(permission(text("action"), text("targetId").is_some())?),
    })
}

/// Returns the named action, if there is one.
fn permission(name: Option<&str>, has_target: bool) -> Result<Option<&'static str>, String> {
    let Some(name) = name else { return Ok(None) };
    if let Some(known) = among(&HEARING, name) {
        return Ok(Some(known));
    }
    match (among(&GLOBAL, name), among(&OF_ONE, name)) {
        (Some(known), _) if !has_target => Ok(Some(known)),
        (_, Some(known)) if has_target => Ok(Some(known)),
        (Some(known), _) => Err(format!("'{known}' takes no targetId")),
        (_, Some(known)) => Err(format!("'{known}' takes a targetId")),
        (None, None) => {
            let all = [&GLOBAL[..], &OF_ONE, &HEARING].concat().join(", ");
            Err(format!("unknown action; the actions are {all}"))
        }
    }
}

fn among(names: &'static [&'static str], name: &str) -> Option<&'static str> {
    names.iter().find(|known| **known == name).copied()
}

/// Whether a text is a GUID: five groups of hexadecimal digits.
fn is_guid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| group.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GUID: &str = "6F9619FF-8b86-d011-b42d-00cf4fc964ff";

    #[test]
    fn the_shape_determines_the_action() {
        let stub = |name| Ok(Action::Stub(name));
        let rows = [
            (json!({"tool": "http_get"}), Ok(Action::Tool { name: "http_get".to_owned(), input: Value::Null })),
            (
                json!({"resourceId": GUID, "shellType": "Bash", "command": "id"}),
                Ok(Action::Shell { resource: GUID.to_owned(), shell: "Bash".to_owned(), command: "id".to_owned() }),
            ),
            (json!({"targetId": GUID, "transcriptionModelId": GUID, "language": "en"}), Ok(Action::Transcription)),
            (json!({}), stub(None)),
            (json!({"targetId": GUID}), stub(None)),
            (json!({"action": "create_container"}), stub(Some("create_container"))),
            (json!({"targetId": GUID, "action": "edit_task"}), stub(Some("edit_task"))),
            (
                json!({"targetId": GUID, "action": "transcribe_from_audio_file"}),
                stub(Some("transcribe_from_audio_file")),
            ),
        ];
        for (payload, want) in rows {
            assert_eq!(read(&payload), want, "{payload}");
        }
        for name in GLOBAL {
            assert_eq!(read(&json!({"action": name})), stub(Some(name)));
            assert!(read(&json!({"action": name, "targetId": GUID})).is_err());
        }
        for name in OF_ONE {
            assert_eq!(read(&json!({"action": name, "targetId": GUID})), stub(Some(name)));
            assert!(read(&json!({"action": name})).is_err());
        }
    }

    #[test]
    fn an_unknown_shape_gets_an_error_with_the_expected_ones() {
        let rows = [
            (json!([]), "a payload is a JSON object"),
            (json!({"tool": 1}), r#"{"tool":"<name>""#),
            (json!({"tool": "x", "input": "y"}), r#"{"tool":"<name>""#),
            (json!({"tool": "x", "sandboxId": "y"}), r#"{"tool":"<name>""#),
            (json!({"sandboxId": "t", "script": {}}), r#"{"resourceId":"<guid>","sandboxId""#),
            (json!({"resourceId": "1", "sandboxId": "t", "script": {}}), r#"{"resourceId":"<guid>","sandboxId""#),
            (json!({"resourceId": GUID, "shellType": "zsh", "command": "id"}), "Bash|PowerShell"),
            (json!({"command": "id"}), "Bash|PowerShell"),
            (json!({"targetId": 1, "transcriptionModelId": GUID}), "transcriptionModelId"),
            (json!({"targetId": GUID, "transcriptionModelId": GUID, "action": "x"}), "transcriptionModelId"),
            (json!({"targetId": "x"}), r#"{"targetId":"<guid>""#),
            (json!({"approved": true}), r#"{"targetId":"<guid>""#),
            (json!({"action": "x"}), "create_sub_agent, "),
        ];
        for (payload, want) in rows {
            let text = read(&payload).unwrap_err();
            assert!(text.contains(want), "{payload}: {text}");
        }
        for text in [
            "",
            "x",
            "6f9619ff8b86d011b42d00cf4fc964ff",
            "{6F9619FF-8b86-d011-b42d-00cf4fc964ff}",
            "6F9619FF-8b86-d011-b42d-00cf4fc964fg",
        ] {
            assert!(!is_guid(text), "{text}");
        }
    }
}
