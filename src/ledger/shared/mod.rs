//! The shared ledger, in Redis (6 or newer) or Valkey: one server with or without replicas, no cluster. Each atomic
//! step is one script and takes one round trip. The server's clock is used.
//!
//! The data of an execution has keys below `exeat:{ID}:`, which expire an hour after the execution has ended. The
//! server must not evict keys when its memory is full (`maxmemory-policy noeviction`); its persistence is its own
//! setting.
//!
//! Facts, requests for approval and decisions are signed ([`Seal`]). Counters, stops, bills and records are not:
//! scripts change them, and the server has no key. An attacker who can write to the server can reset those, delete any
//! entry, and restore an entry that was signed for the same key before.

mod link;
mod read;
mod scripts;
mod seal;
mod server;

use std::time::Duration;

use moka::sync::Cache;
use redis::{Cmd, Pipeline, ScriptInvocation};

pub use link::{Connect, Connecting, RoundTrips, Stream, reach};
pub use seal::{Alarm, Seal, TamperedRecord};
pub use server::{Server, ServerError};

use super::approval::{self, Approval, ApprovalAnswer, Decision, DecisionResult, MAX_OPEN};
use super::call::{MAX_CALLS, ToolCall};
use super::execution::{Caps, Cursor, Execution, ExecutionState, StopReason, TakeResult};
use super::{Billed, LedgerError, MAX_EXECUTIONS, Result};
use crate::files;
use crate::model::name::ExecutionId;
use crate::model::tool::Kind;
use link::Link;
use scripts::{Scripts, key};

/// The maximum number of executions whose facts are cached, so that not every request reads them.
const MAX_CACHED: u64 = 10_000;
/// How long facts are cached. Only a static execution's facts can change, when it is restarted.
const CACHE_TTL: Duration = Duration::from_secs(60);
/// The maximum number of commands per pipeline when all executions are read.
const PIPELINE_SIZE: usize = 250;
/// The number of attempts for a decision that conflicts with concurrent changes. Every such change is final.
const DECISION_ATTEMPTS: usize = 4;
/// The maximum length of an id that the ledger looks up, in bytes. Generated ids are never longer.
const MAX_ID: usize = 128;

/// The ledger on a server that several processes share.
pub(super) struct Shared {
    link: Link,
    scripts: Scripts,
    seal: Seal,
    facts: Cache<ExecutionId, Execution>,
    /// Approvals that this process has used. If one is restored on the server, it is not used again.
    used: Cache<String, ()>,
    /// The key of this process's cursor. Each process bills from its own log.
    cursor: String,
}

impl Shared {
    pub(super) fn new(server: Server, seal: Seal, proxy: &str, connect: Connect) -> Self {
        Self {
            link: Link::new(server, connect),
            scripts: Scripts::new(),
            seal,
            used: Cache::builder().max_capacity(MAX_CACHED).build(),
            facts: Cache::builder().max_capacity(MAX_CACHED).time_to_live(CACHE_TTL).build(),
            cursor: format!("exeat:cursor:{proxy}"),
        }
    }

    pub(super) fn round_trips(&self) -> &RoundTrips {
        self.link.round_trips()
    }

    pub(super) async fn check(&self) -> Result<()> {
        let answer: String = self.link.query(&redis::cmd("PING")).await?;
        if answer == "PONG" { Ok(()) } else { Err(LedgerError::Unavailable) }
    }

    pub(super) async fn start(&self, new: Execution) -> Result<()> {
        let mut call = self.scripts.start.of(&new.id);
        call.arg(new.id.as_str()).arg(read::facts(&new, &self.seal)?).arg(read::end(&new)).arg(MAX_EXECUTIONS);
        match self.text(&call).await?.as_str() {
            "started" => {
                self.facts.insert(new.id.clone(), new);
                Ok(())
            }
            "exists" => Err(LedgerError::Exists),
            "full" => Err(LedgerError::Full),
            _ => Err(LedgerError::Unavailable),
        }
    }

