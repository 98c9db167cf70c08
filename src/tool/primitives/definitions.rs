//! The names of the primitives that work in a sandbox, with what a model is told about each.

use serde_json::{Map, Value, json};

/// The greatest number of a line.
pub(super) const MAX_LINES: u64 = 10_000_000;
/// Maximum number of directories, one in the other, of a list.
pub(in crate::tool) const MAX_DEPTH: u64 = 10;
/// Maximum time of a program, in seconds.
pub(super) const MAX_SECONDS: u64 = 3600;
/// The usual time of a program, in seconds.
pub(super) const USUAL_SECONDS: u64 = 300;

/// A primitive that works in a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tool) enum Primitive {
    Submit,
    ReadFile,
    WriteFile,
    ListFiles,
    SearchFiles,
    SearchText,
    QueryJson,
    QuerySql,
    RunTests,
    Build,
    Exec,
}

impl Primitive {
    /// All of them, in the order in which they are offered.
    pub(in crate::tool) const ALL: [Self; 11] = [
        Self::Submit,
        Self::ReadFile,
        Self::WriteFile,
        Self::ListFiles,
        Self::SearchFiles,
        Self::SearchText,
        Self::QueryJson,
        Self::QuerySql,
        Self::RunTests,
        Self::Build,
        Self::Exec,
    ];

    /// Returns the primitive of this name.
    pub(in crate::tool) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|primitive| primitive.name() == name)
    }

    /// Returns its name.
    pub(in crate::tool) fn name(self) -> &'static str {
        match self {
            Self::Submit => "submit",
            Self::ReadFile => "read_file",
            Self::WriteFile => "write_file",
            Self::ListFiles => "list_files",
            Self::SearchFiles => "search_files",
            Self::SearchText => "search_text",
            Self::QueryJson => "query_json",
            Self::QuerySql => "query_sql",
            Self::RunTests => "run_tests",
            Self::Build => "build",
            Self::Exec => "exec",
        }
    }

    /// Returns the description for a model.
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Submit => "Submit your final answer. Call it once, when you are done.",
            Self::ReadFile => "Read a text file of the workspace, or some of its lines.",
            Self::WriteFile => {
                "Write a text file of the workspace. It replaces the file as a whole, and directories that are missing are created."
            }
            Self::ListFiles => "List the files and directories in a directory of the workspace.",
            Self::SearchFiles => "Find files of the workspace by their names.",
            Self::SearchText => "Find lines in the text files of the workspace by a regular expression.",
            Self::QueryJson => "Read values from a JSON file of the workspace by a JSONPath (RFC 9535).",
            Self::QuerySql => {
                "Run one SQL statement on an SQLite database of the workspace. The answer has the columns and rows as JSON."
            }
            Self::RunTests => "Run the tests of the workspace.",
            Self::Build => "Build the workspace.",
            Self::Exec => "Run a program in the workspace. There is no shell: only the listed commands are run.",
        }
    }

    /// Returns the JSON Schema of the arguments.
    pub(in crate::tool) fn schema(self) -> Value {
        let path = |what: &str| json!({ "type": "string", "description": format!("Path relative to the workspace, of {what}") });
        let text = |what: &str| json!({ "type": "string", "description": what });
        let number =
            |what: &str, most: u64| json!({ "type": "integer", "minimum": 1, "maximum": most, "description": what });
        let (properties, required): (Value, &[&str]) = match self {
            Self::Submit => (json!({ "answer": { "description": "The final answer" } }), &["answer"]),
            Self::ReadFile => (
                json!({
                    "path": path("the file"),
                    "offset": number("The first line, from 1", MAX_LINES),
                    "limit": number("The number of lines", MAX_LINES),
                }),
                &["path"],
            ),
            Self::WriteFile => {
                (json!({ "path": path("the file"), "content": text("The whole content") }), &["path", "content"])
            }
            Self::ListFiles => (
                json!({
                    "path": path("the directory; the workspace if it is left out"),
                    "depth": number("How many directories deep; 1 if it is left out", MAX_DEPTH),
                }),
                &[],
            ),
            Self::SearchFiles => (
                json!({
                    "pattern": text("Name with * and ?, such as *.md; with a /, it is compared with the path beneath the directory, and ** stands for any directories"),
                    "path": path("the directory; the workspace if it is left out"),
                }),
                &["pattern"],
            ),
            Self::SearchText => (
                json!({
                    "pattern": text("Regular expression, without look-around and back-references"),
                    "path": path("the file or directory; the workspace if it is left out"),
                    "files": text("Names of the files to search, such as *.md, whatever their directories"),
                }),
                &["pattern"],
            ),
            Self::QueryJson => (
                json!({ "path": path("the file"), "query": text("JSONPath, such as $.items[0].name") }),
                &["path", "query"],
            ),
            Self::QuerySql => (
                json!({
                    "path": path("the database"),
                    "query": text("One SQL statement, with ? for each parameter"),
                    "params": {
                        "type": "array", "maxItems": 256, "items": { "type": ["string", "number", "boolean", "null"] },
                        "description": "Values of the parameters",
                    },
                }),
                &["path", "query"],
            ),
            Self::RunTests | Self::Build | Self::Exec => (
                json!({
                    "command": {
                        "type": "array", "minItems": 1, "maxItems": 256, "items": { "type": "string" },
                        "description": "The program and its arguments, one string each",
                    },
                    "timeout": number(&format!("Seconds that it may take; {USUAL_SECONDS} if it is left out"), MAX_SECONDS),
                }),
                if self == Self::Exec { &["command"] } else { &[] },
            ),
        };
        json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
    }

    /// Returns the names of the arguments.
    pub(in crate::tool) fn arguments(self) -> Vec<String> {
        let schema = self.schema();
        let properties = schema.get("properties").and_then(Value::as_object).map(Map::keys);
        properties.into_iter().flatten().cloned().collect()
    }

    /// Returns the names of the arguments that are required.
    pub(in crate::tool) fn required(self) -> Vec<String> {
        let schema = self.schema();
        let required = schema.get("required").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        required.iter().filter_map(Value::as_str).map(str::to_owned).collect()
    }
}
