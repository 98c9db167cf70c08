//! The scripts that run on the server.

use redis::{Script, ScriptInvocation};

use crate::model::name::ExecutionId;

/// The key of the index of executions that end, sorted by the time at which they may be removed.
pub(super) const INDEX: &str = "exeat:executions";
/// The key of the set of static executions.
pub(super) const STATIC: &str = "exeat:static";

/// All scripts. A script is loaded when the server does not have it yet.
pub(super) struct Scripts {
    pub(super) ask: Step,
    pub(super) bill: Step,
    pub(super) decide: Step,
    pub(super) found: Step,
    pub(super) give_back: Step,
    pub(super) record: Step,
    pub(super) restart: Step,
    pub(super) restore_finds: Step,
    pub(super) start: Step,
    pub(super) stop: Step,
    pub(super) take: Step,
}

/// One script.
pub(super) struct Step(Script);

impl Scripts {
    pub(super) fn new() -> Self {
        let step = |text: &str| Step(Script::new(&[include_str!("scripts/prelude.lua"), text].concat()));
        Self {
            ask: step(include_str!("scripts/ask.lua")),
            bill: step(include_str!("scripts/bill.lua")),
            decide: step(include_str!("scripts/decide.lua")),
            found: step(include_str!("scripts/found.lua")),
            give_back: step(include_str!("scripts/give_back.lua")),
            record: step(include_str!("scripts/record.lua")),
            restart: step(include_str!("scripts/restart.lua")),
            restore_finds: step(include_str!("scripts/restore_finds.lua")),
            start: step(include_str!("scripts/start.lua")),
            stop: step(include_str!("scripts/stop.lua")),
            take: step(include_str!("scripts/take.lua")),
        }
    }
}

impl Step {
    /// Prepares a call for an execution, with the keys in the order that `prelude.lua` defines.
    pub(super) fn of(&self, id: &ExecutionId) -> ScriptInvocation<'_> {
        let mut call = self.0.prepare_invoke();
        call.key(key(id, "x")).key(INDEX).key(key(id, "judged")).key(key(id, "reported")).key(key(id, "approvals"));
        call.key(STATIC).key(key(id, "digests")).key(key(id, "finds"));
        call
    }

    pub(super) fn prepare(&self) -> ScriptInvocation<'_> {
        self.0.prepare_invoke()
    }
}

/// Returns the key of a part of an execution. The braces (a hash tag) keep all parts of one execution together.
pub(super) fn key(id: &ExecutionId, part: &str) -> String {
    format!("exeat:{{{id}}}:{part}")
}
