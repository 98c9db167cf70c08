//! The journal of finds, which must survive the process, in the order of their arrival.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::audit::finds::FindEvent;
use crate::flow::Services;
use crate::ledger::Millis;
use crate::model::name::ExecutionId;

/// How long a ledger that takes nothing is left alone.
const PAUSE: Duration = Duration::from_millis(250);
/// How often it is looked whether another proxy has stopped an execution that is connected here.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often executions are looked for that the ledger has forgotten.
const TIDY_EVERY: Duration = Duration::from_secs(60);

/// Takes up what the ledger knows from before. Where it cannot be asked, nothing passes anyway.
pub(crate) async fn recall(services: &Services) {
    match services.ledger.list().await {
        Ok(known) => {
            for standing in known.into_iter().filter(|standing| standing.finds > 0) {
                services.finds.restore(&standing.execution.id, standing.finds);
            }
        }
        Err(error) => tracing::error!(%error, "requests are refused until the ledger answers"),
    }
}

/// Writes finds into the ledger as they come, until all exchanges have ended.
pub(crate) async fn run(services: Arc<Services>, mut notes: mpsc::Receiver<FindEvent>) {
    let mut tidy = interval(TIDY_EVERY);
    tidy.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let note = tokio::select! {
            // Those that came before the end are written down first.
            biased;
            note = notes.recv() => note,
            () = services.abort.cancelled() => return,
            _ = tidy.tick() => {
                forget(&services).await;
                continue;
            }
        };
        match note {
            Some(FindEvent::Find(execution)) => find(&services, &execution).await,
            // The caller may have been dropped.
            Some(FindEvent::Settled(asked)) => drop(asked.send(())),
            None => return,
        }
    }
}

/// Takes up what other proxies have done: what is under way of executions that they have stopped ends, though a call of
/// theirs is refused at once; and one that they have begun anew is no longer stopped here.
pub(crate) async fn watch(services: Arc<Services>) {
    while services.abort.run_until_cancelled(sleep(LOOK_EVERY)).await.is_some() {
        for execution in services.caller_connections.callers() {
            let standing = services.ledger.state(&execution).await;
            if standing.is_ok_and(|standing| standing.is_some_and(|standing| standing.stopped.is_some())) {
                services.finds.stop(&execution);
            }
        }
        for execution in services.finds.stopped() {
            let standing = services.ledger.state(&execution).await;
            if standing.is_ok_and(|standing| standing.is_some_and(|standing| standing.stopped.is_none())) {
                services.finds.forget(&execution);
            }
        }
    }
}

async fn find(services: &Services, execution: &ExecutionId) {
    loop {
        let most = services.policies.snapshot().leak().max_finds();
        match services.ledger.find_noted(execution, most, Millis::now()).await {
            Ok(true) => return services.finds.stop(execution),
            Ok(false) => return,
            Err(error) => {
                tracing::error!(%error, %execution, "a find cannot be written down; it is tried again");
                if services.abort.run_until_cancelled(sleep(PAUSE)).await.is_none() {
                    return;
                }
            }
        }
    }
}

async fn forget(services: &Services) {
    for execution in services.finds.known() {
        if matches!(services.ledger.find(&execution).await, Ok(None)) {
            services.finds.forget(&execution);
        }
    }
}
