//! The options of a script.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::tool::messages;

/// The options of a script that are supported.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// Whether operations continue after a failed one.
    pub(super) continues_on_error: bool,
    pub(super) of_script: Duration,
    pub(super) of_step: Duration,
    /// Maximum size of the outputs of all operations together, in bytes.
    pub(super) max_output: usize,
    /// Maximum size of the error of one operation, in bytes.
    pub(super) max_error: usize,
}

const MAX_OUTPUT: usize = 1_048_576;
const MAX_ERROR: usize = 262_144;

impl Default for Options {
    fn default() -> Self {
        Self {
            continues_on_error: false,
            of_script: Duration::from_secs(300),
            of_step: Duration::from_secs(30),
            max_output: MAX_OUTPUT,
            max_error: MAX_ERROR,
        }
    }
}

impl Options {
    pub(super) fn read(given: &Map<String, Value>) -> Result<Self, String> {
        let mut options = Self::default();
        for (name, value) in given.iter().filter(|(_, value)| !value.is_null()) {
            match (&**name, value) {
                ("failureMode", value) => options.continues_on_error = continues_on_error(value)?,
                ("scriptTimeout", value) => options.of_script = span(name, value)?,
                ("stepTimeout", value) => options.of_step = span(name, value)?,
                ("maxOutputBytes", value) => options.max_output = size(name, value, MAX_OUTPUT)?,
                ("maxErrorBytes", value) => options.max_error = size(name, value, MAX_ERROR)?,
                // The default value, so it may be written.
                ("maxRetries", value) if value.as_u64() == Some(0) => {}
                ("pipeStepOutput", Value::Bool(false)) => {}
                ("retryDelay", value) => {
                    span(name, value)?;
                }
                ("maxRetries" | "pipeStepOutput", _) => return Err(format!("the option '{name}' is not served here")),
                (name, _) => return Err(format!("unknown option '{}'", messages::name(name))),
            }
        }
        Ok(options)
    }
}

fn continues_on_error(mode: &Value) -> Result<bool, String> {
    match mode.as_str() {
        Some("StopOnFirstError") => Ok(false),
        Some("ContinueOnError") => Ok(true),
        Some("StopAndCleanup") => Err("the failureMode 'StopAndCleanup' is not served here".to_owned()),
        _ => Err("a failureMode is StopOnFirstError or ContinueOnError".to_owned()),
    }
}

fn size(name: &str, value: &Value, most: usize) -> Result<usize, String> {
    let size = value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| (1..=most).contains(size));
    size.ok_or_else(|| format!("{name} is a number from 1 to {most}"))
}

/// Parses a time as `hh:mm:ss`, from one second to less than a day.
pub(super) fn span(name: &str, value: &Value) -> Result<Duration, String> {
    let seconds = value.as_str().and_then(seconds).filter(|seconds| *seconds > 0);
    seconds.map(Duration::from_secs).ok_or_else(|| format!("{name} is a time as \"hh:mm:ss\""))
}

fn seconds(text: &str) -> Option<u64> {
    let parts: Vec<&str> = text.split(':').collect();
    let [hours, minutes, seconds] = &*parts else { return None };
    let of = |part: &str, most: u64| {
        let is_number = part.len() == 2 && part.bytes().all(|b| b.is_ascii_digit());
        part.parse::<u64>().ok().filter(|number| is_number && *number <= most)
    };
    let hours = of(hours, 23)?.saturating_mul(3600);
    Some(hours.saturating_add(of(minutes, 59)?.saturating_mul(60)).saturating_add(of(seconds, 59)?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(options: Value) -> Result<Options, String> {
        Options::read(options.as_object().unwrap())
    }

    #[test]
    fn supported_options_are_accepted() {
        let want = Options {
            continues_on_error: true,
            of_script: Duration::from_secs(3_723),
            of_step: Duration::from_secs(1),
            max_output: 10,
            max_error: 20,
        };
        let given = json!({
            "failureMode": "ContinueOnError", "scriptTimeout": "01:02:03", "stepTimeout": "00:00:01",
            "maxOutputBytes": 10, "maxErrorBytes": 20, "maxRetries": 0, "retryDelay": "00:00:02", "pipeStepOutput": false,
        });
        assert_eq!(read(given), Ok(want));
        assert_eq!(read(json!({"failureMode": "StopOnFirstError", "stepTimeout": null})), Ok(Options::default()));
    }

    #[test]
    fn refuses_unsupported_options() {
        for (name, value) in [
            ("failureMode", json!("StopAndCleanup")),
            ("failureMode", json!(1)),
            ("maxRetries", json!(1)),
            ("pipeStepOutput", json!(true)),
            ("retryDelay", json!(2)),
            ("maxOutputBytes", json!(0)),
            ("maxOutputBytes", json!(1_048_577)),
            ("maxOutputBytes", json!(-1)),
            ("other", json!(1)),
        ] {
            assert!(read(json!({ name: value })).is_err(), "{name}");
        }
        for text in
            ["", "5", "00:05", "00:00:00", "0:0:1", "24:00:00", "00:60:00", "00:00:60", "+1:00:00", "00:00:01.5"]
        {
            assert!(read(json!({ "stepTimeout": text })).is_err(), "{text}");
        }
    }
}
