//! The scenarios: each client runs rounds of one of them until the load ends.

mod faults;
mod refusals;
mod steady;
mod streams;
mod vanish;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::book::{Book, Scenario};
use crate::dice::Dice;
use crate::gateway::{Execution, Gateway};
use crate::world::{Way, World};

pub(crate) use faults::probe_added_rule;
pub(crate) use refusals::MALFORMED;

/// The executions that share the steady load.
const WORKERS: usize = 16;
/// Connections that are opened each second at the start.
const RAMP: u32 = 200;
/// The clients of the comparison without the proxy. They are not among the connections to the proxy.
const DIRECT: usize = 8;
/// The time in which all clients have to end after the load. Longer than the patience of a client.
const END_TIMEOUT: Duration = Duration::from_secs(240);

/// The connections of each scenario, of a thousand.
const SHARES: [(Scenario, usize); 14] = [
    (Scenario::Http1, 300),
    (Scenario::Http2, 150),
    (Scenario::AbsoluteForm, 100),
    (Scenario::Opaque, 120),
    (Scenario::WebSocket, 80),
    (Scenario::Events, 80),
    (Scenario::Credential, 60),
    (Scenario::NewConnection, 40),
    (Scenario::Refused, 20),
    (Scenario::Fault, 20),
    (Scenario::Slow, 15),
    (Scenario::Vanish, 10),
    (Scenario::Leak, 3),
    (Scenario::Limits, 2),
];

/// Returns the number of clients of a scenario.
fn clients(scenario: Scenario, connections: usize) -> usize {
    let share = SHARES.iter().find(|(known, _)| *known == scenario).map_or(0, |(_, share)| *share);
    (connections * share / 1_000).max(1)
}

/// The executions of the clients.
pub(crate) struct Executions {
    work: Vec<Arc<Execution>>,
    /// One for each client of [`Scenario::Credential`].
    credential: Vec<Arc<Execution>>,
    impatient: Vec<Arc<Execution>>,
    vague: Vec<Arc<Execution>>,
}

impl Executions {
    pub(crate) async fn start(gateway: &Gateway, connections: usize) -> Result<Self, String> {
        let mut all = Self { work: Vec::new(), credential: Vec::new(), impatient: Vec::new(), vague: Vec::new() };
        for _ in 0..WORKERS {
            all.work.push(gateway.start_execution("work").await?);
        }
        for _ in 0..clients(Scenario::Credential, connections) {
            all.credential.push(gateway.start_execution("work").await?);
        }
        for _ in 0..4 {
            all.impatient.push(gateway.start_execution("impatient").await?);
            all.vague.push(gateway.start_execution("vague").await?);
        }
        Ok(all)
    }

    /// The execution that checks reloads.
    pub(crate) fn of_reloads(&self) -> &Arc<Execution> {
        self.of(Scenario::Reload, 0)
    }

    /// Returns the execution of the n-th client of a scenario.
    fn of(&self, scenario: Scenario, n: usize) -> &Arc<Execution> {
        let all = match scenario {
            Scenario::Credential => &self.credential,
            Scenario::Fault => &self.impatient,
            Scenario::Vanish => &self.vague,
            _ => &self.work,
        };
        &all[n % all.len()]
    }

    /// Compares the counts of all executions in the ledger with the requests that were made.
    pub(crate) async fn check(&self, gateway: &Gateway, book: &Book) -> Result<(), String> {
        for execution in self.work.iter().chain(&self.credential).chain(&self.impatient).chain(&self.vague) {
            gateway.check_execution(execution, 0, book).await?;
        }
        Ok(())
    }
}

/// Starts all clients, some at a time. Each ends when the load ends.
pub(crate) async fn start(
    world: &Arc<World>,
    executions: &Arc<Executions>,
    connections: usize,
    seed: u64,
) -> JoinSet<()> {
    let mut all: Vec<(Scenario, usize)> = (0..DIRECT).map(|n| (Scenario::Direct, n)).collect();
    for (scenario, _) in SHARES {
        all.extend((0..clients(scenario, connections)).map(|n| (scenario, n)));
    }
    // In a random order, so that each moment of the ramp has a mix.
    let mut dice = Dice::new(seed);
    for n in (1..all.len()).rev() {
        all.swap(n, dice.below(n + 1));
    }
    let mut set = JoinSet::new();
    for (at, (scenario, n)) in all.into_iter().enumerate() {
        if !world.pause(Duration::from_secs(1) / RAMP).await {
            break;
        }
        let (world, executions, dice) = (world.clone(), executions.clone(), Dice::new(seed + 1 + at as u64));
        set.spawn(client(world, executions, scenario, n, dice));
    }
    set
}

/// Waits until all clients have ended.
pub(crate) async fn join(mut clients: JoinSet<()>, book: &Book) {
    let all = timeout(END_TIMEOUT, async {
        while let Some(ended) = clients.join_next().await {
            if let Err(error) = ended {
                book.violation(&format!("a client of the load panicked: {error}"));
            }
        }
    });
    if all.await.is_err() {
        book.violation(&format!("clients did not end within {END_TIMEOUT:?}"));
    }
}

async fn client(world: Arc<World>, executions: Arc<Executions>, scenario: Scenario, n: usize, mut dice: Dice) {
    let execution = executions.of(scenario, n);
    while !world.stop.is_cancelled() {
        let (world, dice) = (&*world, &mut dice);
        let round = match scenario {
            Scenario::AbsoluteForm => steady::requests(world, execution, scenario, Way::Absolute, dice).await,
            Scenario::Credential => steady::credentials(world, execution, dice).await,
            Scenario::Direct => steady::requests(world, execution, scenario, Way::Direct, dice).await,
            Scenario::Events => streams::events(world, execution, dice).await,
            Scenario::Fault => faults::round(world, execution, dice).await,
            Scenario::Http1 => steady::requests(world, execution, scenario, Way::Http1, dice).await,
            Scenario::Http2 => steady::parallel(world, execution, dice).await,
            Scenario::Leak => refusals::leaks(world, dice).await,
            Scenario::Limits => refusals::limits(world, dice).await,
            Scenario::NewConnection => steady::new_connection(world, execution, dice).await,
            Scenario::Opaque => steady::requests(world, execution, scenario, Way::Opaque, dice).await,
            Scenario::Refused => refusals::refused(world, execution, dice).await,
            Scenario::Reload => return,
            Scenario::Slow => steady::slow(world, execution, dice).await,
            Scenario::Vanish => vanish::round(world, execution, dice).await,
            Scenario::WebSocket => streams::websocket(world, execution, dice).await,
        };
        if let Err(why) = round {
            world.book.violation(&format!("{}: {why}", scenario.name()));
            world.pause(Duration::from_secs(1)).await;
        }
    }
}
