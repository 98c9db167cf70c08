//! The arguments of `query_sql` for the confined process: all are texts.

use serde_json::Value;

/// The mode in which a statement may change the database.
pub(in crate::tool) const WRITE: &str = "write";
/// The mode in which it may not.
pub(in crate::tool) const READ: &str = "read";

/// The index of the first parameter among the arguments.
pub(in crate::tool) const FIRST_PARAMETER: usize = 3;
/// The beginning of an error of SQLite, whose text a database can choose.
pub(in crate::tool) const ERROR: &str = "SQLite: ";

/// Returns a parameter of a statement: a letter for its type, and its text. `None` for a list, an object and a whole number that SQLite
/// cannot hold.
pub(super) fn parameter(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("n".to_owned()),
        Value::Bool(truth) => Some(format!("i{}", u8::from(*truth))),
        Value::Number(number) if number.is_i64() => Some(format!("i{number}")),
        Value::Number(number) if number.is_u64() => None,
        Value::Number(number) => Some(format!("f{number}")),
        Value::String(text) => Some(format!("t{text}")),
        Value::Array(_) | Value::Object(_) => None,
    }
}
