//! No value of a credential leaves or returns: every form, on every surface, by every way in.

pub mod benign;
pub mod blanks_and_lists;
pub mod decoys;
pub mod disguised_values;
pub mod echoes;
pub mod equivalents;
pub mod evasions;

pub mod finds;
pub mod forms;
pub mod growing_parts;
pub mod guessing_sandbox;
pub mod halves;
pub mod inbound;
pub mod many;
pub mod masks;
pub mod message_structure;
pub mod one_write;
pub mod origin;
pub mod outbound;
pub mod page;
pub mod parts;
pub mod rare_forms;
pub mod road;
pub mod side_channels;
pub mod splits;
pub mod undecodable;

use crate::lab::{Lab, LabBuilder};
use forms::VALUES;
use origin::Recorder;
use road::Way;

/// A proxy that holds [`VALUES`], and the origins behind its ways in.
pub struct Field {
    pub lab: Lab,
    pub origins: Origins,
}

pub struct Origins {
    pub plain: Recorder,
    pub h1: Recorder,
    pub h2: Recorder,
}

impl Origins {
    async fn start(builder: &LabBuilder) -> Self {
        builder.dns.set("api.test", &["127.0.0.1"]);
        let plain = Recorder::start(None).await;
        let h1 = Recorder::start(Some((builder, &["http/1.1"]))).await;
        let h2 = Recorder::start(Some((builder, &["h2", "http/1.1"]))).await;
        Self { plain, h1, h2 }
    }

    /// Returns the origin of a way in.
    pub fn at(&self, way: Way) -> &Recorder {
        match way {
            Way::Http => &self.plain,
            Way::TunnelH1 => &self.h1,
            Way::Https | Way::TunnelH2 => &self.h2,
        }
    }
}

impl Field {
    pub async fn new() -> Self {
        Self::holding(&VALUES).await
    }

    /// Starts a proxy that holds these values.
    pub async fn holding(values: &[(&str, &str)]) -> Self {
        let builder = LabBuilder::new().await;
        let origins = Origins::start(&builder).await;
        let text = config(&builder, &[origins.plain.port, origins.h1.port, origins.h2.port], values);
        Self { lab: builder.proxy(&text).await, origins }
    }
}

/// Returns the configuration for `api.test` at these ports.
fn config(builder: &LabBuilder, ports: &[u16], values: &[(&str, &str)]) -> String {
    let names: Vec<_> = values.iter().map(|(name, _)| name).collect();
    let mut text = format!(
        "[leak]\nmax_finds = 1000000\n[integrations.api]\nallowed_domains = [\"api.test\", \"*.api.test\"]\n\
         ports = {ports:?}\nplain_http = true\n[tasks.t]\nintegrations = [\"api\"]\ncredentials = {names:?}\n"
    );
    for (name, value) in values {
        std::fs::write(builder.dir.path().join(name), value).unwrap();
        text.push_str(&format!(
            "[credentials.{name}]\nauth_type = \"bearer\"\nvalue = \"file:{name}\"\ndomains = [\"api.test\"]\n"
        ));
    }
    text
}

/// Stops the proxy and waits until nothing is in flight. Returns the origins.
async fn quiet(field: Field) -> Origins {
    let Field { lab, origins } = field;
    let Lab { daemon, dir, .. } = lab;
    assert!(daemon.shutdown().await);
    for origin in [&origins.plain, &origins.h1, &origins.h2] {
        origin.is_quiet().await;
    }
    drop(dir);
    origins
}