    pub(super) async fn find(&self, id: &ExecutionId) -> Result<Option<Execution>> {
        if id.as_str().len() > MAX_ID {
            return Ok(None);
        }
        if let Some(known) = self.facts.get(id) {
            return Ok(Some(known));
        }
        let facts: Option<String> = self.link.query(Cmd::new().arg("HGET").arg(key(id, "x")).arg("facts")).await?;
        let read = facts.map(|facts| read::execution(id, &facts, &self.seal));
        let Some(execution) = read.transpose()? else { return Ok(None) };
        self.facts.insert(id.clone(), execution.clone());
        Ok(Some(execution))
    }

    pub(super) async fn state(&self, id: &ExecutionId) -> Result<Option<ExecutionState>> {
        let fields = self.link.query(Cmd::new().arg("HGETALL").arg(key(id, "x"))).await?;
        read::execution_state(id, &fields, &self.seal)
    }

    pub(super) async fn list(&self) -> Result<Vec<ExecutionState>> {
        let all = self.of_all("x").await?;
        // An execution whose entry is invalid must not hide the others.
        let states = all.iter().filter_map(|(id, fields)| read::execution_state(id, fields, &self.seal).ok().flatten());
        Ok(states.collect())
    }

    pub(super) async fn stop(&self, id: &ExecutionId, why: StopReason) -> Result<bool> {
        let mut call = self.scripts.stop.of(id);
        call.arg(id.as_str()).arg(read::stop_text(why));
        let is_known: u8 = self.link.invoke(&call).await?;
        Ok(is_known == 1)
    }

    pub(super) async fn restart(&self, execution: Execution) -> Result<()> {
        self.facts.invalidate(&execution.id);
        let mut call = self.scripts.restart.of(&execution.id);
        call.arg(execution.id.as_str()).arg(read::facts(&execution, &self.seal)?).arg(read::end(&execution));
        self.text(&call).await.map(drop)
    }

    pub(super) async fn take(&self, who: &Execution, kind: Kind, caps: Caps) -> Result<TakeResult> {
        self.take_or_peek(who, kind, caps, "take").await
    }

    pub(super) async fn peek(&self, who: &Execution, kind: Kind, caps: Caps) -> Result<TakeResult> {
        self.take_or_peek(who, kind, caps, "peek").await
    }

    async fn take_or_peek(&self, who: &Execution, kind: Kind, caps: Caps, how: &str) -> Result<TakeResult> {
        let facts = if who.is_static { read::facts(who, &self.seal)? } else { String::new() };
        // The signed expiry, which the script compares with its own unsigned fields.
        let end = who.expires_at.filter(|_| !who.is_static).map(|end| end.0.to_string()).unwrap_or_default();
        let cap = |cap: Option<u64>| cap.map(|cap| cap.to_string()).unwrap_or_default();
        let kind = if kind == Kind::Raw { "r" } else { "t" };
        let mut call = self.scripts.take.of(&who.id);
        call.arg(who.id.as_str()).arg(kind).arg(cap(caps.per_execution)).arg(cap(caps.per_minute)).arg(facts).arg(how);
        call.arg(end);
        let (taken, number): (String, u64) = self.link.invoke(&call).await?;
        read::take(&taken, number, caps)
    }

    pub(super) async fn give_back(&self, who: &Execution, kind: Kind, taken: Duration) -> Result<()> {
        let kind = if kind == Kind::Raw { "r" } else { "t" };
        let mut call = self.scripts.give_back.of(&who.id);
        call.arg(kind).arg(taken.as_millis().to_string());
        self.link.invoke::<u8>(&call).await.map(drop)
    }

    pub(super) async fn find_noted(&self, id: &ExecutionId, most: u32, find: &str) -> Result<bool> {
        let mut call = self.scripts.found.of(id);
        call.arg(id.as_str()).arg(most).arg(find);
        let is_stopped: u8 = self.link.invoke(&call).await?;
        Ok(is_stopped == 1)
    }

    pub(super) async fn restore_finds(&self, id: &ExecutionId, finds: u32, most: u32) -> Result<()> {
        let mut call = self.scripts.restore_finds.of(id);
        call.arg(id.as_str()).arg(most).arg(finds);
        self.link.invoke::<u8>(&call).await.map(drop)
    }

