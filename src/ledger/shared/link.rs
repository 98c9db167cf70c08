//! The connection to the server, re-established when it breaks. Calls time out.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, FromRedisValue, Pipeline, RedisConnectionInfo, RedisResult, ScriptInvocation};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::super::{LedgerError, Result};
use super::server::Server;

/// The time limit for a call, including the wait for a connection.
const CALL_TIMEOUT: Duration = Duration::from_millis(500);
/// The time limit for connecting and for authentication, each.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause before reconnecting: initial and maximum.
const RECONNECT_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The upper bounds of the buckets for the duration of a call, in seconds.
const DURATIONS: [f64; 9] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.01, 0.05, 0.25, 0.5];

/// A transport to the server: TCP, or TLS over it.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Connects to the server. The caller supplies name resolution and TLS.
pub type Connect = Arc<dyn Fn() -> Connecting + Send + Sync>;

/// A connection attempt.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;

/// The handle to the connection.
pub(super) struct Link {
    current: watch::Receiver<Option<Live>>,
    /// The number of the latest connection that timed out.
    silent: Arc<watch::Sender<u64>>,
    /// Whether the latest call was answered, so that only changes are logged.
    answered: AtomicBool,
    round_trips: RoundTrips,
    _task: AbortOnDropHandle<()>,
}

#[derive(Clone)]
struct Live {
    number: u64,
    connection: MultiplexedConnection,
}

/// The round trips to the server since the start.
pub struct RoundTrips {
    /// The durations of those that were answered, in seconds.
    pub durations: Histogram,
    /// The number of those that failed.
    pub failed: Counter,
}

impl Default for RoundTrips {
    fn default() -> Self {
        Self { durations: Histogram::new(DURATIONS), failed: Counter::default() }
    }
}

impl Link {
    pub(super) fn round_trips(&self) -> &RoundTrips {
        &self.round_trips
    }

    /// Starts connecting in the background.
    pub(super) fn new(server: Server, connect: Connect) -> Self {
        let (publish, current) = watch::channel(None);
        let silent = Arc::new(watch::Sender::new(0));
        let task = tokio::spawn(stay_connected(server, connect, publish, silent.subscribe()));
        let task = AbortOnDropHandle::new(task);
        Self { current, silent, answered: AtomicBool::new(true), round_trips: RoundTrips::default(), _task: task }
    }

    pub(super) async fn invoke<T: FromRedisValue>(&self, call: &ScriptInvocation<'_>) -> Result<T> {
        self.run(|mut connection| async move { call.invoke_async(&mut connection).await }).await
    }

    pub(super) async fn query<T: FromRedisValue>(&self, command: &Cmd) -> Result<T> {
        self.run(|mut connection| async move { command.query_async(&mut connection).await }).await
    }

    pub(super) async fn query_all<T: FromRedisValue>(&self, commands: &Pipeline) -> Result<T> {
        self.run(|mut connection| async move { commands.query_async(&mut connection).await }).await
    }

    async fn run<T, F>(&self, work: impl FnOnce(MultiplexedConnection) -> F) -> Result<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let (mut number, began) = (None, Instant::now());
        let done = timeout(CALL_TIMEOUT, async {
            let live = self.live().await?;
            number = Some(live.number);
            Some(work(live.connection).await)
        });
        let error = match done.await {
            Ok(Some(Ok(value))) => {
                self.round_trips.durations.observe(began.elapsed().as_secs_f64());
                if !self.answered.swap(true, Ordering::Relaxed) {
                    tracing::info!("the ledger's server answers again");
                }
                return Ok(value);
            }
            // Log only the error's kind: its text may contain data from the server.
            Ok(Some(Err(error))) => format!("{:?}", error.kind()),
            Ok(None) => "no connection".to_owned(),
            Err(_) => {
                if let Some(number) = number {
                    self.silent.send_if_modified(|latest| {
                        let is_news = *latest < number;
                        *latest = number.max(*latest);
                        is_news
                    });
                }
                "no answer in time".to_owned()
            }
        };
        self.round_trips.failed.inc();
        if self.answered.swap(false, Ordering::Relaxed) {
            tracing::error!(error, "the ledger's server cannot be used; requests are refused");
        }
        Err(LedgerError::Unavailable)
    }

    /// Waits for a connection and returns it.
    async fn live(&self) -> Option<Live> {
        let mut current = self.current.clone();
        current.wait_for(Option::is_some).await.ok()?.clone()
    }
}

