//! All stores of the ledger behave alike. The durability of the embedded store is tested in its own module.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exeat::ledger::{
    Approval, ApprovalAnswer, ApprovalState, Billed, Caps, Connect, Cursor, Decision, DecisionResult, Execution,
    Ledger, LedgerError, MAX_OPEN, Millis, Seal, Server, StopReason, Stream, TakeResult, TamperedRecord, ToolCall,
};
use exeat::model::name::{ExecutionId, TaskName};
use exeat::model::secret::{Secret, TokenHash};
use exeat::model::tool::{Kind, Tool};

const TOOL: Kind = Kind::Tool(Tool::ApiCall);
const FREE: Caps = Caps { per_execution: None, per_minute: None };

fn execution(id: &str) -> Execution {
    let now = Millis::now();
    Execution {
        id: ExecutionId::new(id),
        task: TaskName::new("research"),
        created_at: now,
        expires_at: Some(now.plus(Duration::from_secs(3600))),
        token: Some(TokenHash::of(b"a token")),
        peers: Some("10.0.0.0/8".parse().unwrap()),
        is_static: false,
    }
}

fn fixed(task: &str) -> Execution {
    let id = ExecutionId::of_static(&TaskName::new(task));
    Execution { id, expires_at: None, token: None, peers: None, is_static: true, ..execution("") }
}

fn id(id: &str) -> ExecutionId {
    ExecutionId::new(id)
}

/// A ledger, with a means to move its contents into the past. The shared store uses the server's clock.
struct Subject {
    ledger: Arc<Ledger>,
    redis: Option<Redis>,
    ahead: Duration,
}

impl Subject {
    fn local(ledger: Ledger) -> Self {
        Self { ledger: Arc::new(ledger), redis: None, ahead: Duration::ZERO }
    }

    fn now(&self) -> Millis {
        Millis::now().plus(self.ahead)
    }

    /// Simulates the passage of time.
    fn pass(&mut self, time: Duration) {
        match &self.redis {
            None => self.ahead += time,
            Some(redis) => redis.pass(time),
        }
    }

    async fn take(&self, who: &Execution, kind: Kind, caps: Caps) -> TakeResult {
        self.ledger.take(who, kind, caps, self.now()).await.unwrap()
    }

    async fn start(&self, new: &Execution) {
        self.ledger.start(new.clone(), self.now()).await.unwrap();
    }

    async fn ask(&self, asked: &Approval) -> Result<ApprovalAnswer, LedgerError> {
        self.ledger.ask(asked.clone(), self.now()).await
    }

