//! `exeat env`: prints the environment variables that configure clients. `exeat run` sets the same ones.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::terminal::{print, quoted, say};
use super::{Exit, ca, paths};
use crate::files;
use crate::model::host::Host;
use crate::model::name::TaskName;
use crate::policy::rule::Task;
use crate::policy::settings::{Interception, ProxyListener, Settings};
use crate::tls::authority::Authority;

/// Returns true for a variable that names a proxy.
#[cfg(target_os = "linux")]
pub(super) fn names_proxy(variable: &str) -> bool {
    PROXY_VARIABLES.contains(&variable) || CLIENT_PROXY_VARIABLES.contains(&variable)
}

/// The variables that name the proxy. Both cases are set: curl reads only the lower-case `http_proxy`, others read only
/// upper case. gRPC prefers its own variable.
pub(super) const PROXY_VARIABLES: [&str; 7] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "grpc_proxy"];
/// The variables that would make a client bypass the proxy.
pub(super) const NO_PROXY_VARIABLES: [&str; 3] = ["NO_PROXY", "no_proxy", "no_grpc_proxy"];
/// The variables of single clients that select another proxy, or none, and take precedence over the common ones.
#[cfg(target_os = "linux")]
pub(super) const CLIENT_PROXY_VARIABLES: [&str; 10] = [
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
/// The variables that replace a client's roots. They are set to the bundle.
const BUNDLE_VARIABLES: [&str; 14] = [
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
    // The OpenSSL of Nix prefers this to SSL_CERT_FILE, and systems with Nix set it.
    "NIX_SSL_CERT_FILE",
];
/// The variables that add to a client's roots. They are set to the CA certificate.
const EXTRA_CA_VARIABLES: [&str; 1] = ["NODE_EXTRA_CA_CERTS"];

/// Flags of `exeat env`.
#[derive(Args)]
pub(super) struct EnvArgs {
    /// The task whose token is used
    #[arg(long, value_name = "TASK")]
    task: String,
    /// The output syntax
    #[arg(long, value_enum, default_value_t = Format::Sh, alias = "shell")]
    format: Format,
    /// The name or address by which clients reach the proxy, with :PORT if it is another one [default: the listener's]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// The directory in which clients find ca.pem and ca-bundle.pem [default: where they are on this machine]
    #[arg(long, value_name = "DIR")]
    ca_dir: Option<PathBuf>,
    /// Do not print the placeholders of the task's credentials
    #[arg(long)]
    no_credentials: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For `eval` in a POSIX shell
    Sh,
    /// For `eval` in fish
    Fish,
    /// An object
    Json,
    /// For `docker run --env-file`
    EnvFile,
    /// ENV instructions
    Dockerfile,
    /// The `env` of a container in Kubernetes
    K8s,
}

/// The name of the variable with the token in a container's `env`, in which the others refer to it.
const TOKEN_VARIABLE: &str = "EXEAT_TOKEN";

pub(super) fn run(config: Option<&Path>, args: &EnvArgs) -> Exit {
    let task = args.task.as_str();
    let loaded = match paths::load_or_report(config) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let settings = &loaded.settings;
    if loaded.policy.task(&TaskName::new(task)).is_none() {
        paths::report_unknown_task(loaded.policy.tasks().map(|task| task.name().as_str()), task);
        return Exit::Failed;
    }
    let token = config.and_then(|path| static_token(path, task));
    let known = TaskName::new(task);
    // A listener of another task accepts no token of this one. Without a token, the listener must know the task.
    let is_usable = |listener: &&ProxyListener| match &listener.tasks.all {
        Some(task) => *task == known,
        None => {
            let networks = listener.tasks.networks.iter().map(|(_, task)| task);
            token.is_some() || networks.chain(listener.tasks.loopback_users.values()).any(|task| *task == known)
        }
    };
    // The address of a load balancer is known only from --host.
    let is_reached = |listener: &&ProxyListener| listener.balancers.is_none() || args.host.is_some();
    let http = settings.proxy.listeners.iter().filter(|listener| listener.is_http_proxy());
    let usable: Vec<_> = http.filter(is_usable).filter(is_reached).collect();
    if usable.iter().all(|listener| listener.at.tcp().is_none()) && token.is_none() {
        say(format_args!(
            "exeat: the task {task:?} has no static token; `exeat execution start {task}` starts an execution with its own \
             token"
        ));
        return Exit::Failed;
    }
    let mut tcp = usable.into_iter().filter_map(|listener| listener.at.tcp());
    let Some(listen) = tcp.find(|address| address.port() != 0) else {
        say(format_args!("exeat: no TCP listener with a fixed port is for the task {task:?}"));
        return Exit::Failed;
    };
    let Some(reached_at) = reached_at(listen, args.host.as_deref()) else {
        say(format_args!(
            "exeat: --host: {:?} is not a host, or a host and a port",
            args.host.as_deref().unwrap_or("")
        ));
        return Exit::Usage;
    };
    if listen.ip().is_unspecified() && args.host.is_none() {
        say(format_args!(
            "exeat: {listen} is no address to connect to, so this is for clients on this machine; \
             name the proxy with --host for others"
        ));
    }
    let (ca, bundle) = match ca_files(settings, args.ca_dir.as_deref()) {
        Ok(files) => files,
        Err(error) => {
            say(format_args!("exeat: the CA bundle cannot be written: {error}"));
            return Exit::Failed;
        }
    };
    let scheme = if settings.proxy.tls.is_some() { "https" } else { "http" };
    let url = match &token {
        None => format!("{scheme}://{reached_at}"),
        Some(_) if args.format == Format::K8s => format!("{scheme}://{task}:$({TOKEN_VARIABLE})@{reached_at}"),
        Some(token) => format!("{scheme}://{task}:{token}@{reached_at}"),
    };
    let fixed = variables(&url, &ca, &bundle).into_iter();
    let mut variables: Vec<(String, String)> = fixed.map(|(name, value)| (name.to_owned(), value)).collect();
    if let Some(task) = loaded.policy.task(&TaskName::new(task)).filter(|_| !args.no_credentials) {
        let new = placeholders(task).filter(|(name, _)| variables.iter().all(|(known, _)| known != name));
        variables.extend(new.collect::<Vec<_>>());
    }
    if args.format == Format::Dockerfile {
        say("exeat: the token becomes a part of the image; `docker run --env-file` keeps it out");
    }
    let has_lines = variables.iter().any(|(_, value)| value.contains(char::is_control));
    if has_lines && !matches!(args.format, Format::Sh | Format::Fish | Format::Json) {
        say("exeat: a path has control characters, which this format cannot have");
        return Exit::Failed;
    }
    print(format_for(&variables, args.format, token.as_deref()));
    Exit::Done
}

/// Creates the CA if it does not exist, writes the bundle, and returns where clients find both.
fn ca_files(settings: &Settings, ca_dir: Option<&Path>) -> io::Result<(PathBuf, PathBuf)> {
    let Interception { ca_cert, ca_key, .. } = &settings.interception;
    let authority = Authority::of(ca_cert, ca_key.as_deref()).map_err(io::Error::other)?;
    let bundle = write_bundle(&settings.state_dir, &authority.ca_pem())?;
    Ok(match ca_dir {
        Some(dir) => (dir.join(CA_FILE), dir.join(BUNDLE_FILE)),
        None => (ca_cert.clone(), bundle),
    })
}

/// Returns the host and port by which clients reach the listener, or `None` if `host` is neither a host nor one with a port.
fn reached_at(listen: SocketAddr, host: Option<&str>) -> Option<String> {
    let Some(host) = host else {
        let ip = match listen.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        return Some(SocketAddr::new(ip, listen.port()).to_string());
    };
    // The colons of an IPv6 address without brackets are no port.
    let is_bare_v6 = host.parse::<Ipv6Addr>().is_ok();
    let (name, port) =
        match host.rsplit_once(':').filter(|(name, _)| !is_bare_v6 && !host.ends_with(']') && !name.is_empty()) {
            Some((name, port)) => (name, port.parse().ok().filter(|port: &u16| *port != 0)?),
            None => (host, listen.port()),
        };
    let name = if is_bare_v6 { format!("[{name}]") } else { name.to_owned() };
    Host::parse(&name).ok()?;
    Some(format!("{name}:{port}"))
}

/// Returns the placeholders of the task's credentials whose names can be names of variables.
fn placeholders(task: &Task) -> impl Iterator<Item = (String, String)> {
    let is_variable = |name: &str| {
        !name.starts_with(|first: char| first.is_ascii_digit())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let credentials = task.credentials().iter().filter(move |credential| is_variable(credential.name().as_str()));
    credentials.map(|credential| (credential.name().to_string(), credential.given_placeholder()))
}

/// Returns the environment variables that make a client use the proxy and trust its CA.
pub(super) fn variables(proxy_url: &str, ca: &Path, bundle: &Path) -> Vec<(&'static str, String)> {
    let text = |path: &Path| path.display().to_string();
    let proxy = PROXY_VARIABLES.iter().map(|name| (*name, proxy_url.to_owned()));
    let roots = BUNDLE_VARIABLES.iter().map(|name| (*name, text(bundle)));
    let extra = EXTRA_CA_VARIABLES.iter().map(|name| (*name, text(ca)));
    // Node reads the proxy variables only if NODE_USE_ENV_PROXY is set.
    proxy.chain(roots).chain(extra).chain([("NODE_USE_ENV_PROXY", "1".to_owned())]).collect()
}

/// The file with the interception CA.
pub(super) const CA_FILE: &str = "ca.pem";
/// The file with the interception CA and the system's roots.
pub(super) const BUNDLE_FILE: &str = "ca-bundle.pem";

/// Writes the interception CA and the system's roots to a file in the state directory. Replaces an existing file.
pub(super) fn write_bundle(dir: &Path, ca_pem: &str) -> io::Result<PathBuf> {
    files::private_dir(dir)?;
    let path = dir.join(BUNDLE_FILE);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    files::write_new(&path, ca::bundle(ca_pem).as_bytes(), 0o644)?;
    Ok(path)
}

/// Reads the static token of a task from its source, the first of several, because the compiled policy does not contain it.
fn static_token(config: &Path, task: &str) -> Option<String> {
    let table: toml::Table = fs::read_to_string(config).ok()?.parse().ok()?;
    let task = table.get("tasks")?.get(task)?;
    let source = task.get("token").or_else(|| task.get("tokens")?.get(0))?.as_str()?;
    let token = match source.split_once(':')? {
        ("env", name) => std::env::var(name).ok()?,
        ("file", file) => fs::read_to_string(config.parent()?.join(file)).ok()?,
        _ => return None,
    };
    Some(percent_encode(token.strip_suffix('\n').unwrap_or(&token)))
}

/// Percent-encodes a text for the userinfo of a URL (RFC 3986 §3.2.1). Only unreserved characters are kept.
fn percent_encode(text: &str) -> String {
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

fn format_for(variables: &[(String, String)], format: Format, token: Option<&str>) -> String {
    let with_emptied = || {
        let emptied = NO_PROXY_VARIABLES.iter().map(|name| (*name, ""));
        variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).chain(emptied)
    };
    match format {
        Format::EnvFile => with_emptied().map(|(name, value)| format!("{name}={value}\n")).collect(),
        Format::Dockerfile => {
            let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('$', "\\$");
            with_emptied().map(|(name, value)| format!("ENV {name}=\"{}\"\n", escaped(value))).collect()
        }
        Format::K8s => {
            // A JSON string is one in YAML.
            let entry =
                |name: &str, value: &str| format!("  - name: {name}\n    value: {}\n", serde_json::Value::from(value));
            let token = token.map_or_else(String::new, |token| {
                format!(
                    "  # Or a key of a secret with this value, percent-encoded: valueFrom: {{secretKeyRef: {{name: …, key: …}}}}\n{}",
                    entry(TOKEN_VARIABLE, token)
                )
            });
            let others = with_emptied().map(|(name, value)| {
                // `$(NAME)` refers to an earlier entry, and `$$` is `$`.
                let reference = format!("$({TOKEN_VARIABLE})");
                entry(name, &value.replace('$', "$$").replace(&format!("${reference}"), &reference))
            });
            ["env:\n".to_owned(), token].into_iter().chain(others).collect()
        }
        Format::Sh => {
            let sets = variables.iter().map(|(name, value)| format!("export {name}={}\n", quoted(value)));
            sets.chain([format!("unset {}\n", NO_PROXY_VARIABLES.join(" "))]).collect()
        }
        Format::Fish => {
            let fish = |value: &str| format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"));
            let sets = variables.iter().map(|(name, value)| format!("set -gx {name} {}\n", fish(value)));
            sets.chain([format!("set -e {}\n", NO_PROXY_VARIABLES.join(" "))]).collect()
        }
        Format::Json => {
            let mut object: serde_json::Map<_, _> =
                variables.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
            object.extend(NO_PROXY_VARIABLES.map(|name| (name.to_owned(), "".into())));
            format!("{:#}\n", serde_json::Value::Object(object))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_variable_is_set_once_to_the_expected_value() {
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
        let nasty = [("X".to_owned(), "it's $HOME `id` \\".to_owned())];
        let script = format!("{}printf %s \"$X\"", format_for(&nasty, Format::Sh, None));
        let out = std::process::Command::new("sh").arg("-c").arg(script).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), nasty[0].1);
    }

    #[test]
    fn containers_get_the_values_as_they_are() {
        let nasty = [
            ("X".to_owned(), "a \"b\" $HOME $(id) \\".to_owned()),
            ("P".to_owned(), "http://t:$(EXEAT_TOKEN)@h:1".to_owned()),
        ];
        let file = format_for(&nasty[..1], Format::EnvFile, Some("s3cr3t"));
        assert!(file.starts_with("X=a \"b\" $HOME $(id) \\\nNO_PROXY=\n"), "{file}");
        let docker = format_for(&nasty[..1], Format::Dockerfile, Some("s3cr3t"));
        assert!(docker.starts_with("ENV X=\"a \\\"b\\\" \\$HOME \\$(id) \\\\\"\nENV NO_PROXY=\"\"\n"), "{docker}");
        let k8s = format_for(&nasty, Format::K8s, Some("s3cr3t"));
        let entries = [
            "env:\n  # Or",
            "  - name: EXEAT_TOKEN\n    value: \"s3cr3t\"\n",
            "  - name: X\n    value: \"a \\\"b\\\" $$HOME $$(id) \\\\\"\n",
            "  - name: P\n    value: \"http://t:$(EXEAT_TOKEN)@h:1\"\n",
            "  - name: NO_PROXY\n    value: \"\"\n",
        ];
        assert!(entries.iter().all(|entry| k8s.contains(entry)) && k8s.matches("s3cr3t").count() == 1, "{k8s}");
    }

    #[test]
    fn clients_get_an_address_that_they_can_dial() {
        let rows = [
            ("127.0.0.1:3128", None, Some("127.0.0.1:3128")),
            ("0.0.0.0:3128", None, Some("127.0.0.1:3128")),
            ("[::]:3128", None, Some("[::1]:3128")),
            ("0.0.0.0:3128", Some("exeat"), Some("exeat:3128")),
            ("0.0.0.0:3128", Some("exeat.internal:8080"), Some("exeat.internal:8080")),
            ("0.0.0.0:3128", Some("10.0.0.2"), Some("10.0.0.2:3128")),
            ("0.0.0.0:3128", Some("fd00::2"), Some("[fd00::2]:3128")),
            ("0.0.0.0:3128", Some("[fd00::2]"), Some("[fd00::2]:3128")),
            ("0.0.0.0:3128", Some("[fd00::2]:80"), Some("[fd00::2]:80")),
            ("0.0.0.0:3128", Some("exeat:0"), None),
            ("0.0.0.0:3128", Some("exeat:x"), None),
            ("0.0.0.0:3128", Some("a b"), None),
            ("0.0.0.0:3128", Some("user@host"), None),
            ("0.0.0.0:3128", Some(""), None),
        ];
        for (listen, host, want) in rows {
            assert_eq!(reached_at(listen.parse().unwrap(), host).as_deref(), want, "{listen} {host:?}");
        }
    }

    #[test]
    fn tokens_survive_the_url() {
        assert_eq!(percent_encode("a-b_c.d~e"), "a-b_c.d~e");
        assert_eq!(percent_encode("p@ss:w/rd%"), "p%40ss%3Aw%2Frd%25");
    }
}