    pub(super) async fn bill(
        &self,
        batch: &[(ExecutionId, u32)],
        after: Option<&Cursor>,
        cursor: &Cursor,
    ) -> Result<Billed> {
        let mut call = self.scripts.bill.prepare();
        call.key(&self.cursor).arg(after.map_or("", Cursor::as_str)).arg(cursor.as_str());
        for (id, half_credits) in batch {
            call.arg(id.as_str()).arg(*half_credits);
        }
        match self.text(&call).await?.as_str() {
            "done" => Ok(Billed::Done),
            "moved" => Ok(Billed::Moved),
            _ => Err(LedgerError::Unavailable),
        }
    }

    pub(super) async fn cursor(&self) -> Result<Option<Cursor>> {
        let text: Option<String> = self.link.query(Cmd::new().arg("GET").arg(&self.cursor)).await?;
        text.map(|text| Cursor::new(&text).ok_or(LedgerError::Unavailable)).transpose()
    }

    /// Records calls, oldest first. All of them were reported, or none.
    pub(super) async fn record(&self, id: &ExecutionId, calls: Vec<ToolCall>) -> Result<()> {
        let reported = u8::from(calls.iter().any(|call| call.reported));
        let mut invocation = self.scripts.record.of(id);
        invocation.arg(reported).arg(MAX_CALLS);
        for call in calls {
            invocation.arg(read::written(&call.bounded())?);
        }
        let is_known: u8 = self.link.invoke(&invocation).await?;
        if is_known == 1 { Ok(()) } else { Err(LedgerError::Unknown) }
    }

    pub(super) async fn tool_calls(&self, id: &ExecutionId) -> Result<Vec<ToolCall>> {
        let mut lists = Pipeline::new();
        lists.atomic();
        for part in ["judged", "reported"] {
            lists.cmd("LRANGE").arg(key(id, part)).arg(0).arg(-1);
        }
        let (judged, reported): (Vec<String>, Vec<String>) = self.link.query_all(&lists).await?;
        let all = judged.iter().chain(&reported).map(|text| read::numbered(text));
        let mut all: Vec<(u64, ToolCall)> = all.collect::<Result<_>>()?;
        all.sort_by_key(|(number, _)| *number);
        Ok(all.into_iter().map(|(_, call)| call).collect())
    }

    pub(super) async fn ask(&self, asked: Approval) -> Result<ApprovalAnswer> {
        let asked = asked.bounded();
        let lifetime = asked.expires_at.since(asked.created_at).as_millis();
        let mut call = self.scripts.ask.of(&asked.execution);
        call.key(approval_key(&asked.id)).arg(&asked.id).arg(files::hex(&asked.digest)).arg(lifetime.to_string());
        call.arg(read::request(&asked, &self.seal)?).arg(MAX_OPEN).arg(approval::MAX_ENDED);
        call.arg(approval::SHOWN_FOR.as_millis().to_string()).arg(asked.execution.as_str());
        let (answer, id, known): (String, String, String) = self.link.invoke(&call).await?;
        if !known.is_empty() {
            self.verify_answer(&asked, &answer, &id, &known)?;
        }
        read::answer(&answer, id)
    }

    pub(super) async fn decide(&self, id: &str, decision: Decision) -> Result<DecisionResult> {
        let Some(execution) = self.execution_of(id).await? else { return Ok(DecisionResult::Unknown) };
        for _ in 0..DECISION_ATTEMPTS {
            let known: Option<String> =
                self.link.query(Cmd::new().arg("HGET").arg(key(&execution, "approvals")).arg(id)).await?;
            let Some(known) = known else { return Ok(DecisionResult::Unknown) };
            let approval = read::approval(&execution, id, &known, &self.seal)?;
            let decided = read::with_decision(&execution, id, &known, decision.state(), &self.seal)?;
            let mut call = self.scripts.decide.of(&execution);
            call.arg(id).arg(decided).arg(known);
            match read::decided(&self.text(&call).await?)? {
                Some(DecisionResult::AlreadyDecided(_)) => return Ok(DecisionResult::AlreadyDecided(approval.state)),
                Some(done) => return Ok(done),
                None => {}
            }
        }
        Err(LedgerError::Unavailable)
    }

