//! The surroundings of the stages: a compiled policy, an identified caller, and an audit log in a file.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use exeat::audit::chain::ChainKey;
use exeat::audit::finds::Finds;
use exeat::audit::record::Record;
use exeat::audit::sink::{LogLocation, Sink};
use exeat::ledger::Ledger;
use exeat::model::peer::Peer;
use exeat::model::secret::Secret;
use exeat::policy::compile;
use exeat::policy::rule::Policy;
use exeat::policy::settings::Vault;
use exeat::policy::source::{CompileContext, SecretSource, SourceError};
use exeat::stages::identify::{self, Caller};
use exeat::stages::throttle::Throttle;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

const TOKEN: &str = "bench-token-of-24-bytes-or-more";

/// The parts of a proxy that the stages need, without its listeners.
pub(crate) struct Lab {
    pub(crate) runtime: Runtime,
    pub(crate) policy: Policy,
    pub(crate) caller: Caller,
    pub(crate) throttle: Throttle,
    sink: Arc<Sink>,
    finds: Arc<Finds>,
    _dir: tempfile::TempDir,
}

impl Lab {
    /// Creates a lab whose task has this number of integrations. The last one is the only one for [`host`] of its
    /// number.
    pub(crate) fn new(rules: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let policy = policy(rules);
        let ledger = Arc::new(Ledger::memory());
        let headers = HeaderMap::from_iter([(PROXY_AUTHORIZATION, format!("Bearer {TOKEN}").parse().unwrap())]);
        let caller = runtime.block_on(identify::caller(&policy, &ledger, &headers, &peer()));
        let caller = caller.unwrap_or_else(|refusal| panic!("the token is known: {refusal:?}"));
        let finds = Arc::new(Finds::new(|| 10));
        let (sink, dir) = sink();
        Self { throttle: Throttle::new(ledger, finds.clone()), runtime, policy, caller, sink, finds, _dir: dir }
    }

    pub(crate) fn record(&self) -> Record {
        Record::begin(&self.sink, &self.finds, self.policy.log_values(), &peer())
    }
}

/// Returns a host that only the integration of this number allows.
pub(crate) fn host(rule: usize) -> String {
    format!("api.service{rule}.example")
}

fn peer() -> Peer {
    Peer::tcp("192.0.2.1:40000".parse().unwrap())
}

fn policy(rules: usize) -> Policy {
    let mut text = String::new();
    let mut names = Vec::new();
    for n in 0..rules {
        write!(
            text,
            "[integrations.i{n}]\nallowed_domains = [\"service{n}.example\", \"*.service{n}.example\"]\n\
             methods = [\"GET\", \"POST\"]\npaths = [\"/v1/*\", \"/files/*/content\"]\n"
        )
        .unwrap();
        names.push(format!("\"i{n}\""));
    }
    write!(
        text,
        "[plans.p]\n[plans.p.raw]\ncalls_per_minute = 1000000000\nrequests_per_second = 1000000000\n\
         concurrent = 1000000000\n[tasks.t]\ntoken = \"env:TOKEN\"\nplan = \"p\"\nraw = true\nintegrations = [{}]\n",
        names.join(", ")
    )
    .unwrap();
    let env = |_: &str| Some(TOKEN.to_owned());
    let here = Path::new("/nowhere");
    let context = CompileContext { base: here, state_dir: here, env: &env, secrets: &NoSecrets, is_offline: false };
    compile::compile(&text, &context).unwrap_or_else(|problems| panic!("{problems:?}")).policy
}

struct NoSecrets;

impl SecretSource for NoSecrets {
    fn secret(&self, _: &Vault, _: &str, name: &str) -> Result<Secret, SourceError> {
        Err(SourceError::Missing(name.to_owned()))
    }
}

/// Opens an audit log in a directory of its own. Its lines are not billed.
fn sink() -> (Arc<Sink>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let location = LogLocation {
        path: Some(dir.path().join("audit.jsonl")),
        state_dir: dir.path().join("state"),
        synced: false,
        rotate_bytes: u64::MAX,
        retention: Default::default(),
        refusals_per_second: 1_000,
    };
    let (announcements, mut written) = mpsc::channel(64);
    let key = ChainKey::new(Secret::new(vec![7; 32]));
    let (sink, _) = Sink::open(location, key, true, announcements).unwrap();
    // A receiver that is not read blocks the log. It ends with the sink.
    std::thread::spawn(move || while written.blocking_recv().is_some() {});
    (Arc::new(sink), dir)
}
