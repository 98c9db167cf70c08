//! `exeat secret`: manages the vault without showing values.

use std::io::{self, IsTerminal, Read};
use std::path::Path;

use clap::{Args, Subcommand};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use zeroize::Zeroizing;

use super::terminal::{self, print, say};
use super::{Exit, paths};
use crate::daemon::vault;
use crate::leak::strength::{Strength, WEAK};
use crate::model::name::is_plain;
use crate::model::secret::Secret;
use crate::policy::settings::Source;
use crate::policy::source::{has_blank_edge, usable};
use crate::vault::{Entry, MAX_VALUE, Vault};

/// The workspace used without `--workspace`.
const DEFAULT_WORKSPACE: &str = "default";

/// Flags of `exeat secret`.
#[derive(Args)]
pub(super) struct SecretArgs {
    /// The workspace of the secrets, as in the task. Without it, `default`, and all for `list`
    #[arg(long, value_name = "W", global = true)]
    workspace: Option<String>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// List names and dates, never values
    List {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// Set a value, from standard input or a hidden prompt
    ///
    /// The value is stored unchanged, except that one trailing newline is removed from standard input. A running daemon
    /// uses it from its next reload.
    Set {
        /// The name to which credentials refer, as in value = "secret:NAME"
        name: String,
    },
    /// Delete a value
    Delete {
        /// The name of the secret
        name: String,
    },
    /// Seal the vault with a new master key
    ///
    /// A key file, which must belong to this vault alone, is replaced by one with a random key. A running daemon needs no
    /// reload. The command may be killed at any time: the vault then opens with the old key or with the new one.
    Rekey {
        /// Seal it with this key instead: env:NAME or file:PATH, which is created if it does not exist. The
        /// configuration must then name it as [vault].key, and the daemon be restarted
        #[arg(long, value_name = "SOURCE")]
        new_key: Option<String>,
    },
}

pub(super) fn run(config: Option<&Path>, args: &SecretArgs) -> Exit {
    let settings = match paths::vault_settings(config) {
        Ok(settings) => settings,
        Err(problems) => {
            paths::report_problems(config, &problems);
            return Exit::Usage;
        }
    };
    let vault = vault::vault(&settings);
    let workspace = args.workspace.as_deref().unwrap_or(DEFAULT_WORKSPACE);
    let names = [Some(workspace), args.action.name()];
    if let Some(name) = names.into_iter().flatten().find(|name| !is_plain(name)) {
        say(format_args!(
            "exeat: {:?} is not a valid name: use letters, digits, - and _, at most 64",
            terminal::clean(name)
        ));
        return Exit::Usage;
    }
    let done = match &args.action {
        Action::List { json } => list(&vault, args.workspace.as_deref(), *json),
        Action::Set { name } => set(&vault, workspace, name),
        Action::Delete { name } => delete(&vault, workspace, name),
        Action::Rekey { new_key } => rekey(&vault, &settings.key, new_key.as_deref()),
    };
    done.unwrap_or_else(|why| {
        say(format_args!("exeat: {why}"));
        Exit::Failed
    })
}

impl Action {
    fn name(&self) -> Option<&str> {
        match self {
            Self::List { .. } | Self::Rekey { .. } => None,
            Self::Set { name } | Self::Delete { name } => Some(name),
        }
    }
}

fn list(vault: &Vault, workspace: Option<&str>, json: bool) -> Result<Exit, String> {
    let mut entries = vault.list().map_err(|error| in_vault(vault, &error))?;
    entries.retain(|entry| vault::is_of_operators(&entry.workspace));
    entries.retain(|entry| workspace.is_none_or(|wanted| entry.workspace == wanted));
    if json {
        print(format_args!("{:#}\n", entries.iter().map(vault::metadata).collect::<serde_json::Value>()));
        return Ok(Exit::Done);
    }
    for Entry { workspace, name, created, updated } in &entries {
        print(format_args!("{workspace:<16} {name:<32} set {}, first {}\n", date(*updated), date(*created)));
    }
    if entries.is_empty() {
        say(format_args!("no secrets in {}", vault.path().display()));
    }
    Ok(Exit::Done)
}

fn set(vault: &Vault, workspace: &str, name: &str) -> Result<Exit, String> {
    let value = read_value(name).map_err(|error| format!("the value cannot be read: {error}"))?;
    if value.is_empty() {
        say("exeat: the value is empty; nothing was set");
        return Ok(Exit::Usage);
    }
    if value.len() > MAX_VALUE {
        say(format_args!("exeat: the value is longer than {MAX_VALUE} bytes; nothing was set"));
        return Ok(Exit::Usage);
    }
    let unusable = usable(Secret::new(value.to_vec())).err();
    let has_blank_edge = has_blank_edge(&Secret::new(value.to_vec()));
    let replaced = vault.set(workspace, name, Secret::new(value.to_vec())).map_err(|error| in_vault(vault, &error))?;
    let what = if replaced { "replaced" } else { "set" };
    let file = vault.path().display();
    say(format_args!("{workspace}/{name} is {what} in {file}; a running daemon uses it after its next reload"));
    if let Some(why) = unusable {
        say(format_args!("warning: {why}, so only a private_key or a gcp_service_account can use it"));
    } else if has_blank_edge {
        say("warning: the value begins or ends with a blank, so only basic and query_param credentials can use it");
    } else if let Strength::Weak(why) = Strength::of(&value) {
        say(format_args!("warning: the value is weak: {why}; {WEAK}"));
    }
    Ok(Exit::Done)
}

fn delete(vault: &Vault, workspace: &str, name: &str) -> Result<Exit, String> {
    if vault.delete(workspace, name).map_err(|error| in_vault(vault, &error))? {
        say(format_args!("{workspace}/{name} is deleted; a running daemon stops using it after its next reload"));
        return Ok(Exit::Done);
    }
    Err(format!("no secret {name} in the workspace {workspace}"))
}

fn rekey(vault: &Vault, key: &Source, new_key: Option<&str>) -> Result<Exit, String> {
    let file = vault.path().display();
    let Some(new_key) = new_key else {
        let Some(key) = key.file() else {
            say(format_args!(
                "exeat: the key of {file} is not in a file; name the source of the new one with --new-key"
            ));
            return Ok(Exit::Usage);
        };
        if is_placed_at_start(key) {
            say(format_args!(
                "exeat: {} is put into its place at each start, so a new one there would be lost; name the source of the new \
                 key with --new-key",
                key.display()
            ));
            return Ok(Exit::Usage);
        }
        vault::rekey(vault, None).map_err(|error| in_vault(vault, &error))?;
        let key = key.display();
        say(format_args!("{file} is sealed with a new key, in {key}; a running daemon needs no reload"));
        say(OLD_COPIES);
        return Ok(Exit::Done);
    };
    let Some(source) = Source::parse(new_key) else {
        // The text may be the key itself.
        say("exeat: --new-key names the source of a key, as env:NAME or file:PATH, and never the key itself");
        return Ok(Exit::Usage);
    };
    vault::rekey(vault, Some(&source)).map_err(|error| in_vault(vault, &error))?;
    say(format_args!(
        "{file} is sealed with the key of {new_key}; set [vault].key to it and restart the daemon, which cannot read the \
         vault until then, and delete the old key afterwards"
    ));
    say(OLD_COPIES);
    Ok(Exit::Done)
}

/// Returns whether a service manager or a container engine makes the file: it is in a directory of the running system, or is
/// mounted itself.
fn is_placed_at_start(key: &Path) -> bool {
    let of_service = std::env::var_os("CREDENTIALS_DIRECTORY");
    let key = key.canonicalize().unwrap_or_else(|_| key.to_owned());
    of_service.is_some_and(|dir| key.starts_with(dir)) || key.starts_with("/run") || is_mounted(&key)
}

#[cfg(target_os = "linux")]
fn is_mounted(path: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
    let found = statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS);
    found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Container engines, which mount single files, run on Linux.
#[cfg(not(target_os = "linux"))]
fn is_mounted(_: &Path) -> bool {
    false
}

/// The note after a change of the master key.
const OLD_COPIES: &str = "copies of the vault from before still open with the old key";

fn in_vault(vault: &Vault, error: &crate::vault::VaultError) -> String {
    format!("{}: {error}", vault.path().display())
}

/// Reads the value from a hidden prompt on a terminal, else from standard input without one trailing newline.
fn read_value(name: &str) -> io::Result<Zeroizing<Vec<u8>>> {
    if io::stdin().is_terminal() {
        let typed = rpassword::prompt_password(format!("Value of {name} (not shown): "))?;
        return Ok(Zeroizing::new(typed.into_bytes()));
    }
    // The capacity is allocated at once, because a growing vector leaves copies of the value in freed memory.
    let max = MAX_VALUE.saturating_add(2);
    let mut value = Zeroizing::new(Vec::with_capacity(max.saturating_mul(2)));
    io::stdin().lock().take(max as u64).read_to_end(&mut value)?;
    if value.last() == Some(&b'\n') {
        value.pop();
    }
    Ok(value)
}

fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    time.and_then(|time| time.format(&Rfc3339).ok()).unwrap_or_default()
}