    fn asked(&self, approval: &str, execution: &str, digest: u8) -> Approval {
        Approval {
            id: approval.to_owned(),
            execution: id(execution),
            task: TaskName::new("research"),
            tool: Some("api_call".to_owned()),
            method: "POST".to_owned(),
            url: "https://api.test/a \"b\"".to_owned(),
            digest: [digest; 32],
            created_at: self.now(),
            expires_at: self.now().plus(Duration::from_secs(600)),
            state: ApprovalState::Pending,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_memory() {
    behaves(Subject::local(Ledger::memory())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn embedded() {
    let dir = tempfile::tempdir().unwrap();
    behaves(Subject::local(Ledger::embedded(&dir.path().join("ledger")).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn shared() {
    let redis = Redis::start("");
    let ledger = Arc::new(redis.ledger("one"));
    behaves(Subject { ledger, redis: Some(redis), ahead: Duration::ZERO }).await;
}

async fn behaves(mut subject: Subject) {
    executions_are_stored_as_started(&subject).await;
    calls_are_counted_exactly(&subject).await;
    kinds_are_counted_separately(&subject).await;
    a_refunded_call_does_not_count(&mut subject).await;
    a_minute_begins_with_its_first_call(&mut subject).await;
    stopped_and_expired_executions_take_no_call(&mut subject).await;
    static_executions_start_with_a_call_and_can_be_restarted(&subject).await;
    finds_stop_an_execution(&subject).await;
    bills_and_their_cursor_move_together(&subject).await;
    checked_calls_are_kept_longer_than_reported_ones(&subject).await;
    approvals_are_requested_decided_and_used_once(&mut subject).await;
    approvals_are_bounded(&mut subject).await;
    approvals_are_found_per_execution(&subject).await;
    ended_executions_are_removed(&mut subject).await;
}

async fn executions_are_stored_as_started(subject: &Subject) {
    let ledger = &subject.ledger;
    let a = execution("a");
    assert_eq!(ledger.find(&a.id).await, Ok(None));
    assert_eq!(ledger.state(&a.id).await, Ok(None));
    assert!(ledger.list().await.unwrap().is_empty());
    subject.start(&a).await;
    let found = ledger.find(&a.id).await.unwrap().unwrap();
    assert!(found == a, "with its token, which is not shown: {found:?}");
    assert_eq!(ledger.start(a.clone(), subject.now()).await, Err(LedgerError::Exists));
    let standing = ledger.state(&a.id).await.unwrap().unwrap();
    assert_eq!((standing.tool.calls, standing.finds, standing.half_credits, standing.stopped), (0, 0, 0, None));
    assert_eq!(ledger.list().await.unwrap(), [standing]);
    ledger.check().await.unwrap();
    let odd = ExecutionId::new(&"x}:{\r\n\"".repeat(10_000));
    assert_eq!(ledger.find(&odd).await, Ok(None), "whatever a client claims to be");
}

async fn approvals_are_found_per_execution(subject: &Subject) {
    for name in ["own1", "own2"] {
        subject.start(&execution(name)).await;
    }
    assert_eq!(subject.ask(&subject.asked("mine", "own1", 1)).await, Ok(ApprovalAnswer::Pending("mine".to_owned())));
    let known = async |who: &str, approval: &str| {
        let found = subject.ledger.approval_of(&id(who), approval, subject.now()).await.unwrap();
        found.map(|found| (found.execution.to_string(), found.state))
    };
    assert_eq!(known("own1", "mine").await, Some(("own1".to_owned(), ApprovalState::Pending)));
    let odd = "x".repeat(100_000);
    for (who, approval) in [("own2", "mine"), ("own1", "none"), ("nobody", "mine"), ("own1", &*odd), ("own1", "")] {
        assert_eq!(known(who, approval).await, None, "{who}");
    }
}

async fn a_refunded_call_does_not_count(subject: &mut Subject) {
    let (who, second) = (execution("given"), Duration::from_secs(1));
    let caps = Caps { per_execution: Some(3), per_minute: Some(2) };
    subject.start(&who).await;
    let back = async |subject: &Subject, who: &Execution, taken| {
        subject.ledger.give_back(who, Kind::Raw, taken, subject.now()).await.unwrap();
    };
    for call in 1..=2 {
        assert_eq!(subject.take(&who, Kind::Raw, caps).await, TakeResult::Counted { call });
    }
    subject.pass(second);
    back(subject, &who, second).await;
    assert_eq!(subject.take(&who, Kind::Raw, caps).await, TakeResult::Counted { call: 2 });
    assert!(matches!(subject.take(&who, Kind::Raw, caps).await, TakeResult::RateLimited { .. }));
    assert_eq!(subject.take(&who, TOOL, caps).await, TakeResult::Counted { call: 1 });
    // The call is refunded in another minute than the one that counted it.
    subject.pass(Duration::from_secs(61));
    assert_eq!(subject.take(&who, Kind::Raw, caps).await, TakeResult::Counted { call: 3 });
    back(subject, &who, Duration::from_secs(61)).await;
    let raw = subject.ledger.state(&who.id).await.unwrap().unwrap().raw;
    assert_eq!((raw.calls, raw.window.unwrap().calls), (2, 1));
    // The count is never negative, and a refund creates no entry.
    for _ in 0..4 {
        back(subject, &who, Duration::ZERO).await;
    }
    assert_eq!(subject.ledger.state(&who.id).await.unwrap().unwrap().raw.calls, 0);
    back(subject, &execution("nobody"), Duration::ZERO).await;
    assert_eq!(subject.ledger.state(&id("nobody")).await, Ok(None));
}

async fn calls_are_counted_exactly(subject: &Subject) {
    let who = execution("exact");
    subject.start(&who).await;
    for (caps, most) in [
        (Caps { per_execution: None, per_minute: Some(10) }, 10),
        (Caps { per_execution: Some(25), per_minute: None }, 25),
    ] {
        let calls: Vec<_> = (0..100)
            .map(|_| {
                let (ledger, who, now) = (subject.ledger.clone(), who.clone(), subject.now());
                tokio::spawn(async move { ledger.take(&who, TOOL, caps, now).await.unwrap() })
            })
            .collect();
        let mut counted = Vec::new();
        for call in calls {
            match call.await.unwrap() {
                TakeResult::Counted { call } => counted.push(call),
                TakeResult::RateLimited { limit: 10, retry_after } => {
                    assert!(retry_after <= Duration::from_secs(60) && !retry_after.is_zero(), "{retry_after:?}");
                }
                TakeResult::ExecutionLimit { limit: 25 } => {}
                other => panic!("{other:?}"),
            }
        }
        counted.sort_unstable();
        let already = most - counted.len() as u64;
        assert_eq!(counted, (already + 1..=most).collect::<Vec<_>>());
    }
}

async fn kinds_are_counted_separately(subject: &Subject) {
    let who = execution("kinds");
    subject.start(&who).await;
    let once = Caps { per_execution: Some(1), per_minute: Some(1) };
    assert_eq!(subject.take(&who, TOOL, once).await, TakeResult::Counted { call: 1 });
    assert_eq!(subject.take(&who, Kind::Raw, once).await, TakeResult::Counted { call: 1 });
    assert_eq!(subject.take(&who, TOOL, once).await, TakeResult::ExecutionLimit { limit: 1 });
    for call in 2..5 {
        assert_eq!(
            subject.take(&who, Kind::Raw, FREE).await,
            TakeResult::Counted { call },
            "counted without caps, too"
        );
    }
    let standing = subject.ledger.state(&who.id).await.unwrap().unwrap();
    let now = subject.now();
    let shown = |counter: exeat::ledger::Counter| (counter.calls, counter.window_at(now).unwrap().calls);
    assert_eq!((shown(standing.tool), shown(standing.raw)), ((1, 1), (4, 4)));
}

async fn a_minute_begins_with_its_first_call(subject: &mut Subject) {
    let who = execution("minute");
    subject.start(&who).await;
    let caps = Caps { per_execution: Some(4), per_minute: Some(2) };
    let limited = |take: TakeResult, most: u64| match take {
        TakeResult::RateLimited { limit: 2, retry_after } => {
            assert!(retry_after <= Duration::from_secs(most), "{retry_after:?}");
            assert!(retry_after > Duration::from_secs(most - 10), "{retry_after:?}");
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(subject.take(&who, TOOL, caps).await, TakeResult::Counted { call: 1 });
    subject.pass(Duration::from_secs(40));
    assert_eq!(subject.take(&who, TOOL, caps).await, TakeResult::Counted { call: 2 });
    limited(subject.take(&who, TOOL, caps).await, 20);
    subject.pass(Duration::from_secs(20));
    assert_eq!(subject.take(&who, TOOL, caps).await, TakeResult::Counted { call: 3 }, "a refused call extends nothing");
    assert_eq!(subject.take(&who, TOOL, caps).await, TakeResult::Counted { call: 4 });
    let before = subject.ledger.state(&who.id).await.unwrap().unwrap();
    assert_eq!(subject.take(&who, TOOL, caps).await, TakeResult::ExecutionLimit { limit: 4 });
    assert_eq!(subject.ledger.state(&who.id).await.unwrap().unwrap(), before, "nothing was touched");
    limited(subject.take(&who, TOOL, Caps { per_execution: None, ..caps }).await, 60);
}

async fn stopped_and_expired_executions_take_no_call(subject: &mut Subject) {
    let ledger = subject.ledger.clone();
    let (stopped, mut short) = (execution("stopped"), execution("short"));
    short.expires_at = Some(subject.now().plus(Duration::from_secs(100)));
    subject.start(&stopped).await;
    subject.start(&short).await;
    assert_eq!(ledger.stop(&stopped.id, StopReason::Asked, subject.now()).await, Ok(true));
    assert_eq!(ledger.stop(&stopped.id, StopReason::Finds, subject.now()).await, Ok(true), "as often as one likes");
    assert_eq!(ledger.stop(&id("nobody"), StopReason::Asked, subject.now()).await, Ok(false));
    assert_eq!(subject.take(&stopped, TOOL, FREE).await, TakeResult::Stopped);
    let standing = ledger.state(&stopped.id).await.unwrap().unwrap();
    assert_eq!(standing.stopped.unwrap().why, StopReason::Asked, "the first reason stands");
    assert_eq!(subject.take(&short, TOOL, FREE).await, TakeResult::Counted { call: 1 });
    subject.pass(Duration::from_secs(101));
    assert_eq!(subject.take(&short, TOOL, FREE).await, TakeResult::Expired);
    assert_eq!(subject.take(&execution("nobody"), TOOL, FREE).await, TakeResult::Unknown);
    assert_eq!(ledger.find(&id("nobody")).await, Ok(None));
}

async fn static_executions_start_with_a_call_and_can_be_restarted(subject: &Subject) {
    let (ledger, who) = (&subject.ledger, fixed("research"));
    let once = Caps { per_execution: Some(1), per_minute: Some(1) };
    assert_eq!(ledger.find(&who.id).await, Ok(None));
    assert_eq!(subject.take(&who, TOOL, once).await, TakeResult::Counted { call: 1 });
    assert_eq!(subject.take(&who, TOOL, once).await, TakeResult::ExecutionLimit { limit: 1 });
    assert!(ledger.find(&who.id).await.unwrap().unwrap() == who);
    ledger.find_noted(&who.id, 1, "find", subject.now()).await.unwrap();
    let before = ledger.cursor().await.unwrap();
    let (batch, cursor) = ([(who.id.clone(), 1)], Cursor::new("static").unwrap());
    assert_eq!(ledger.bill(&batch, before.as_ref(), cursor).await, Ok(Billed::Done));
    ledger.record(&who.id, ToolCall::default()).await.unwrap();
    let asked = subject.asked("s", who.id.as_str(), 1);
    assert_eq!(subject.ask(&asked).await, Ok(ApprovalAnswer::Pending("s".into())));
    assert_eq!(subject.take(&who, Kind::Raw, once).await, TakeResult::Stopped);
    let anew = Execution { created_at: subject.now(), ..who.clone() };
    ledger.restart(anew.clone()).await.unwrap();
    let standing = ledger.state(&who.id).await.unwrap().unwrap();
    assert!(standing.execution == anew && ledger.find(&who.id).await.unwrap() == Some(anew));
    assert_eq!((standing.tool.calls, standing.finds, standing.half_credits, standing.stopped), (0, 0, 0, None));
    assert_eq!(ledger.tool_calls(&who.id).await, Ok(vec![]));
    assert_eq!(ledger.approvals(subject.now()).await, Ok(vec![]));
    assert_eq!(subject.take(&who, TOOL, once).await, TakeResult::Counted { call: 1 });
    assert_eq!(ledger.list().await.unwrap().iter().filter(|one| one.execution.is_static).count(), 1);
}

async fn finds_stop_an_execution(subject: &Subject) {
    let (ledger, who) = (&subject.ledger, execution("finds"));
    subject.start(&who).await;
    for (n, stops) in [false, false, true, true].into_iter().enumerate() {
        let find = n.to_string();
        assert_eq!(ledger.find_noted(&who.id, 3, &find, subject.now()).await, Ok(stops));
        if ledger.is_shared() {
            assert_eq!(ledger.find_noted(&who.id, 3, &find, subject.now()).await, Ok(stops), "sent again");
        }
    }
    assert_eq!(subject.take(&who, TOOL, FREE).await, TakeResult::Stopped);
    let standing = ledger.state(&who.id).await.unwrap().unwrap();
    assert_eq!((standing.finds, standing.stopped.unwrap().why), (4, StopReason::Finds));
    // Those that only the log has. They are raised to a number, and may be restored again.
    let who = execution("restored");
    subject.start(&who).await;
    for (restored, finds, is_stopped) in [(1, 1, false), (2, 2, false), (1, 2, false), (3, 3, true), (3, 3, true)] {
        ledger.restore_finds(&who.id, restored, 3, subject.now()).await.unwrap();
        let standing = ledger.state(&who.id).await.unwrap().unwrap();
        assert_eq!((standing.finds, standing.stopped.is_some()), (finds, is_stopped), "{restored}");
    }
    assert_eq!(ledger.restore_finds(&id("nobody"), 3, 3, subject.now()).await, Ok(()));
    assert_eq!(ledger.find_noted(&id("nobody"), 3, "find", subject.now()).await, Ok(true), "what cannot be counted");
}

async fn bills_and_their_cursor_move_together(subject: &Subject) {
    let ledger = &subject.ledger;
    for name in ["bill1", "bill2"] {
        subject.start(&execution(name)).await;
    }
    let batch = [(id("bill1"), 1), (id("bill2"), 5), (id("bill1"), 2), (id("nobody"), 7)];
    let cursor = Cursor::new("line 7 \"ü\"").unwrap();
    let before = ledger.cursor().await.unwrap();
    for _ in 0..3 {
        assert_eq!(ledger.bill(&batch, before.as_ref(), cursor.clone()).await, Ok(Billed::Done));
        assert_eq!(ledger.cursor().await, Ok(Some(cursor.clone())));
    }
    let credits = async |name: &str| ledger.state(&id(name)).await.unwrap().unwrap().half_credits;
    assert_eq!((credits("bill1").await, credits("bill2").await), (3, 5), "applied once");
    let next = Cursor::new("line 8").unwrap();
    assert_eq!(ledger.bill(&batch, Some(&cursor), next.clone()).await, Ok(Billed::Done));
    assert_eq!((credits("bill1").await, credits("bill2").await), (6, 10));
    if ledger.is_shared() {
        // A copy of the first batch that arrives late.
        assert_eq!(ledger.bill(&batch, before.as_ref(), cursor).await, Ok(Billed::Moved));
        assert_eq!((credits("bill1").await, credits("bill2").await), (6, 10));
    }
    assert_eq!(ledger.bill(&[], Some(&next), Cursor::new("line 9").unwrap()).await, Ok(Billed::Done));
    assert_eq!(ledger.cursor().await.unwrap(), Cursor::new("line 9"));
}

async fn checked_calls_are_kept_longer_than_reported_ones(subject: &Subject) {
    let (ledger, who) = (&subject.ledger, execution("calls"));
    subject.start(&who).await;
    let call = |n: u32, reported| ToolCall {
        id: n.to_string(),
        tool: "api_call".to_owned(),
        url: "https://api.test/\"ü\" x".to_owned(),
        method: "GET".to_owned(),
        credential_used: Some("KEY".to_owned()),
        response_status: n.is_multiple_of(2).then_some(200),
        response_size_bytes: u64::from(n),
        latency_ms: 1.5,
        blocked: n % 2 == 1,
        block_reason: (n % 2 == 1).then(|| "leak_detected".to_owned()),
        truncated: false,
        called_at: subject.now(),
        reported,
    };
    assert_eq!(ledger.tool_calls(&who.id).await, Ok(vec![]));
    let kept = async || {
        let calls = ledger.tool_calls(&who.id).await.unwrap();
        calls.iter().map(|call| call.id.parse::<u32>().unwrap()).collect::<Vec<_>>()
    };
    let first = call(1, true);
    // After a lost reply, a call is recorded again.
    for _ in 0..2 {
        ledger.record(&who.id, first.clone()).await.unwrap();
        assert_eq!(ledger.tool_calls(&who.id).await, Ok(vec![first.clone()]));
    }
    for n in 2..=60 {
        ledger.record(&who.id, call(n, true)).await.unwrap();
    }
    assert_eq!(kept().await, (11..=60).collect::<Vec<_>>());
    for n in 61..=100 {
        ledger.record(&who.id, call(n, false)).await.unwrap();
    }
    assert_eq!(kept().await, (51..=100).collect::<Vec<_>>());
    ledger.record(&who.id, call(101, true)).await.unwrap();
    assert_eq!(kept().await, (52..=101).collect::<Vec<_>>(), "a reported one takes a reported one's place");
    for n in 102..=111 {
        ledger.record(&who.id, call(n, false)).await.unwrap();
    }
    let judged: Vec<u32> = (61..=100).chain(102..=111).collect();
    assert_eq!(kept().await, judged);
    ledger.record(&who.id, call(112, true)).await.unwrap();
    assert_eq!(kept().await, judged, "nor do they make a judged one go");
    ledger.record(&who.id, call(113, false)).await.unwrap();
    assert_eq!(kept().await, judged.into_iter().skip(1).chain([113]).collect::<Vec<_>>());
    assert_eq!(ledger.record(&id("nobody"), call(1, false)).await, Err(LedgerError::Unknown));
}

async fn approvals_are_requested_decided_and_used_once(subject: &mut Subject) {
    let ledger = subject.ledger.clone();
    for name in ["asks", "asks too"] {
        subject.start(&execution(name)).await;
    }
    let pending = |id: &str| Ok(ApprovalAnswer::Pending(id.to_owned()));
    let decide =
        async |subject: &Subject, id: &str, decision| ledger.decide(id, decision, subject.now()).await.unwrap();
    let first = subject.asked("p1", "asks", 1);
    assert_eq!(subject.ask(&first).await, pending("p1"));
    assert_eq!(subject.ask(&subject.asked("p2", "asks", 1)).await, pending("p1"), "it is the same request");
    assert_eq!(subject.ask(&subject.asked("p2", "asks", 2)).await, pending("p2"));
    assert_eq!(subject.ask(&subject.asked("p3", "asks too", 1)).await, pending("p3"), "each has its own");
    assert_eq!(subject.ask(&subject.asked("p1", "asks", 3)).await, Err(LedgerError::Exists));
    assert_eq!(subject.ask(&subject.asked("p4", "nobody", 1)).await, Err(LedgerError::Unknown));
    let shown = ledger.approval("p1", subject.now()).await.unwrap().unwrap();
    let apart = |a: Millis, b: Millis| a.since(b).max(b.since(a));
    assert!(apart(shown.created_at, first.created_at) < Duration::from_secs(5), "{shown:?}");
    assert_eq!(shown.expires_at.since(shown.created_at), Duration::from_secs(600));
    assert_eq!(Approval { created_at: first.created_at, expires_at: first.expires_at, ..shown }, first);

    assert_eq!(decide(subject, "p1", Decision::Approve).await, DecisionResult::Done);
    assert_eq!(decide(subject, "p1", Decision::Deny).await, DecisionResult::AlreadyDecided(ApprovalState::Approved));
    assert_eq!(decide(subject, "p2", Decision::Deny).await, DecisionResult::Done);
    assert_eq!(decide(subject, "nothing", Decision::Deny).await, DecisionResult::Unknown);
    let states = async |subject: &Subject| {
        let all = ledger.approvals(subject.now()).await.unwrap();
        let mut all: Vec<_> = all.into_iter().map(|one| (one.id, one.state)).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    };
    let row = |id: &str, state| (id.to_owned(), state);
    let want =
        [row("p1", ApprovalState::Approved), row("p2", ApprovalState::Denied), row("p3", ApprovalState::Pending)];
    assert_eq!(states(subject).await, want);
    let of = async |execution: &str| {
        let own = ledger.approvals_of(&id(execution), subject.now()).await.unwrap();
        own.into_iter().map(|one| (one.id, one.state)).collect::<Vec<_>>()
    };
    assert_eq!(of("asks").await, want[..2]);
    assert_eq!(of("asks too").await, want[2..]);
    assert_eq!(of("nobody").await, []);

    let again: Vec<_> = (0..20)
        .map(|n| {
            let (ledger, asked, now) = (ledger.clone(), subject.asked(&format!("again{n}"), "asks", 1), subject.now());
            tokio::spawn(async move { ledger.ask(asked, now).await.unwrap() })
        })
        .collect();
    let mut let_through = 0;
    for answer in again {
        let_through += u32::from(answer.await.unwrap() == ApprovalAnswer::Approved("p1".to_owned()));
    }
    assert_eq!(let_through, 1, "an approval is used once");
    assert_eq!(ledger.approval("p1", subject.now()).await.unwrap().unwrap().state, ApprovalState::Used);
    assert_eq!(decide(subject, "p1", Decision::Deny).await, DecisionResult::AlreadyDecided(ApprovalState::Used));
    assert_eq!(subject.ask(&subject.asked("p5", "asks", 2)).await, Ok(ApprovalAnswer::Denied("p2".to_owned())));

    let late = subject.asked("late", "asks too", 9);
    assert_eq!(subject.ask(&late).await, pending("late"));
    assert_eq!(decide(subject, "late", Decision::Approve).await, DecisionResult::Done);
    subject.pass(Duration::from_secs(601));
    assert_eq!(decide(subject, "p3", Decision::Approve).await, DecisionResult::Expired);
    for expired in ["p3", "late"] {
        assert_eq!(ledger.approval(expired, subject.now()).await.unwrap().unwrap().state, ApprovalState::Expired);
    }
    assert_eq!(subject.ask(&subject.asked("later", "asks too", 9)).await, pending("later"), "too late to be used");
    assert_eq!(subject.ask(&subject.asked("p6", "asks", 2)).await, pending("p6"), "a denial ends, too");
}

async fn approvals_are_bounded(subject: &mut Subject) {
    let ledger = subject.ledger.clone();
    subject.start(&Execution { expires_at: None, ..execution("many") }).await;
    let asked = |subject: &Subject, n: usize| {
        let mut asked = subject.asked(&format!("m{n}"), "many", 0);
        asked.digest[..8].copy_from_slice(&n.to_le_bytes());
        asked.url = "https://api.test/".repeat(10_000);
        asked
    };
    for n in 0..MAX_OPEN {
        assert!(matches!(subject.ask(&asked(subject, n)).await, Ok(ApprovalAnswer::Pending(_))), "{n}");
    }
    assert_eq!(subject.ask(&asked(subject, MAX_OPEN)).await, Ok(ApprovalAnswer::Full));
    assert!(matches!(subject.ask(&asked(subject, 0)).await, Ok(ApprovalAnswer::Pending(_))), "what is known is told");
    // Expired entries make room, and their number is bounded too.
    for n in MAX_OPEN..4 * MAX_OPEN {
        let oldest = format!("m{}", n - MAX_OPEN);
        assert_eq!(ledger.decide(&oldest, Decision::Deny, subject.now()).await, Ok(DecisionResult::Done));
        assert!(matches!(subject.ask(&asked(subject, n)).await, Ok(ApprovalAnswer::Pending(_))), "{n}");
    }
    let count = async |subject: &Subject| {
        let all = ledger.approvals(subject.now()).await.unwrap();
        assert!(all.iter().all(|one| one.url.len() < 4000));
        all.iter().filter(|one| one.execution.as_str() == "many").count()
    };
    let kept = count(subject).await;
    assert!((2 * MAX_OPEN..=2 * MAX_OPEN + 1).contains(&kept), "{kept}");
    subject.pass(Duration::from_secs(601 + 3600));
    assert!(matches!(subject.ask(&asked(subject, 5000)).await, Ok(ApprovalAnswer::Pending(_))));
    assert_eq!(count(subject).await, 1, "what ended long ago is dropped");
}

async fn ended_executions_are_removed(subject: &mut Subject) {
    let ledger = subject.ledger.clone();
    subject.start(&Execution { expires_at: None, ..execution("live") }).await;
    let late = Execution { expires_at: None, ..execution("over") };
    subject.start(&late).await;
    ledger.record(&late.id, ToolCall::default()).await.unwrap();
    assert!(matches!(subject.ask(&subject.asked("o", "over", 1)).await, Ok(ApprovalAnswer::Pending(_))));
    assert_eq!(ledger.stop(&late.id, StopReason::Asked, subject.now()).await, Ok(true));
    subject.pass(Duration::from_secs(3500));
    subject.start(&execution("one")).await;
    assert!(ledger.state(&late.id).await.unwrap().is_some());
    subject.pass(Duration::from_secs(101));
    subject.start(&execution("another")).await;
    assert_eq!(ledger.state(&late.id).await, Ok(None));
    assert_eq!(ledger.tool_calls(&late.id).await, Ok(vec![]));
    assert_eq!(ledger.approval("o", subject.now()).await, Ok(None));
    assert_eq!(subject.take(&late, TOOL, FREE).await, TakeResult::Unknown);
    let left = ledger.list().await.unwrap();
    assert!(left.iter().any(|one| one.execution.id.as_str() == "live"), "a live one never");
    assert!(left.iter().any(|one| one.execution.is_static), "nor a static one");
    assert!(!left.iter().any(|one| one.execution.id.as_str() == "over"));
}

const KEY: [u8; 32] = [7; 32];

type Raised = Arc<std::sync::Mutex<Vec<TamperedRecord>>>;

fn seal(key: [u8; 32], raised: &Raised) -> Seal {
    let raised = raised.clone();
    Seal::new(Secret::new(key.to_vec()), Arc::new(move |altered| raised.lock().unwrap().push(altered.clone())))
}

/// Signs in the same way as the proxies.
fn mac(parts: [&str; 5]) -> String {
    use hmac::{Hmac, KeyInit, Mac};
    let mut hmac = Hmac::<sha2::Sha256>::new_from_slice(&KEY).unwrap();
    for part in parts {
        hmac.update(&(part.len() as u64).to_be_bytes());
        hmac.update(part.as_bytes());
    }
    exeat::files::hex(&hmac.finalize().into_bytes())
}

/// A server on a Unix socket. Its clock cannot be moved, but all the times that it stores can.
struct Redis {
    process: Child,
    dir: tempfile::TempDir,
    password: &'static str,
}

impl Redis {
    fn start(password: &'static str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let process = Self::spawn(dir.path(), password);
        let redis = Self { process, dir, password };
        redis.wait();
        redis
    }

    fn spawn(dir: &Path, password: &str) -> Child {
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--save", "", "--unixsocket"]).arg(dir.join("sock")).current_dir(dir);
        if !password.is_empty() {
            command.args(["--requirepass", password]);
        }
        command.stdout(Stdio::null()).spawn().expect("redis-server must be installed")
    }

    fn wait(&self) {
        let since = Instant::now();
        while std::os::unix::net::UnixStream::connect(self.socket()).is_err() {
            assert!(since.elapsed() < Duration::from_secs(20), "redis-server comes up");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        std::fs::remove_file(self.socket()).unwrap();
    }

    fn again(&mut self) {
        self.process = Self::spawn(self.dir.path(), self.password);
        self.wait();
    }

    fn signal(&self, name: &str) {
        let done = Command::new("kill").args([name, &self.process.id().to_string()]).status().unwrap();
        assert!(done.success());
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    fn connect(&self) -> Connect {
        let socket = self.socket();
        Arc::new(move || {
            let socket = socket.clone();
            Box::pin(async move { Ok(Box::new(tokio::net::UnixStream::connect(socket).await?) as Box<dyn Stream>) })
        })
    }

    fn ledger(&self, proxy: &str) -> Ledger {
        self.ledger_with(proxy, seal(KEY, &Raised::default()))
    }

    fn ledger_with(&self, proxy: &str, seal: Seal) -> Ledger {
        Ledger::shared(Server::parse("redis://unused.test/5").unwrap(), seal, proxy, self.connect())
    }

    fn raw(&self) -> redis::Connection {
        let client = redis::Client::open(format!("redis+unix://{}?db=5", self.socket().display())).unwrap();
        client.get_connection().unwrap()
    }

    /// Moves all stored times into the past.
    fn pass(&self, time: Duration) {
        const SCRIPT: &str = r"
            local by = tonumber(ARGV[1])
            local function earlier(n) return string.format('%.0f', tonumber(n) - by) end
            for _, key in ipairs(redis.call('KEYS', 'exeat:*')) do
              if string.match(key, ':x$') then
                for _, field in ipairs({ 'expires', 'ta', 'ra', 'stopped_at' }) do
                  local at = redis.call('HGET', key, field)
                  if at then redis.call('HSET', key, field, earlier(at)) end
                end
              elseif string.match(key, ':approvals$') then
                local all = redis.call('HGETALL', key)
                for i = 1, #all, 2 do
                  local head, created, expires, rest = string.match(all[i + 1], '^(%a+ %x+ )(%d+) (%d+)(.*)$')
                  redis.call('HSET', key, all[i], head .. earlier(created) .. ' ' .. earlier(expires) .. rest)
                end
              elseif key == 'exeat:executions' then
                for _, id in ipairs(redis.call('ZRANGE', key, 0, -1)) do
                  redis.call('ZINCRBY', key, -by, id)
                end
              end
              local left = redis.call('PTTL', key)
              if left > 0 then redis.call('PEXPIRE', key, left - by) end
            end";
        let millis = u64::try_from(time.as_millis()).unwrap();
        redis::Script::new(SCRIPT).arg(millis).invoke::<()>(&mut self.raw()).unwrap();
        self.sign_decisions();
    }

    /// Signs decisions again, because their times are part of the signature.
    fn sign_decisions(&self) {
        let mut raw = self.raw();
        for key in redis::cmd("KEYS").arg("exeat:*:approvals").query::<Vec<String>>(&mut raw).unwrap() {
            let all: Vec<(String, String)> = redis::cmd("HGETALL").arg(&key).query(&mut raw).unwrap();
            for (id, text) in all {
                let words: Vec<&str> = text.splitn(6, ' ').collect();
                let [state, digest, created, expires, decision, request] = words[..] else { panic!("{text}") };
                if decision == "-" {
                    continue;
                }
                let decided = if state == "used" { "approved" } else { state };
                let mac = mac([
                    "exeat ledger 1",
                    "decision",
                    &key,
                    &id,
                    &[decided, digest, created, expires, request].join(" "),
                ]);
                let text = format!("{state} {digest} {created} {expires} {mac} {request}");
                redis::cmd("HSET").arg(&key).arg(&id).arg(text).query::<()>(&mut raw).unwrap();
            }
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn two_proxies_on_one_server_share_their_limits() {
    let redis = Redis::start("");
    let proxies = [Arc::new(redis.ledger("one")), Arc::new(redis.ledger("two"))];
    let who = execution("fleet");
    proxies[0].start(who.clone(), Millis::now()).await.unwrap();
    assert!(proxies[1].find(&who.id).await.unwrap().unwrap() == who);
    let caps = Caps { per_execution: None, per_minute: Some(10) };
    let calls: Vec<_> = (0..100)
        .map(|n: usize| {
            let (ledger, who) = (proxies[n % 2].clone(), who.clone());
            // The clocks of the proxies differ by an hour.
            let now = Millis::now().plus(Duration::from_secs(3600) * u32::try_from(n % 2).unwrap());
            tokio::spawn(async move { ledger.take(&who, TOOL, caps, now).await.unwrap() })
        })
        .collect();
    let mut counted = 0;
    for call in calls {
        counted += u32::from(matches!(call.await.unwrap(), TakeResult::Counted { .. }));
    }
    assert_eq!(counted, 10);
    // Each proxy bills from its own record, onto one bill.
    for proxy in &proxies {
        assert_eq!(proxy.bill(&[(who.id.clone(), 1)], None, Cursor::new("7").unwrap()).await, Ok(Billed::Done));
    }
    assert_eq!(proxies[0].state(&who.id).await.unwrap().unwrap().half_credits, 2);
    assert_eq!(proxies[1].stop(&who.id, StopReason::Asked, Millis::now()).await, Ok(true));
    assert_eq!(proxies[0].take(&who, TOOL, FREE, Millis::now()).await, Ok(TakeResult::Stopped));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn without_its_server_nothing_passes_and_refusals_are_fast() {
    let mut redis = Redis::start("");
    let ledger = redis.ledger("one");
    let who = execution("a");
    ledger.start(who.clone(), Millis::now()).await.unwrap();
    let refused = async || {
        for _ in 0..3 {
            let since = Instant::now();
            let taken = ledger.take(&who, TOOL, FREE, Millis::now()).await;
            assert_eq!(taken, Err(LedgerError::Unavailable));
            assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
        }
    };
    let recovers = async || {
        let since = Instant::now();
        loop {
            match ledger.take(&who, TOOL, FREE, Millis::now()).await {
                Err(LedgerError::Unavailable) => assert!(since.elapsed() < Duration::from_secs(20), "it recovers"),
                other => return other.unwrap(),
            }
        }
    };
    // The server stops responding.
    redis.signal("-STOP");
    refused().await;
    redis.signal("-CONT");
    assert!(matches!(recovers().await, TakeResult::Counted { .. }));
    // The server is killed and replaced by an empty one.
    redis.kill();
    refused().await;
    redis.again();
    assert_eq!(recovers().await, TakeResult::Unknown);
    assert!(ledger.find(&who.id).await.unwrap().is_some(), "facts are remembered");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn a_password_is_required_and_malformed_replies_are_errors() {
    let redis = Redis::start("p@ss");
    let ledger =
        |url: &str| Ledger::shared(Server::parse(url).unwrap(), seal(KEY, &Raised::default()), "one", redis.connect());
    assert_eq!(ledger("redis://unused.test").check().await, Err(LedgerError::Unavailable));
    assert_eq!(ledger("redis://:wrong@unused.test").check().await, Err(LedgerError::Unavailable));
    assert_eq!(ledger("redis://default:p%40ss@unused.test").check().await, Ok(()));
    let ledger = ledger("redis://:p%40ss@unused.test/5");
    let who = execution("a");
    ledger.start(who.clone(), Millis::now()).await.unwrap();

    let client = redis::Client::open(format!("redis+unix://{}?db=5&pass=p%40ss", redis.socket().display())).unwrap();
    let mut raw = client.get_connection().unwrap();
    let mut set = |field: &str, value: &str| {
        redis::cmd("HSET").arg("exeat:{a}:x").arg(field).arg(value).query::<()>(&mut raw).unwrap();
    };
    let caps = Caps { per_execution: Some(5), per_minute: Some(5) };
    for field in ["tn", "ta", "tw", "expires"] {
        set(field, "nonsense");
        let taken = ledger.take(&who, TOOL, caps, Millis::now()).await;
        assert_eq!(taken, Err(LedgerError::Unavailable), "{field}");
        let now = Millis::now().0.to_string();
        set(
            field,
            [("expires", "9999999999999"), ("ta", &now)]
                .into_iter()
                .find(|(name, _)| *name == field)
                .map_or("1", |(_, value)| value),
        );
    }
    assert_eq!(ledger.take(&who, TOOL, caps, Millis::now()).await, Ok(TakeResult::Counted { call: 2 }));
    for (field, value) in [("facts", "{}"), ("stopped", "why"), ("credits", "-1")] {
        set(field, value);
        assert_eq!(ledger.state(&who.id).await, Err(LedgerError::Unavailable), "{field}");
    }
}

/// All attempts on approvals and facts by an attacker with write access to the server, including the two that cannot be
/// detected.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn unsigned_entries_are_refused() {
    let redis = Redis::start("");
    let raised = Raised::default();
    let subject = Subject {
        ledger: Arc::new(redis.ledger_with("one", seal(KEY, &raised))),
        redis: Some(Redis::start("")),
        ahead: Duration::ZERO,
    };
    let ledger = &subject.ledger;
    for id in ["a", "b"] {
        subject.start(&execution(id)).await;
    }
    for (id, execution, digest) in [("p", "a", 1), ("q", "a", 2), ("r", "b", 1), ("s", "a", 3)] {
        let asked = subject.ask(&subject.asked(id, execution, digest)).await;
        assert_eq!(asked, Ok(ApprovalAnswer::Pending(id.to_owned())));
    }
    let (place, others) = ("exeat:{a}:approvals", "exeat:{b}:approvals");
    let mut raw = redis.raw();
    let mut get = |place: &str, id: &str| redis::cmd("HGET").arg(place).arg(id).query::<String>(&mut raw).unwrap();
    let (p, q, r) = (get(place, "p"), get(place, "q"), get(others, "r"));
    assert_eq!(ledger.decide("s", Decision::Approve, subject.now()).await, Ok(DecisionResult::Done));
    let s = get(place, "s");
    let digest = |n: u8| format!("{n:02x}").repeat(32);
    let approved = |text: &str| text.replace("pending ", "approved ");
    let mac_of_s = s.split(' ').nth(4).unwrap();
    let rows = [
        ("approved by nobody", "p", approved(&p)),
        ("with another's decision", "p", approved(&p).replace(" - ", &format!(" {mac_of_s} "))),
        ("another's approval under its id", "p", s.clone()),
        ("an approval for its digest", "p", s.replace(&digest(3), &digest(1))),
        ("an approval with its digest in front", "p", s.replacen(&digest(3), &digest(1), 1)),
        ("another execution's request", "p", r.clone()),
        ("another request of its own", "p", q.clone()),
        ("another text to be decided on", "p", p.replace("https://api.test", "https://nice.test")),
        ("another digest to be decided on", "p", p.replacen(&digest(1), &digest(9), 1)),
        ("a longer time to decide", "p", {
            let expires = p.split(' ').nth(3).unwrap();
            p.replacen(expires, "9999999999999", 1)
        }),
        ("denied by nobody", "p", p.replace("pending ", "denied ")),
        ("used by nobody", "p", p.replace("pending ", "used ")),
        ("nonsense", "p", "approved".to_owned()),
    ];
    let now = subject.now();
    for (what, id, forged) in rows {
        redis::cmd("HSET").arg(place).arg(id).arg(&forged).query::<()>(&mut redis.raw()).unwrap();
        let asked = subject.ask(&subject.asked("new", "a", 1)).await;
        assert!(!matches!(asked, Ok(ApprovalAnswer::Approved(_))), "{what}: {asked:?}");
        redis::cmd("HSET").arg(place).arg(id).arg(&forged).query::<()>(&mut redis.raw()).unwrap();
        assert_eq!(ledger.decide(id, Decision::Approve, now).await, Err(LedgerError::Unavailable), "{what}");
        assert_eq!(ledger.approval(id, now).await, Err(LedgerError::Unavailable), "{what}");
        let shown = ledger.approvals_of(&self::id("a"), now).await.unwrap();
        assert!(shown.iter().all(|one| one.id != id), "{what}");
        redis::cmd("HDEL").arg(place).arg("new").query::<()>(&mut redis.raw()).unwrap();
        redis::cmd("DEL").arg("exeat:approval:new").query::<()>(&mut redis.raw()).unwrap();
        redis::cmd("HSET").arg(place).arg(id).arg(&p).query::<()>(&mut redis.raw()).unwrap();
    }
    assert!(!raised.lock().unwrap().is_empty(), "alarms");
    assert_eq!(ledger.decide("p", Decision::Approve, now).await, Ok(DecisionResult::Done), "as it was written");
    assert_eq!(subject.ask(&subject.asked("new", "a", 1)).await, Ok(ApprovalAnswer::Approved("p".to_owned())));

    // A used approval is restored: the proxy that used it detects this; another one cannot.
    let used = get(place, "p");
    redis::cmd("HSET")
        .arg(place)
        .arg("p")
        .arg(used.replace("used ", "approved "))
        .query::<()>(&mut redis.raw())
        .unwrap();
    assert_eq!(subject.ask(&subject.asked("new", "a", 1)).await, Err(LedgerError::Unavailable));

    // The expiry of an execution is signed; removing the script's own field does not prolong it.
    let short = Execution { expires_at: Some(Millis::now().plus(Duration::from_millis(1))), ..execution("short") };
    subject.start(&short).await;
    redis::cmd("HDEL").arg("exeat:{short}:x").arg("expires").query::<()>(&mut redis.raw()).unwrap();
    let since = Instant::now();
    while !matches!(subject.take(&short, TOOL, FREE).await, TakeResult::Expired) {
        assert!(since.elapsed() < Duration::from_secs(20));
    }

    // Facts signed by a proxy with another key are refused individually, and omitted from lists.
    let other = redis.ledger_with("two", seal([8; 32], &Raised::default()));
    assert_eq!(other.find(&id("a")).await, Err(LedgerError::Unavailable));
    assert_eq!(other.state(&id("a")).await, Err(LedgerError::Unavailable));
    assert_eq!(other.list().await, Ok(vec![]));
    assert_eq!(other.approvals(now).await, Ok(vec![]));
    assert_eq!(ledger.list().await.unwrap().len(), 3);
}

/// Measures the cost of a call, and the size of an execution's state.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures; needs redis-server and a release build"]
async fn figures() {
    const EXECUTIONS: usize = 10_000;
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    };
    let dir = tempfile::tempdir().unwrap();
    let redis = Redis::start("");
    let stores = [
        ("memory", Ledger::memory()),
        ("embedded", Ledger::embedded(&dir.path().join("ledger")).unwrap()),
        ("shared", redis.ledger("one")),
    ];
    for (name, ledger) in stores {
        let ledger = Arc::new(ledger);
        let before = resident();
        for n in 0..EXECUTIONS {
            ledger.start(execution(&format!("0198f1c2-0000-7000-8000-{n:012}")), Millis::now()).await.unwrap();
        }
        let each = (resident().saturating_sub(before)) / EXECUTIONS as u64;
        let who = Arc::new(execution(&format!("0198f1c2-0000-7000-8000-{:012}", 77)));
        for tasks in [1_u32, 64] {
            let calls = if name == "memory" { 200_000 } else { 20_000 } / tasks;
            let since = Instant::now();
            let mut all = tokio::task::JoinSet::new();
            for _ in 0..tasks {
                let (ledger, who) = (ledger.clone(), who.clone());
                all.spawn(async move {
                    for _ in 0..calls {
                        ledger.take(&who, TOOL, FREE, Millis::now()).await.unwrap();
                    }
                });
            }
            all.join_all().await;
            let per_call = since.elapsed() / (calls * tasks);
            writeln!(std::io::stdout(), "{name}: {tasks} at a time: {per_call:?} a call; {each} bytes an execution")
                .unwrap();
        }
    }
}
