//! `exeat ca`: creates and prints the interception CA.

use std::path::Path;

use time::format_description::well_known::Rfc3339;

use super::terminal::{print, say};
use super::{CaAction, Exit, paths};
use crate::tls::authority::Authority;

pub(super) fn run(config: Option<&Path>, action: &CaAction) -> Exit {
    let settings = match paths::load_or_report(config) {
        Ok(config) => config.settings,
        Err(exit) => return exit,
    };
    let (cert, key) = (&settings.interception.ca_cert, settings.interception.ca_key.as_deref());
    let has_key = key.is_some_and(Path::exists);
    let existed = cert.exists() && has_key;
    if !existed && !matches!(action, CaAction::Init) && !cert.exists() && !has_key {
        say(format_args!("exeat: no CA at {}; run `exeat ca init` to create one", cert.display()));
        return Exit::Failed;
    }
    let authority = match Authority::of(cert, key) {
        Ok(authority) => authority,
        Err(error) => {
            say(format_args!("exeat: {error}"));
            return Exit::Failed;
        }
    };
    match action {
        CaAction::Init if existed => say(format_args!("the CA already exists: {}", cert.display())),
        CaAction::Init => say(format_args!("created {}", cert.display())),
        CaAction::Show => {
            let until = authority.not_after().format(&Rfc3339).unwrap_or_default();
            print(format_args!(
                "certificate  {}\nsha256       {}\nexpires      {until}\n",
                cert.display(),
                authority.fingerprint()
            ));
        }
        CaAction::Bundle => print(bundle(authority.ca_pem())),
    }
    Exit::Done
}

/// Returns a PEM bundle of the interception CA and the system's roots, for clients whose CA variable replaces their
/// own roots.
pub(super) fn bundle(ca_pem: &str) -> String {
    let system = rustls_native_certs::load_native_certs().certs;
    let mut text = ca_pem.to_owned();
    for cert in system {
        text.push_str(&to_pem(&cert));
    }
    text
}

fn to_pem(der: &[u8]) -> String {
    use base64::Engine;
    let body = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<_> = body.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}
