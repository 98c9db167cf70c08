//! The services that `preset` stands for in an integration or a credential.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use serde::Deserialize;
use strsim::levenshtein;
use toml::{Table, Value};

use super::reader::{Findings, MAX_DISTANCE};

/// The key that names a preset.
pub(super) const KEY: &str = "preset";

/// A service, as `config/presets.toml` describes it.
#[derive(Deserialize)]
pub struct Preset {
    /// A sentence about it.
    pub about: String,
    /// The usual name of its key, which is also that of a variable.
    pub key: Option<String>,
    /// The keys of a credential for it, without the source of its value.
    credential: Option<Table>,
    /// The keys of such a credential that only the operator knows, with examples.
    #[serde(default)]
    missing: Table,
    /// The keys of an integration.
    #[serde(flatten)]
    integration: Table,
}

/// All presets, by name.
pub static PRESETS: LazyLock<BTreeMap<String, Preset>> =
    // A test reads it, so it is not empty.
    LazyLock::new(|| toml::from_str(include_str!("../../config/presets.toml")).unwrap_or_default());

impl Preset {
    /// Writes the integration, and the credential if there is one, with the names `integration` and [`Preset::key`].
    #[must_use]
    pub fn toml(&self, integration: &str) -> String {
        let mut out = format!("# {}\n[integrations.{integration}]\n", self.about);
        out += &lines(&self.integration);
        if let (Some(name), Some(_)) = (&self.key, &self.credential) {
            let _ = write!(out, "\n[credentials.{name}]\n{}", self.credential_toml(name));
        }
        out
    }

    /// Returns true if there is a credential for it.
    #[must_use]
    pub fn has_credential(&self) -> bool {
        self.credential.is_some()
    }

    /// Writes the keys of the integration.
    #[must_use]
    pub fn integration_toml(&self) -> String {
        lines(&self.integration)
    }

    /// Writes the keys of the credential, with the source of its value.
    #[must_use]
    pub fn credential_toml(&self, name: &str) -> String {
        let Some(credential) = &self.credential else { return String::new() };
        let kind = credential.get("auth_type").and_then(Value::as_str).unwrap_or_default();
        let mut keys = String::new();
        let mut rest = credential.clone();
        if let Some(kind) = rest.remove("auth_type") {
            let _ = writeln!(keys, "auth_type = {kind}");
        }
        if !kind.starts_with("azure_") {
            let source = if kind.starts_with("gcp_") { format!("secret:{name}") } else { format!("env:{name}") };
            let _ = writeln!(keys, "value = {}", Value::String(source));
        }
        keys + &lines(&self.missing) + &lines(&rest)
    }
}

fn lines(keys: &Table) -> String {
    // In the order in which the documentation has them.
    let order = ["allowed_domains", "methods", "paths", "plain_http"];
    let at = |key: &str| order.iter().position(|known| *known == key).unwrap_or(order.len());
    let mut sorted: Vec<_> = keys.iter().collect();
    sorted.sort_by_key(|(key, _)| at(key));
    sorted.into_iter().map(|(key, value)| format!("{key} = {value}\n")).collect()
}

/// Replaces each `preset` by the keys that it stands for. Keys beside it take precedence.
pub(super) fn expand(root: &mut Table, findings: &Findings) {
    expand_known(root, &mut |path, name| {
        if PRESETS.contains_key(name) {
            return findings.problem(path, format!("the preset {name:?} has no credential"), "auth_type and domains");
        }
        let near = PRESETS.keys().min_by_key(|known| levenshtein(known, name));
        let near = near.filter(|near| levenshtein(near, name) <= MAX_DISTANCE);
        let expected = near.map_or_else(
            || format!("one of {}", PRESETS.keys().cloned().collect::<Vec<_>>().join(", ")),
            |near| format!("{near:?}"),
        );
        findings.problem(path, format!("no preset named {name:?}"), expected);
    });
}

/// As `expand`, for a configuration whose problems have been reported.
pub fn expand_quietly(root: &mut Table) {
    expand_known(root, &mut |_, _| {});
}

