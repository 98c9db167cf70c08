//! `exeat ca`: creates, prints and replaces the interception CA.

use std::path::Path;

use time::format_description::well_known::Rfc3339;

use super::terminal::{print, say};
use super::{CaAction, Exit, paths};
use crate::tls::authority::{Authority, AuthorityError};
use crate::tls::ca_files::{self, CaFiles, CaRole, TrustedCa};

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
    if matches!(action, CaAction::Show | CaAction::Prepare | CaAction::Rotate | CaAction::Retire) {
        let Some(key) = key else {
            say("exeat: without [interception].ca_key, the CA is created anew at each start");
            return Exit::Failed;
        };
        return on_files(&CaFiles::new(cert, key), cert, action).unwrap_or_else(|error| {
            say(format_args!("exeat: {error}"));
            Exit::Failed
        });
    }
    let authority = match Authority::of(cert, key) {
        Ok(authority) => authority,
        Err(error) => {
            say(format_args!("exeat: {error}"));
            return Exit::Failed;
        }
    };
    match action {
        CaAction::Bundle => print(bundle(&authority.ca_pem())),
        _ if existed => say(format_args!("the CA already exists: {}", cert.display())),
        _ => say(format_args!("created {}", cert.display())),
    }
    Exit::Done
}

fn on_files(files: &CaFiles, cert: &Path, action: &CaAction) -> Result<Exit, AuthorityError> {
    match action {
        CaAction::Prepare if files.prepare()? => say(format_args!(
            "created the next CA, which {} holds too; reload the daemon, give clients the new `exeat ca bundle`, then run \
             `exeat ca rotate`",
            cert.display()
        )),
        CaAction::Prepare => say("the next CA has been prepared before"),
        CaAction::Rotate if files.rotate()? => {
            say("the new CA issues the certificates after the next reload of the daemon");
            say("when no client needs the old one any more, run `exeat ca retire`");
        }
        CaAction::Rotate => {
            say("no other CA is prepared; of those that clients trust, this one issues the certificates:");
            show(files, cert)?;
        }
        CaAction::Retire => match files.retire()? {
            0 => say("there is no earlier CA"),
            _ => say("clients are no longer told to trust the earlier CA, after the next reload of the daemon"),
        },
        _ => show(files, cert)?,
    }
    Ok(Exit::Done)
}

fn show(files: &CaFiles, cert: &Path) -> Result<(), AuthorityError> {
    let until = |ca: &TrustedCa| ca.not_after.and_then(|end| end.format(&Rfc3339).ok()).unwrap_or_default();
    for ca in files.trusted()? {
        let (fingerprint, end) = (&ca.fingerprint, until(&ca));
        let label = match ca.role {
            CaRole::Issuing => {
                print(format_args!(
                    "certificate  {}\nsha256       {fingerprint}\nexpires      {end}\n",
                    cert.display()
                ));
                continue;
            }
            CaRole::Prepared => "next",
            CaRole::Retiring => "earlier",
        };
        print(format_args!("\n{label:<13}sha256 {fingerprint}\n{:<13}expires {end}\n", ""));
    }
    Ok(())
}

/// Returns a PEM bundle of the interception CA and the system's roots, for clients whose CA variable replaces their
/// own roots.
pub(super) fn bundle(ca_pem: &str) -> String {
    let system = rustls_native_certs::load_native_certs().certs;
    let mut text = ca_pem.to_owned();
    for cert in system {
        text.push_str(&ca_files::to_pem(&cert));
    }
    text
}
