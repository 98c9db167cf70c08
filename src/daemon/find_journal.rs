//! Writes finds to the ledger in the order of their arrival, so that they survive a restart.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::audit::finds::FindEvent;
use crate::flow::Services;
use crate::ledger::{Execution, LedgerError, Millis};
use crate::model::name::{ExecutionId, TaskName};
use crate::model::unique_id;

/// Time between retries while the ledger is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Interval at which the ledger is checked for executions that another proxy has stopped or restarted.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of executions that are checked at the same time.
const MAX_CONCURRENT: usize = 64;
/// Interval at which executions that the ledger no longer has are forgotten.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);

/// Restores the finds that the ledger has from earlier runs. While it is unavailable, requests are refused anyway.
pub(crate) async fn restore(services: &Services) {
    match services.ledger.list().await {
        Ok(known) => {
            for state in known.into_iter().filter(|state| state.finds > 0) {
                services.finds.restore(&state.execution.id, state.finds);
            }
        }
        Err(error) => tracing::error!(%error, "requests are refused until the ledger answers"),
    }
}

/// Writes finds to the ledger as they arrive, until all exchanges have ended.
pub(crate) async fn run(services: Arc<Services>, mut events: mpsc::Receiver<FindEvent>) {
    let mut cleanup = interval(CLEANUP_INTERVAL);
    cleanup.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let event = tokio::select! {
            // Finds that arrived before the abort are written first.
            biased;
            event = events.recv() => event,
            () = services.abort.cancelled() => return,
            _ = cleanup.tick() => {
                forget_removed(&services).await;
                continue;
            }
        };
        match event {
            Some(FindEvent::Find(execution)) => write_find(&services, &execution).await,
            // The receiver may have been dropped.
            Some(FindEvent::Settled(sender)) => drop(sender.send(())),
            None => return,
        }
    }
}

/// Applies changes of other proxies that share the ledger. Exchanges in progress of an execution that was stopped there
/// end (new calls of it are refused by the ledger at once), and an execution that was restarted there is no longer
/// stopped here.
pub(crate) async fn watch(services: Arc<Services>) {
    while services.abort.run_until_cancelled(sleep(POLL_INTERVAL)).await.is_some() {
        for (execution, is_stopped) in states(&services, services.caller_connections.callers()).await {
            if is_stopped {
                services.finds.stop(&execution);
            }
        }
        for (execution, is_stopped) in states(&services, services.finds.stopped()).await {
            if !is_stopped {
                services.finds.forget(&execution);
            }
        }
    }
}

/// Returns the executions that the ledger has, and whether they are stopped there.
async fn states(services: &Services, executions: Vec<ExecutionId>) -> Vec<(ExecutionId, bool)> {
    let mut known = Vec::new();
    for some in executions.chunks(MAX_CONCURRENT) {
        let states = join_all(some.iter().map(|execution| services.ledger.state(execution))).await;
        for (execution, state) in some.iter().zip(states) {
            known.extend(state.ok().flatten().map(|state| (execution.clone(), state.stopped.is_some())));
        }
    }
    known
}

async fn write_find(services: &Services, execution: &ExecutionId) {
    let find = unique_id::new().to_string();
    loop {
        let max_finds = services.policies.snapshot().leak().max_finds();
        let written = async {
            add_static(services, execution).await?;
            services.ledger.find_noted(execution, max_finds, &find, Millis::now()).await
        };
        match written.await {
            Ok(true) => return services.finds.stop(execution),
            Ok(false) => return,
            Err(error) => {
                tracing::error!(%error, %execution, "a find cannot be written to the ledger; retrying");
                if services.abort.run_until_cancelled(sleep(RETRY_INTERVAL)).await.is_none() {
                    return;
                }
            }
        }
    }
}

/// Adds the execution of a static token to the ledger, which otherwise has it from its first call on. A find may come before: in a
/// DNS query, or in a request that was refused before it was counted. Finds of an execution that the ledger does not have stop it.
async fn add_static(services: &Services, execution: &ExecutionId) -> Result<(), LedgerError> {
    let policy = services.policies.snapshot();
    // Its id is the name of the task.
    let Some(task) = policy.task(&TaskName::new(execution.as_str())) else { return Ok(()) };
    if services.ledger.find(execution).await?.is_some() {
        return Ok(());
    }
    match services.ledger.start(Execution::of_static(task.name(), Millis::now()), Millis::now()).await {
        // Without room it is stopped. A call that was counted meanwhile has added it.
        Ok(()) | Err(LedgerError::Full | LedgerError::Exists) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn forget_removed(services: &Services) {
    for execution in services.finds.known() {
        if matches!(services.ledger.find(&execution).await, Ok(None)) {
            services.finds.forget(&execution);
        }
    }
}
