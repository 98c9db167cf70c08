//! The flags of `exeat run`, and the advice of its summary, which names them.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use crate::lab::{self, LabBuilder, Reply};
use crate::operation::cli::{exeat, output, text, unbroken};

/// Starts `exeat run` without a configuration, sends a request with its proxy, and returns the reply and the summary.
async fn request(builder: &LabBuilder, flags: &[&str], url: &str, host: &str) -> (Reply, String) {
    let command = ["--", "sh", "-c", "echo \"$HTTPS_PROXY\"; read x"];
    let mut child = exeat(builder.dir.path(), &[&["run"], flags, &command].concat());
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut proxy = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut proxy).unwrap();
    let address = proxy.trim_end().strip_prefix("http://").unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = http::Request::get(url).header("host", host);
    let reply = Reply::read(lab::client::h1(stream, request.body(lab::client::empty()).unwrap()).await).await;
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    (reply, text(&child.wait_with_output().unwrap().stderr))
}

/// Each row adds what the summary of the row before has advised.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_summary_advises_helps() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let (url, dns) = (format!("https://{to}/"), builder.dns.address().to_string());
    let rows: [(&[&str], u16, &str); 5] = [
        (&[], 403, &format!("host_not_allowed     --allow {to}\n")),
        (&["--allow", &to], 502, "resolve_failed       The host name does not exist (NXDOMAIN)\n"),
        (
            &["--dns", &dns],
            403,
            &format!("address_not_allowed  127.0.0.1 is loopback: --allow {to} --allow-cidr 127.0.0.1/32\n"),
        ),
        (
            &["--allow-cidr", "127.0.0.1/32"],
            502,
            "tls_failed           The proxy does not trust the issuer of the origin's certificate: --ca FILE, if you trust it\n",
        ),
        (&["--ca", "origin-ca.pem"], 200, "exeat: 1 allowed, 0 refused or failed\n"),
    ];
    // A server without the name, instead of the system's.
    let empty = exeat::cli::demo::dns::ScriptedDns::start().await.unwrap().address().to_string();
    let mut flags: Vec<&str> = Vec::new();
    for (more, status, advice) in rows {
        flags.extend(more);
        let unknown = if flags.contains(&"--dns") { [].as_slice() } else { &["--dns", empty.as_str()] };
        let (reply, summary) = request(&builder, &[&flags, unknown].concat(), &url, &to).await;
        assert_eq!(reply.status, status, "{flags:?}: {}", reply.text());
        assert!(unbroken(&summary).contains(&unbroken(advice)), "{flags:?}: {summary}");
        let is_counted_once = status == 200 || summary.starts_with("exeat: 0 allowed, 1 refused or failed\n");
        assert!(is_counted_once, "{flags:?}: {summary}");
    }
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_value_names_its_flag() {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("run.toml"), "[network]\nallow_cidrs = [\"10.0.0.0/8\"]\n").unwrap();
    let rows = [
        (["--dns", "dns.example"], "error: --dns: \"dns.example\" is not a valid DNS server"),
        (["--allow-cidr", "10.0.0.1/8"], "error: --allow-cidr: invalid value \"10.0.0.1/8\""),
        (["--ca", "gone.pem"], "error: --ca: "),
        (["--log", "loud"], "error: invalid value 'loud' for '--log <LEVEL>'"),
        (["--isolat", "--quiet"], "a similar argument exists: '--isolate'"),
    ];
    for (flag, want) in rows {
        let args = [&["run", "-c", "run.toml"], &flag[..], &["--", "true"]].concat();
        let said = output(exeat(builder.dir.path(), &args)).await;
        assert_eq!(said.status.code(), Some(2), "{flag:?}");
        assert!(text(&said.stderr).contains(want), "{flag:?}: {}", text(&said.stderr));
    }
}

/// Flags behind the name of the command are its own.
#[tokio::test(flavor = "multi_thread")]
async fn flags_of_the_command_are_its_own() {
    let builder = LabBuilder::new().await;
    let said =
        output(exeat(builder.dir.path(), &["run", "sh", "-c", "echo \"$@\"", "--", "--quiet", "-q", "--x"])).await;
    assert_eq!(text(&said.stdout), "--quiet -q --x\n");
    assert!(text(&said.stderr).starts_with("exeat: 0 allowed"), "{}", text(&said.stderr));
}

/// The warning that there are few descriptors.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_can_be_seen() {
    let builder = LabBuilder::new().await;
    // The flag precedes EXEAT_LOG, and EXEAT_LOG_FORMAT reaches the proxy of a run.
    let rows = [("warn", "error", "json", true), ("error", "warn", "json", false), ("warn", "warn", "text", true)];
    for (level, variable, format, is_shown) in rows {
        let script = "ulimit -n 256; exec \"$0\" run --log \"$1\" -- true";
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, env!("CARGO_BIN_EXE_exeat"), level]).current_dir(builder.dir.path());
        command.env_remove("EXEAT_CONFIG").env("EXEAT_LOG", variable).env("EXEAT_LOG_FORMAT", format);
        command.env("XDG_STATE_HOME", builder.dir.path());
        let said = output(command).await;
        let said = text(&said.stderr);
        assert_eq!(said.contains("open files"), is_shown, "{said}");
        assert_eq!(said.starts_with('{'), is_shown && format == "json", "{said}");
    }
}
