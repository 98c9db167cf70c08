//! The options of a script.

use std::time::Duration;

use serde_json::{Map, Value};

use super::script::{Problems, retries};
use crate::tool::messages;

/// The options of a script.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) failure_mode: FailureMode,
    pub(super) script_timeout: Duration,
    pub(super) step_timeout: Duration,
    /// How often a failed step is repeated.
    pub(super) retries: u32,
    /// The time before the first repetition. It doubles with each.
    pub(super) retry_delay: Duration,
    /// Maximum size of the outputs of all operations together, in bytes.
    pub(super) max_output: usize,
    /// Maximum size of the error of one operation, in bytes.
    pub(super) max_error: usize,
    /// The output of a step is `$PREV` in the next.
    pub(super) pipes: bool,
}

/// The continuation after a failed operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureMode {
    Stop,
    Continue,
    CleanUp,
}

pub(super) const MAX_OUTPUT: usize = 1_048_576;
const MAX_ERROR: usize = 262_144;

impl Default for Options {
    fn default() -> Self {
        Self {
            failure_mode: FailureMode::Stop,
            retries: 0,
            retry_delay: Duration::from_secs(2),
            pipes: false,
            script_timeout: Duration::from_secs(300),
            step_timeout: Duration::from_secs(30),
            max_output: MAX_OUTPUT,
            max_error: MAX_ERROR,
        }
    }
}

impl Options {
    pub(super) fn read(given: &Map<String, Value>, problems: &mut Problems) -> Self {
        let mut options = Self::default();
        for (name, value) in given.iter().filter(|(_, value)| !value.is_null()) {
            if let Err(text) = options.set(name, value) {
                problems.wrong("options", text);
            }
        }
        options
    }

    fn set(&mut self, name: &str, value: &Value) -> Result<(), String> {
        match (name, value) {
            ("failureMode", value) => self.failure_mode = FailureMode::read(value)?,
            ("scriptTimeout", value) => self.script_timeout = span(name, value)?,
            ("stepTimeout", value) => self.step_timeout = span(name, value)?,
            ("maxOutputBytes", value) => self.max_output = size(name, value, MAX_OUTPUT)?,
            ("maxErrorBytes", value) => self.max_error = size(name, value, MAX_ERROR)?,
            ("maxRetries", value) => self.retries = retries(value)?,
            ("pipeStepOutput", Value::Bool(pipes)) => self.pipes = *pipes,
            ("pipeStepOutput", _) => return Err("pipeStepOutput is true or false".to_owned()),
            ("retryDelay", value) => self.retry_delay = span(name, value)?,
            (name, _) => return Err(format!("unknown option '{}'", messages::name(name))),
        }
        Ok(())
    }
}

impl FailureMode {
    fn read(mode: &Value) -> Result<Self, String> {
        match mode.as_str() {
            Some("StopOnFirstError") => Ok(Self::Stop),
            Some("ContinueOnError") => Ok(Self::Continue),
            Some("StopAndCleanup") => Ok(Self::CleanUp),
            _ => Err("a failureMode is StopOnFirstError, ContinueOnError or StopAndCleanup".to_owned()),
        }
    }

    pub(super) fn cleans_up(self) -> bool {
        self == Self::CleanUp
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
        let mut problems = Problems::default();
        let options = Options::read(options.as_object().unwrap(), &mut problems);
        if problems.is_empty() { Ok(options) } else { Err(problems.text()) }
    }

    #[test]
    fn options_have_defaults() {
        let want = Options {
            failure_mode: FailureMode::CleanUp,
            script_timeout: Duration::from_secs(3_723),
            step_timeout: Duration::from_secs(1),
            retries: 3,
            retry_delay: Duration::from_secs(4),
            max_output: 10,
            max_error: 20,
            pipes: true,
        };
        let given = json!({
            "failureMode": "StopAndCleanup", "scriptTimeout": "01:02:03", "stepTimeout": "00:00:01", "maxRetries": 3,
            "retryDelay": "00:00:04", "maxOutputBytes": 10, "maxErrorBytes": 20, "pipeStepOutput": true
        });
        assert_eq!(read(given), Ok(want));
        let defaults = json!({"maxRetries": 0, "pipeStepOutput": false, "failureMode": null, "retryDelay": "00:00:02"});
        assert_eq!(read(defaults), Ok(Options::default()));
    }

    #[test]
    fn all_wrong_options_are_named() {
        let given = json!({"maxRetries": 11, "pipeStepOutput": "yes", "x": 1});
        let text = read(given).unwrap_err();
        assert!(
            text.contains("from 0 to 10") && text.contains("true or false") && text.contains("unknown option 'x'"),
            "{text}"
        );
        for (name, value, want) in [
            ("failureMode", json!("Stop"), "StopAndCleanup"),
            ("maxRetries", json!(-1), "from 0 to 10"),
            ("maxOutputBytes", json!(0), "from 1 to"),
            ("maxErrorBytes", json!(262_145), "from 1 to"),
            ("stepTimeout", json!("30"), "hh:mm:ss"),
            ("stepTimeout", json!("00:00:00"), "hh:mm:ss"),
            ("stepTimeout", json!("24:00:00"), "hh:mm:ss"),
            ("retryDelay", json!(2), "hh:mm:ss"),
        ] {
            let text = read(json!({ name: value })).unwrap_err();
            assert!(text.contains(want), "{name}: {text}");
        }
    }
}