/// Keeps a connection open, and reconnects when it breaks.
async fn stay_connected(
    server: Server,
    connect: Connect,
    publish: watch::Sender<Option<Live>>,
    mut silent: watch::Receiver<u64>,
) {
    // The settings do not include user, password and database, because the crate keeps them without wiping.
    let settings = RedisConnectionInfo::default().set_skip_set_lib_name();
    let (mut number, mut pause) = (0_u64, RECONNECT_PAUSE.0);
    let mut last_reason = String::new();
    loop {
        number = number.saturating_add(1);
        let is_silent = silent.wait_for(|latest| *latest >= number);
        let mut was_live = false;
        let why = match timeout(CONNECT_TIMEOUT, open(&settings, &connect)).await {
            Ok(Ok((connection, driver))) => {
                let live = async {
                    authenticate(&server, &mut connection.clone()).await?;
                    was_live = true;
                    publish.send_replace(Some(Live { number, connection }));
                    let _ = is_silent.await;
                    Ok::<_, redis::RedisError>("it does not answer".to_owned())
                };
                let why = tokio::select! {
                    () = driver => "it closed the connection".to_owned(),
                    why = live => why.unwrap_or_else(|error| format!("{:?}", error.kind())),
                };
                publish.send_replace(None);
                why
            }
            Ok(Err(why)) => why,
            Err(_) => "it cannot be reached in time".to_owned(),
        };
        if was_live {
            (pause, last_reason) = (RECONNECT_PAUSE.0, String::new());
        }
        if last_reason != why {
            tracing::warn!(why, "cannot connect to the ledger's server; trying again");
            last_reason = why;
        }
        sleep(pause).await;
        pause = pause.saturating_mul(2).min(RECONNECT_PAUSE.1);
    }
}

/// Connects once, logs in and waits for an answer.
///
/// # Errors
/// The reason, without data of the server.
pub async fn reach(server: &Server, connect: &Connect) -> std::result::Result<(), String> {
    let settings = RedisConnectionInfo::default().set_skip_set_lib_name();
    let opened = timeout(CONNECT_TIMEOUT, open(&settings, connect)).await;
    let (mut connection, driver) = opened.map_err(|_| "it cannot be reached in time".to_owned())??;
    tokio::select! {
        () = driver => Err("it closed the connection".to_owned()),
        answer = authenticate(server, &mut connection) => answer.map_err(|error| format!("{:?}", error.kind())),
    }
}

async fn open<'a>(
    settings: &'a RedisConnectionInfo,
    connect: &Connect,
) -> std::result::Result<(MultiplexedConnection, impl Future<Output = ()> + use<'a>), String> {
    let stream = connect().await.map_err(|error| error.kind().to_string())?;
    // `run` enforces the time limit for responses.
    let how = AsyncConnectionConfig::new().set_response_timeout(None);
    let opened = MultiplexedConnection::new_with_config(settings, stream, how).await;
    opened.map_err(|error| format!("{:?}", error.kind()))
}

/// Authenticates, selects the database and checks that the server answers.
async fn authenticate(server: &Server, connection: &mut MultiplexedConnection) -> RedisResult<()> {
    let mut steps = Pipeline::new();
    if let Some(password) = &server.password {
        steps.cmd("AUTH").arg(server.user.as_deref()).arg(password.expose()).ignore();
    }
    steps.cmd("SELECT").arg(server.database).ignore().cmd("PING").ignore();
    match timeout(CONNECT_TIMEOUT, steps.query_async(connection)).await {
        Ok(done) => done,
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
    }
}