    /// Checks that the server's answer was written by a proxy and belongs to this request.
    fn verify_answer(&self, asked: &Approval, answer: &str, id: &str, known: &str) -> Result<()> {
        let approval = read::approval(&asked.execution, id, known, &self.seal)?;
        let is_said = read::state_text(approval.state) == answer && approval.digest == asked.digest;
        let is_used_again = answer == "approved" && !self.used.entry(id.to_owned()).or_insert(()).is_fresh();
        if !is_said || is_used_again {
            return Err(self.seal.altered(seal::Kind::Decision, &key(&asked.execution, "approvals")));
        }
        Ok(())
    }

    pub(super) async fn approval(&self, id: &str) -> Result<Option<Approval>> {
        match self.execution_of(id).await? {
            Some(execution) => self.approval_of(&execution, id).await,
            None => Ok(None),
        }
    }

    pub(super) async fn approval_of(&self, who: &ExecutionId, id: &str) -> Result<Option<Approval>> {
        if id.len() > MAX_ID {
            return Ok(None);
        }
        let mut both = Pipeline::new();
        both.cmd("HGET").arg(key(who, "approvals")).arg(id).cmd("TIME");
        let (text, time): (Option<String>, (u64, u64)) = self.link.query_all(&both).await?;
        let read = text.map(|text| read::approval(who, id, &text, &self.seal));
        Ok(read.transpose()?.map(|one| one.shown_at(read::time(time))))
    }

    pub(super) async fn approvals(&self) -> Result<Vec<Approval>> {
        let now = read::time(self.link.query(&redis::cmd("TIME")).await?);
        Ok(read::approvals(&self.of_all("approvals").await?, now, &self.seal))
    }

    pub(super) async fn approvals_of(&self, id: &ExecutionId) -> Result<Vec<Approval>> {
        let mut both = Pipeline::new();
        both.cmd("HGETALL").arg(key(id, "approvals")).cmd("TIME");
        let (fields, time): (read::Fields, (u64, u64)) = self.link.query_all(&both).await?;
        Ok(read::approvals(&[(id.clone(), fields)], read::time(time), &self.seal))
    }

    /// Returns the execution that an approval belongs to.
    async fn execution_of(&self, id: &str) -> Result<Option<ExecutionId>> {
        if id.len() > MAX_ID {
            return Ok(None);
        }
        let execution: Option<String> = self.link.query(Cmd::new().arg("GET").arg(approval_key(id))).await?;
        Ok(execution.map(|id| ExecutionId::new(&id)))
    }

    /// Returns one hash of each execution.
    async fn of_all(&self, part: &str) -> Result<Vec<(ExecutionId, read::Fields)>> {
        let mut both = Pipeline::new();
        both.cmd("ZRANGE").arg(scripts::INDEX).arg(0).arg(-1).cmd("SMEMBERS").arg(scripts::STATIC);
        let (ending, fixed): (Vec<String>, Vec<String>) = self.link.query_all(&both).await?;
        let ids: Vec<String> = ending.into_iter().chain(fixed).collect();
        let mut all = Vec::with_capacity(ids.len());
        for some in ids.chunks(PIPELINE_SIZE) {
            let mut hashes = Pipeline::new();
            for id in some {
                hashes.cmd("HGETALL").arg(key(&ExecutionId::new(id), part));
            }
            // A key of another type is an error of its own, and must not hide the others.
            hashes.ignore_errors();
            let fields: Vec<redis::RedisResult<read::Fields>> = self.link.query_all(&hashes).await?;
            let valid = some.iter().zip(fields).filter_map(|(id, fields)| Some((ExecutionId::new(id), fields.ok()?)));
            all.extend(valid);
        }
        Ok(all)
    }

    async fn text(&self, call: &ScriptInvocation<'_>) -> Result<String> {
        self.link.invoke(call).await
    }
}

/// Returns the key that maps an approval to its execution.
fn approval_key(id: &str) -> String {
    format!("exeat:approval:{id}")
}
