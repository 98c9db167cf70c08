//! `exeat env`: prints the environment variables of clients. `run` sets the same ones.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::terminal::{print, quoted, say};
use super::{Exit, Shell, ca, paths};
use crate::files;
use crate::policy::settings::ListenAt;
use crate::tls::authority::Authority;

/// Variables that name the proxy, in both spellings: curl only reads the lower-case `http_proxy`, other clients only
/// the upper-case ones. gRPC prefers a variable of its own.
pub(super) const PROXY: [&str; 7] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "grpc_proxy"];
/// Variables with hosts for which a client bypasses the proxy.
pub(super) const NO_PROXY: [&str; 3] = ["NO_PROXY", "no_proxy", "no_grpc_proxy"];
/// Variables of single clients that name another proxy or none, and take precedence.
pub(super) const OTHER_PROXY: [&str; 10] = [
    "PIP_PROXY",
    "CARGO_HTTP_PROXY",
    "npm_config_proxy",
    "npm_config_https_proxy",
    "npm_config_noproxy",
    "NPM_CONFIG_PROXY",
    "NPM_CONFIG_HTTPS_PROXY",
    "NPM_CONFIG_NOPROXY",
    "YARN_HTTP_PROXY",
    "YARN_HTTPS_PROXY",
];
/// Variables that replace a client's roots. They are set to the bundle.
const BUNDLE: [&str; 14] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "npm_config_cafile",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "DENO_CERT",
    "HTTPLIB2_CA_CERTS",
    "BUNDLE_SSL_CA_CERT",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    // Nix's OpenSSL prefers this to SSL_CERT_FILE, and systems with Nix set it.
    "NIX_SSL_CERT_FILE",
];
/// Variables that add to a client's roots. They are set to the CA alone.
const EXTRA: [&str; 1] = ["NODE_EXTRA_CA_CERTS"];

pub(super) fn run(config: Option<&Path>, task: &str, shell: Shell) -> Exit {
    let loaded = match paths::load_or_say(config) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let settings = &loaded.settings;
    let Some(token) = config.and_then(|path| static_token(path, task)) else {
        say(format_args!(
            "exeat: the configuration has no task {task:?} with a token; `exeat execution start {task}` begins an execution \
             with one of its own"
        ));
        return Exit::Failed;
    };
    let mut tcp = settings.proxy.listen.iter().filter_map(ListenAt::tcp);
    let Some(listen) = tcp.find(|address| address.port() != 0) else {
        say("exeat: proxy.listen has no fixed port, so there is not a valid address to name");
        return Exit::Failed;
    };
    let written = Authority::of(&settings.interception.ca_cert, settings.interception.ca_key.as_deref())
        .map_err(io::Error::other)
        .and_then(|authority| write_bundle(&settings.state_dir, authority.ca_pem()));
    let bundle = match written {
        Ok(bundle) => bundle,
        Err(error) => {
            say(format_args!("exeat: the CA bundle cannot be written: {error}"));
            return Exit::Failed;
        }
    };
    let scheme = if settings.proxy.tls.is_some() { "https" } else { "http" };
    let variables = variables(&format!("{scheme}://{task}:{token}@{listen}"), &settings.interception.ca_cert, &bundle);
    print(written_out(&variables, shell));
    Exit::Done
}

/// Returns the environment variables that make a client use the proxy and trust its CA.
pub(super) fn variables(proxy_url: &str, ca: &Path, bundle: &Path) -> Vec<(&'static str, String)> {
    let text = |path: &Path| path.display().to_string();
    let proxy = PROXY.iter().map(|name| (*name, proxy_url.to_owned()));
    let roots = BUNDLE.iter().map(|name| (*name, text(bundle)));
    let extra = EXTRA.iter().map(|name| (*name, text(ca)));
    // Node reads the proxy variables only if this is set.
    proxy.chain(roots).chain(extra).chain([("NODE_USE_ENV_PROXY", "1".to_owned())]).collect()
}

/// Writes the CA and the system's roots to the state directory, replacing an older bundle atomically.
pub(super) fn write_bundle(dir: &Path, ca_pem: &str) -> io::Result<PathBuf> {
    files::private_dir(dir)?;
    let path = dir.join("ca-bundle.pem");
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    files::write_new(&path, ca::bundle(ca_pem).as_bytes(), 0o644)?;
    Ok(path)
}

/// Returns a task's token from the configuration file. The compiled policy only has its hash.
fn static_token(config: &Path, task: &str) -> Option<String> {
    let table: toml::Table = fs::read_to_string(config).ok()?.parse().ok()?;
    let source = table.get("tasks")?.get(task)?.get("token")?.as_str()?;
    let token = match source.split_once(':')? {
        ("env", name) => std::env::var(name).ok()?,
        ("file", file) => fs::read_to_string(config.parent()?.join(file)).ok()?,
        _ => return None,
    };
    Some(percent(token.strip_suffix('\n').unwrap_or(&token)))
}

/// Escapes userinfo for a URL (RFC 3986 §3.2.1): everything but unreserved characters.
fn percent(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push_str(&files::hex(&[byte]).to_uppercase());
        }
        out
    })
}

fn written_out(variables: &[(&'static str, String)], shell: Shell) -> String {
    match shell {
        Shell::Sh => {
            let sets = variables.iter().map(|(name, value)| format!("export {name}={}\n", quoted(value)));
            sets.chain([format!("unset {}\n", NO_PROXY.join(" "))]).collect()
        }
        Shell::Fish => {
            let fish = |value: &str| format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"));
            let sets = variables.iter().map(|(name, value)| format!("set -gx {name} {}\n", fish(value)));
            sets.chain([format!("set -e {}\n", NO_PROXY.join(" "))]).collect()
        }
        Shell::Json => {
            let mut object: serde_json::Map<_, _> =
                variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
            object.extend(NO_PROXY.map(|name| (name.to_owned(), "".into())));
            format!("{:#}\n", serde_json::Value::Object(object))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_is_set_once_and_to_what_its_clients_expect() {
        let url = "http://t:token@127.0.0.1:1";
        let set = variables(url, Path::new("/ca.pem"), Path::new("/bundle.pem"));
        let names: std::collections::BTreeSet<_> = set.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), set.len(), "{set:?}");
        let rows = [
            ("HTTPS_PROXY", url),
            ("http_proxy", url),
            ("grpc_proxy", url),
            ("SSL_CERT_FILE", "/bundle.pem"),
            ("NIX_SSL_CERT_FILE", "/bundle.pem"),
            ("HTTPLIB2_CA_CERTS", "/bundle.pem"),
            ("NODE_EXTRA_CA_CERTS", "/ca.pem"),
            ("NODE_USE_ENV_PROXY", "1"),
        ];
        for (name, value) in rows {
            assert!(set.iter().any(|(n, v)| *n == name && v == value), "{name}");
        }
    }

    #[test]
    fn values_survive_the_shell() {
        let nasty = [("X", "it's $HOME `id` \\".to_owned())];
        let script = format!("{}printf %s \"$X\"", written_out(&nasty, Shell::Sh));
        let out = std::process::Command::new("sh").arg("-c").arg(script).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), nasty[0].1);
    }

    #[test]
    fn tokens_survive_the_url() {
        assert_eq!(percent("a-b_c.d~e"), "a-b_c.d~e");
        assert_eq!(percent("p@ss:w/rd%"), "p%40ss%3Aw%2Frd%25");
    }
}
