//! Approvals of commands of the dangerous shell. They run beside the client, which asks the proxy before each: the proxy has a person
//! read the command, and sends nothing.

use std::time::Duration;

use sha2::{Digest, Sha256};

use super::digest::DigestWriter;
use super::facts::hex;
use super::{BoundFacts, PendingApprovals, decide, note_pending};
use crate::audit::record::Record;
use crate::ledger::{Approval, ApprovalAnswer, ApprovalState, Ledger, Millis};
use crate::model::name::ExecutionId;
use crate::model::refusal::{Stage, Verdict};
use crate::model::shell_command::{SHELL_TOOL, ShellCommand};
use crate::model::unique_id;
use crate::stages::identify::Caller;

/// The method of an approval for a command.
const METHOD: &str = "RUN";
/// Separates this digest from all other hashes.
const DOMAIN: &[u8] = b"exeat command approval 1";

/// Returns the command for a line of a log, and what it can reach. Values are masked before line feeds are escaped, so that those with
/// line feeds are found.
#[must_use]
pub fn summary(command: &ShellCommand, record: &Record) -> String {
    summary_of(command, &record.redact(&command.command))
}

fn summary_of(command: &ShellCommand, masked: &str) -> String {
    let network = if command.network { "with the network" } else { "without a network" };
    let text = masked.replace('\\', "\\\\").replace('\n', "\\n");
    let sha256 = hex(&Sha256::digest(&command.command));
    format!("in sandbox {} {network}, sha256 {sha256}: {text}", command.sandbox)
}

/// Returns the digest of all of it. The time for the decision is a part, so that approvals end when the policy shortens it.
fn digest(command: &ShellCommand, execution: &ExecutionId, expires: Duration) -> [u8; 32] {
    let ShellCommand { command, sandbox, directory, network, timeout_s, read_only, statement } = command;
    let mut digest = DigestWriter::default();
    digest.part(DOMAIN);
    digest.part(execution.as_str());
    digest.part(expires.as_millis().to_be_bytes());
    digest.part(sandbox);
    digest.part(directory);
    digest.part([u8::from(*network)]);
    digest.part(timeout_s.to_be_bytes());
    digest.length(read_only.len());
    read_only.iter().for_each(|path| digest.part(path));
    digest.part(statement);
    digest.part(command);
    digest.finish()
}

/// Returns the parts beside the command, as a person reads them.
pub(super) fn conditions(command: &ShellCommand) -> Vec<[String; 2]> {
    let pair = |name: &str, value: &str| [name.to_owned(), value.to_owned()];
    let mut all = vec![
        pair("sandbox", &command.sandbox),
        pair("workspace", &command.directory),
        pair("network", if command.network { "through the proxy, which adds the task's credentials" } else { "none" }),
        pair("timeout", &format!("{} s", command.timeout_s)),
        pair("sandbox-sha256", &command.statement),
    ];
    all.extend(command.read_only.iter().map(|path| pair("reads", path)));
    all
}

/// Uses an approval of a command, or asks for one. `expires` is how long it can be decided and used.
///
/// # Errors
/// As [`check`](super::check).
pub async fn use_for_command(
    command: &ShellCommand,
    (caller, expires): (&Caller, Duration),
    (ledger, pending): (&Ledger, &PendingApprovals),
    record: &mut Record,
) -> Verdict<()> {
    record.enter(Stage::Approve);
    let digest = digest(command, caller.execution(), expires);
    let now = Millis::now();
    let new = Approval {
        id: unique_id::new().simple().to_string(),
        execution: caller.execution().clone(),
        task: caller.task().clone(),
        tool: Some(SHELL_TOOL.to_owned()),
        method: METHOD.to_owned(),
        url: record.redact(&format!("sandbox:{}", command.sandbox)).into_owned(),
        digest,
        created_at: now,
        expires_at: now.plus(expires),
        state: ApprovalState::Pending,
    };
    let answer = ledger.ask(new.clone(), now).await;
    if let Ok(ApprovalAnswer::Pending(id)) = &answer {
        let facts = async { BoundFacts::of_command(command, digest, record) };
        note_pending(pending, new, id, facts).await;
    }
    decide(answer, record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shell_command::tests::command;

    #[test]
    fn the_digest_has_all_parts() {
        let (execution, expires) = (ExecutionId::new("t"), Duration::from_secs(60));
        let usual = digest(&command(), &execution, expires);
        assert_eq!(digest(&command(), &execution, expires), usual);
        assert_ne!(digest(&command(), &ExecutionId::new("u"), expires), usual);
        assert_ne!(digest(&command(), &execution, Duration::from_millis(60_001)), usual);
        let changes: [fn(&mut ShellCommand); 8] = [
            |command| command.command.push(' '),
            |command| command.sandbox.push('x'),
            |command| command.directory.push('x'),
            |command| command.network = true,
            |command| command.timeout_s = 61,
            |command| command.read_only.clear(),
            |command| command.read_only.push("/opt/b".to_owned()),
            |command| command.statement = "1".repeat(64),
        ];
        for (at, change) in changes.into_iter().enumerate() {
            let mut changed = command();
            change(&mut changed);
            assert_ne!(digest(&changed, &execution, expires), usual, "{at}");
        }
    }

    #[test]
    fn a_line_of_a_log_shows_line_ends() {
        let mut command = command();
        command.command = "a\\n b\nc".to_owned();
        let summary = summary_of(&command, &command.command);
        assert!(summary.ends_with(": a\\\\n b\\nc"), "{summary}");
        assert!(summary.starts_with("in sandbox work without a network, sha256 "), "{summary}");
    }
}
