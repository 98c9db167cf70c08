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
        CaAction::Bundle => print(bundle(&authority.ca_pem())),
        CaAction::Show | CaAction::Prepare | CaAction::Rotate | CaAction::Retire => {
            let done = match key.map(|key| CaFiles::new(cert, key)) {
                Some(files) => on_files(&files, cert, action),
                None => Err("without [interception].ca_key, the CA is created anew at each start".to_owned()),
            };
            return done.unwrap_or_else(|why| {
                say(format_args!("exeat: {why}"));
                Exit::Failed
            });
        }
    }
    Exit::Done
}

fn on_files(files: &CaFiles, cert: &Path, action: &CaAction) -> Result<Exit, String> {
    let failed = |error: AuthorityError| error.to_string();
    match action {
        CaAction::Prepare if files.prepare().map_err(failed)? => say(format_args!(
            "created the next CA, which {} holds too; reload the daemon, give clients the new `exeat ca bundle`, then run \
             `exeat ca rotate`",
            cert.display()
        )),
        CaAction::Prepare => say("the next CA has been prepared before"),
        CaAction::Rotate => {
            let was_prepared = files.rotate().map_err(failed)?;
            say("the new CA issues the certificates after the next reload of the daemon");
            if !was_prepared {
                say(
                    "warning: it was not prepared, so clients do not trust it before they have the new `exeat ca bundle`",
                );
            }
            say("when no client needs the old one any more, run `exeat ca retire`");
        }
        CaAction::Retire => match files.retire().map_err(failed)? {
            0 => say("there is no earlier CA"),
            _ => say("clients are no longer told to trust the earlier CA, after the next reload of the daemon"),
        },
        _ => show(files, cert).map_err(failed)?,
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
