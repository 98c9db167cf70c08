//! `POST /v1/self/commands`: the client asks whether it may run a command of the dangerous shell.

use std::time::Duration;

use http::request::Parts;
use hyper::body::Incoming;
use serde_json::json;

use super::{SelfReply, SelfRequest};
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Verdict};
use crate::model::shell_command::ShellCommand;
use crate::stages::approve;

/// The name that the audit log shows in place of a tool.
pub(super) const NAME: &str = "self.command";

impl SelfRequest<'_> {
    /// Answers whether a person has approved this command, once.
    pub(super) async fn command(&self, head: &Parts, body: Incoming, record: &mut Record) -> Verdict<SelfReply> {
        self.time_to_decide(record)?;
        let (body, permit) = self.scanned_body(head, body, record).await?;
        let command: ShellCommand = serde_json::from_slice(&body).map_err(|_| Deny::RequestMalformed)?;
        for text in command.texts() {
            self.scan(text.as_bytes(), record)?;
        }
        drop(permit);
        if !command.is_valid() {
            return Err(Deny::RequestMalformed.into());
        }
        record.rule(approve::command_summary(&command, record));
        // The body may have taken long.
        let expires = self.time_to_decide(record)?;
        let services = self.services;
        let stores = (&*services.ledger, &services.pending_approvals);
        approve::use_for_command(&command, (self.caller, expires), stores, record).await?;
        record.write_decision().await?;
        // So may the log have.
        if self.time_to_decide(record)? != expires {
            return Err(Deny::ApprovalPending.into());
        }
        services.finds.check(self.caller.execution())?;
        record.completed();
        Ok(SelfReply::Document(json!({ "approval": record.approval_id() })))
    }

    /// Returns how long the approval of a command is valid, according to the policy in force now.
    fn time_to_decide(&self, record: &mut Record) -> Verdict<Duration> {
        let policy = self.services.policies.snapshot();
        let task = policy.task(self.caller.task()).ok_or(Deny::CallerUnknown)?;
        task.commands().ok_or_else(|| {
            record.rule(format!("tasks.{}.commands is not set", self.caller.task()));
            Deny::ToolNotEnabled.into()
        })
    }
}
