//! The instructions for a model: the calls that a message can have, and the scripts of each sandbox, with what it serves.

use super::compile::MAX_CAPTURES;
use super::programs::Purpose;
use super::sandbox::{Sandbox, Sandboxes};
use super::script::{MAX_DEPTH, MAX_OPERATIONS};
use super::{path, table};

const CALLS: &str = "
## Calls in a message

Write each call on a line of its own: [TOOL_CALL:<unique id>] <JSON>
The answer to each is a line: [TOOL_RESULT:<id>] status=Completed result=..., status=Denied error=... or status=Failed error=...; or \
status=AwaitingApproval.
When a result is AwaitingApproval, tell the user which action needs their approval and why, and make no further calls until it is decided. \
When it is Denied, explain why and suggest something else. Write no calls in your final answer.

- {\"tool\":\"<name>\",\"input\":{...}} runs one of your tools.
- {\"resourceId\":\"<guid>\",\"sandboxId\":\"<name>\",\"script\":{...}} runs a script of mk8.shell in a sandbox.
";

const SCRIPTS: &str = "
## Scripts of mk8.shell

There is no shell: no pipes, no chaining, no expansion. A script is
{\"operations\":[{\"verb\":\"...\",\"args\":[\"...\"]}],\"options\":{...},\"cleanup\":[...]}
Paths are relative to the workspace or begin with $WORKSPACE, without \"..\". All problems of a script are told before it runs.

Variables: $WORKSPACE, $CWD, $USER, $PREV (the output of the step before, with the option pipeStepOutput), captures, and those of the sandbox.
Fields of a step: captureAs, label, onFailure (\"goto:<label>\", forward only), maxRetries, stepTimeout (\"hh:mm:ss\").
Options: failureMode (StopOnFirstError, ContinueOnError, StopAndCleanup), maxRetries (0), retryDelay (\"00:00:02\"), stepTimeout (\"00:00:30\"), \
scriptTimeout (\"00:05:00\"), maxOutputBytes (1048576), maxErrorBytes (262144), pipeStepOutput (false). With StopAndCleanup, \"cleanup\" runs \
after a failure.
FileTemplate has \"template\":{\"source\":\"<path>\",\"values\":{\"KEY\":\"text\"}}, FilePatch \"patches\":[{\"find\":\"text\",\"replace\":\"text\"}], \
ForEach \"forEach\":{\"items\":[\"...\"],\"body\":{...}} with $ITEM and $INDEX, and If \"if\":{\"predicate\":{\"kind\":\"...\",\"args\":[...]},\"then\":{...}}. \
Predicates: PrevContains, PrevEmpty, PrevStartsWith, PrevEndsWith, PrevEquals, PrevMatch, PrevLineCount, CaptureEmpty, CaptureContains, \
EnvEquals, FileExists, DirExists.
";

impl Sandboxes {
    /// Returns the instructions for exactly these sandboxes. There are none without sandboxes, and if the pack calls no tools.
    #[must_use]
    pub fn instructions(&self) -> String {
        if self.all().is_empty() || self.close_all_scripts() {
            return String::new();
        }
        let (names, extensions) = path::blocked();
        let limits = format!(
            "A script has at most {MAX_OPERATIONS} operations when it is expanded, {MAX_CAPTURES} captures and a nesting of {MAX_DEPTH}.\n\
             It writes no files named {}, none with the extensions {}, and nothing in .git.\n",
            names.join(", "),
            extensions.join(", ")
        );
        let each = self.all().iter().map(of_sandbox);
        [CALLS.to_owned(), SCRIPTS.to_owned(), limits].into_iter().chain(each).collect()
    }
}

fn of_sandbox(sandbox: &Sandbox) -> String {
    let name = sandbox.name();
    if let Some(why) = &sandbox.unsigned {
        return format!("\n### Sandbox {name}\n\nNothing runs here: {why}. Tell the user.\n");
    }
    let mut text = format!("\n### Sandbox {name}\n\n");
    match &sandbox.resource {
        Some(resource) => text.push_str(&format!("Its resourceId is {resource}.\n")),
        None => text.push_str("Its resourceId is any GUID.\n"),
    }
    let served = table::all().filter(|(verb, _)| sandbox.why_not_served(verb).is_none());
    let verbs: Vec<String> = served.map(|(verb, takes)| format!("{verb} [{takes}]")).collect();
    text.push_str(&format!("Verbs: {}.\n", verbs.join(", ")));
    let own: Vec<&str> = sandbox.variables().map(|(name, _)| name).collect();
    if !own.is_empty() {
        text.push_str(&format!("Variables: ${}.\n", own.join(", $")));
    }
    let fragments: Vec<&str> = sandbox.fragments().collect();
    if !fragments.is_empty() {
        text.push_str(&format!("Fragments for Include: {}.\n", fragments.join(", ")));
    }
    if !sandbox.programs.is_empty() {
        let rules = "No argument has $PREV, or a capture of what a program has written.";
        text.push_str(&format!(
            "ProcRun runs these commands and no others. {rules}\n{}\n",
            sandbox.programs.shown(Purpose::Script)
        ));
    }
    if let Some(shell) = sandbox.served_shell() {
        let network =
            if sandbox.shell_network(shell) { "It has the network, through the proxy." } else { "It has no network." };
        text.push_str(&format!(
            "A shell runs {{\"resourceId\":\"{}\",\"shellType\":\"Bash\",\"command\":\"<text>\"}} here, with the workspace as its directory. \
             The user approves each command, so use it only where nothing else will do. {network} A command is printable ASCII.\n",
            shell.resource
        ));
    }
    text
}