fn expand_known(root: &mut Table, report: &mut dyn FnMut(String, &str)) {
    for (section, is_credential) in [("integrations", false), ("credentials", true)] {
        let Some(Value::Table(entries)) = root.get_mut(section) else { continue };
        for (name, entry) in entries {
            let Value::Table(entry) = entry else { continue };
            // Another type of value is reported where the section is read.
            let Some(Value::String(wanted)) = entry.get(KEY).cloned() else { continue };
            let keys = PRESETS.get(&wanted).and_then(|preset| match is_credential {
                true => preset.credential.as_ref(),
                false => Some(&preset.integration),
            });
            let Some(keys) = keys else {
                report(format!("{section}.{name}.{KEY}"), &wanted);
                continue;
            };
            for (key, value) in keys {
                entry.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::secret::Secret;
    use crate::policy::compile::{Config, Problem, compile};
    use crate::policy::difference::difference;
    use crate::policy::settings::Vault;
    use crate::policy::source::{CompileContext, SecretSource, SourceError};

    struct NoVault;

    impl SecretSource for NoVault {
        fn secret(&self, _: &Vault, _: &str, name: &str) -> Result<Secret, SourceError> {
            Err(SourceError::Missing(format!("no {name}")))
        }
    }

    fn compiled(text: &str) -> Result<Config, Vec<Problem>> {
        let dir = tempfile::tempdir().unwrap();
        let env = |name: &str| match name {
            "AWS_ACCESS_KEY_ID" => Some("AKIAIOSFODNN7EXAMPLE".to_owned()),
            _ => Some(format!("user:{name}-hJ7rT2qLz91kWxVpQ4sN")),
        };
        let context =
            CompileContext { base: dir.path(), state_dir: dir.path(), env: &env, secrets: &NoVault, is_offline: false };
        compile(text, &context)
    }

    #[test]
    fn every_preset_means_what_is_shown() {
        assert!(PRESETS.len() >= 50, "{}", PRESETS.len());
        let keys: std::collections::BTreeSet<_> = PRESETS.values().filter_map(|preset| preset.key.as_ref()).collect();
        let with_key = PRESETS.values().filter(|preset| preset.key.is_some()).count();
        assert_eq!(keys.len(), with_key, "each has a name of its own");
        for (name, preset) in PRESETS.iter() {
            let task = |credential: &str| {
                format!("[tasks.t]\ntoken = \"env:T\"\nintegrations = [\"x\"]\ncredentials = [{credential}]\n")
            };
            let key = preset.key.as_ref().map(|key| format!("{key:?}")).unwrap_or_default();
            let shown = format!("{}\n{}", preset.toml("x"), task(&key));
            let shown_config = compiled(&shown).unwrap_or_else(|problems| panic!("{name}: {problems:#?}\n{shown}"));
            // A key in the vault is missing here.
            let is_missing = |warning: &Problem| warning.problem.contains("the credential is disabled");
            assert!(shown_config.warnings.iter().all(is_missing), "{name}: {:?}", shown_config.warnings);
            let mut short = format!("[integrations.x]\npreset = {name:?}\n");
            if let Some(key) = &preset.key {
                let own = preset.credential_toml(key);
                let own = own.lines().filter(|line| {
                    line.starts_with("value") || preset.missing.keys().any(|key| line.starts_with(key.as_str()))
                });
                let own: Vec<_> = own.collect();
                short += &format!("[credentials.{key}]\npreset = {name:?}\n{}\n", own.join("\n"));
            }
            let short = short + &task(&key);
            let short_config = compiled(&short).unwrap_or_else(|problems| panic!("{name}: {problems:#?}\n{short}"));
            let difference = difference(&shown_config.policy, &short_config.policy, |_| true);
            assert!(difference.is_ok_and(|difference| !difference.opens() && !difference.closes()), "{name}");
            // A key goes to hosts of the service only.
            let task = shown_config.policy.tasks().next().unwrap();
            assert_eq!(task.credentials().len(), usize::from(preset.key.is_some()), "{name}");
            for credential in task.credentials().iter() {
                for domain in credential.domains() {
                    assert!(task.approved().contains(&domain), "{name}: {domain}");
                }
            }
        }
    }

    #[test]
    fn the_documentation_names_every_preset() {
        let page = include_str!("../../docs/configuration.md");
        let names = PRESETS.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        assert!(page.contains(&format!("The names: {names}.")), "{names}");
    }

    #[test]
    fn keys_beside_a_preset_take_precedence_and_unknown_presets_are_reported() {
        let text = "[integrations.x]\npreset = \"github\"\nmethods = [\"GET\"]\nallowed_domains = [\"api.github.com\"]\n\
                    [tasks.t]\ntoken = \"env:T\"\nintegrations = [\"x\"]\n";
        let config = compiled(text).unwrap_or_else(|problems| panic!("{problems:#?}"));
        assert_eq!(config.policy.tasks().next().unwrap().approved(), ["api.github.com"]);
        for (keys, path, want) in [
            ("[integrations.x]\npreset = \"gihtub\"", "integrations.x.preset", "\"github\""),
            ("[integrations.x]\npreset = \"nobody-knows-it\"", "integrations.x.preset", "one of airtable"),
            ("[integrations.x]\npreset = 3", "integrations.x.preset", ""),
            ("[credentials.X]\npreset = \"crates\"\nvalue = \"env:X\"", "credentials.X.preset", "auth_type"),
        ] {
            let problems = compiled(keys).err().unwrap_or_default();
            let found = problems.iter().find(|problem| problem.path == path);
            assert!(found.is_some_and(|problem| problem.suggestion.contains(want)), "{keys}: {problems:#?}");
        }
    }
}
