//! gRPC: bidirectional streams, and the status in trailers.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use rcgen::{CertificateParams, Issuer, KeyPair};

use super::*;

/// A gRPC server for `api.test`, which the configuration allows. It ends when its standard input is closed.
struct Chat {
    server: Child,
    port: String,
}

impl Chat {
    fn start(place: &Place) -> Self {
        let read = |name: &str| fs::read_to_string(place.dir().join(name)).unwrap();
        let ca_key = KeyPair::from_pem(&read("origin-ca-key.pem")).unwrap();
        let ca = Issuer::from_ca_cert_pem(&read("origin-ca.pem"), ca_key).unwrap();
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(["api.test".to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
        fs::write(place.dir().join("chat-key.pem"), key.serialize_pem()).unwrap();
        fs::write(place.dir().join("chat.pem"), cert.pem()).unwrap();
        fs::write(place.dir().join("chat_server.py"), include_str!("chat_server.py")).unwrap();
        fs::write(place.dir().join("chat.py"), include_str!("chat.py")).unwrap();
        let mut command = Command::new("python3");
        with_clients(&mut command);
        command.args(["chat_server.py", "chat-key.pem", "chat.pem"]).current_dir(place.dir());
        let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut port = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let port = port.trim_end().to_owned();
        let config = fs::read_to_string(&place.config).unwrap();
        let allowed = format!("ports = [{}", place.origin.port());
        fs::write(&place.config, config.replace(&allowed, &format!("{allowed}, {port}"))).unwrap();
        Self { server, port }
    }

    fn target(&self) -> String {
        format!("api.test:{}", self.port)
    }
}

impl Drop for Chat {
    fn drop(&mut self) {
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}

/// The client behind `exeat run`, with gRPC's own variables that would bypass the proxy.
fn client(place: &Place, flags: &[&str], target: &str) -> Command {
    let run = ["run", "-c", place.config.to_str().unwrap()];
    let task: &[&str] = if flags.is_empty() { &["--task", "t"] } else { flags };
    let mut command = exeat(place.dir(), &[&run, task, &["--", "python3", "chat.py", target]].concat());
    with_clients(&mut command);
    command.env("grpc_proxy", "http://127.0.0.1:1").env("no_grpc_proxy", "api.test");
    command
}

/// The expected output of `chat.py`.
const SHOWN: &str = "unary\n50 rounds\n1000 messages\nstatus and trailers\n2 MiB\ndeadline and cancellation\n";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with grpcio"]
async fn python_grpcio() {
    let place = place().await;
    let chat = Chat::start(&place);
    let output = super::output(client(&place, &[], &chat.target())).await;
    assert_eq!(place.passed(&output), SHOWN);
    assert!(text(&output.stderr).contains("exeat: 12 allowed"), "{}", text(&output.stderr));
    let refusal = "Received http2 header with status: 403";
    place.refused(&super::output(client(&place, &[], "evil.test:443")).await, refusal);
    row(&Row { client: "Python grpcio", inside: "HTTP/2", needs: NOTHING, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with grpcio"]
async fn python_grpcio_shows_the_status_of_a_refusal_inside() {
    let place = place().await;
    let chat = Chat::start(&place);
    let config = fs::read_to_string(&place.config).unwrap();
    fs::write(&place.config, config.replace("\"POST\", ", "")).unwrap();
    let output = super::output(client(&place, &[], &chat.target())).await;
    let said = text(&output.stderr);
    assert!(said.contains("StatusCode.PERMISSION_DENIED"), "{said}");
    assert!(said.contains("details = \"Received http2 header with status: 403\""), "{said}");
    assert!(said.contains("exeat: 0 allowed, 1 refused") && said.contains("method_not_allowed"), "{said}");
}

/// Every answer is scanned for the key, including streams. No answer is compressed, although the server would.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with grpcio"]
async fn python_grpcio_sends_a_placeholder() {
    let place = place().await;
    let chat = Chat::start(&place);
    let value = "ghp_16C7e42F292c6912E7710c838347Ae178B4a";
    let mut command = client(&place, &["--credential", &format!("KEY=bearer@{}", chat.target())], &chat.target());
    command.env("KEY", value);
    let output = super::output(command).await;
    let stars = "*".repeat(value.len());
    assert_eq!(assert_ok(&output), format!("{SHOWN}Bearer {stars}\nBearer {stars}\n"));
    assert_eq!(fs::read_to_string(place.dir().join("key")).unwrap(), format!("Bearer {value}"));
    let summary = text(&output.stderr);
    // The message that the server compressed passed, and the call failed.
    assert!(summary.contains("exeat: 12 allowed, 1 refused or failed"), "{summary}");
    assert!(summary.contains("1 × KEY sent to api.test") && summary.contains("upstream_protocol"), "{summary}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with grpcio"]
async fn python_grpcio_in_a_sandbox() {
    let place = place().await;
    let chat = Chat::start(&place);
    let script = format!("python3 chat.py {} && ! python3 chat.py evil.test:443", chat.target());
    let (output, mut lines) = env::in_a_sandbox(&place, &script).await;
    assert_eq!(assert_ok(&output), SHOWN);
    let refused = lines.extract_if(.., |line| line["host"] == "evil.test").collect::<Vec<_>>();
    assert!(!refused.is_empty() && refused.iter().all(|line| line["code"] == "host_not_allowed"), "{refused:#?}");
    let of = |event: &str| lines.iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
    let (decided, closed) = (of("decided"), of("closed"));
    assert_eq!((decided.len(), closed.len(), lines.len()), (12, 12, 24), "{lines:#?}");
    assert!(decided.iter().all(|line| line["verdict"] == "allow" && line["method"] == "POST"), "{lines:#?}");
    assert!(lines.iter().all(|line| line["host"] == "api.test" && line["peer"] == lines[0]["peer"]), "{lines:#?}");
    assert!(closed.iter().all(|line| line["response_status"] == 200 && line["alpn"] == "h2"), "{closed:#?}");
    let (waits, others): (Vec<_>, Vec<_>) = closed.into_iter().partition(|line| line["path"] == "/chat.Chat/Wait");
    assert!(others.iter().all(|line| line["verdict"] == "allow"), "{others:#?}");
    // Both sides enforce a deadline, and either may do so first. Only the client cancels.
    assert_eq!((waits.len(), &waits[1]["verdict"]), (2, &"abandoned".into()), "{waits:#?}");
    assert_eq!(place.builder.dns.queries("evil.test"), 0);
}
