//! The dangerous shell: a person reads and approves each command, exactly once, and it runs isolated.
//!
//! Where a command is run, user namespaces are needed, so these tests are ignored by default; continuous integration runs them.

use std::fs;
use std::path::PathBuf;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::lab::client::{auth, empty, read_head};
use crate::lab::{KEY, Lab, LabBuilder, Origin, Reply};
use crate::operation::cli::{exeat, output};
use crate::tools::front_end::tools;

const SHELL: &str = "7b0a5d3e-3f0c-4c52-9f0e-2d1c8a6b4e11";
const OTHER_KEY: &str = "another-tasks-value-9f3c71d0";

fn config(port: u16, commands: &str) -> String {
    format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n\
         [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nmethods = [\"GET\"]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\ninject = \"always\"\n\
         [credentials.OTHER]\nauth_type = \"bearer\"\nvalue = \"file:other\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\ntools = [\"http_request\"]\nraw = true\n{commands}\n\
         [tasks.other]\nintegrations = [\"api\"]\ncredentials = [\"OTHER\"]\n"
    )
}

const BY_APPROVAL: &str = "commands = \"by_approval\"";

struct Place {
    lab: Lab,
    origin: Origin,
    dir: tempfile::TempDir,
}

impl Place {
    async fn new(commands: &str, sandbox: &str) -> Self {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        fs::write(builder.dir.path().join("other"), OTHER_KEY).unwrap();
        let lab = builder.proxy(&config(origin.port(), commands)).await;
        let place = Self { lab, origin, dir: tempfile::tempdir().unwrap() };
        fs::create_dir(place.workspace()).unwrap();
        fs::write(place.dir.path().join("outside.txt"), "outside").unwrap();
        place.write_sandbox(sandbox);
        let signed = place.tools(&["sandbox", "sign", "work"], "");
        assert!(signed.0, "{}", signed.1);
        place
    }

    fn write_sandbox(&self, sandbox: &str) {
        let text = format!("[sandboxes.work]\ndirectory = \"work\"\n{}\n", sandbox.replace("SHELL", SHELL));
        fs::write(self.dir.path().join("sandboxes.toml"), text).unwrap();
    }

    fn workspace(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    fn tools(&self, command: &[&str], stdin: &str) -> (bool, String) {
        let (file, key) = (self.dir.path().join("sandboxes.toml"), self.dir.path().join("key"));
        let files = ["--sandboxes", file.to_str().unwrap(), "--sandbox-key", key.to_str().unwrap()];
        let output = tokio::task::block_in_place(|| tools(&self.lab, &[command, &files].concat(), stdin));
        (output.status.success(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr))
    }

    /// Makes one call, and returns its line without the beginning.
    fn call(&self, payload: &str) -> String {
        let (_, text) = self.tools(&["turn"], &format!("[TOOL_CALL:1] {payload}\n"));
        let line = text.strip_prefix("[TOOL_RESULT:1] status=").unwrap_or_else(|| panic!("{text}"));
        line.trim_end_matches('\n').to_owned()
    }

    fn run(&self, command: &str) -> String {
        self.call(&json!({ "resourceId": SHELL, "shellType": "Bash", "command": command }).to_string())
    }

    /// Runs a command after it has been approved.
    async fn approved(&self, command: &str) -> String {
        assert_eq!(self.run(command), "AwaitingApproval", "{command}");
        let [id] = &*self.lab.waiting().await else { panic!() };
        self.lab.approve_command(id).await;
        self.run(command)
    }
}

impl Lab {
    async fn ask(&self, body: impl Into<Bytes>) -> Reply {
        let request = Request::builder().method("POST").uri("/v1/self/commands").header("host", self.proxy.to_string());
        self.send(request.header("proxy-authorization", auth()).body(Full::new(body.into())).unwrap()).await
    }

    /// Returns a document about the caller.
    async fn own(&self, path: &str) -> Value {
        let request = Request::builder().uri(path).header("host", self.proxy.to_string());
        let reply = self.send(request.header("proxy-authorization", auth()).body(empty()).unwrap()).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.problem()
    }

    async fn ask_for(&self, command: &Value) -> Reply {
        self.ask(command.to_string()).await
    }

    /// Returns the ids of the approvals that wait.
    async fn waiting(&self) -> Vec<String> {
        let (status, shown) = self.admin_request("GET", "/v1/approvals?state=pending", &Value::Null).await;
        assert_eq!(status, 200);
        shown.as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
    }

    async fn approve_command(&self, id: &str) {
        let decision = json!({ "decision": "approve" });
        assert_eq!(self.admin_request("POST", &format!("/v1/approvals/{id}"), &decision).await.0, 200);
    }

    async fn shown(&self, id: &str) -> Value {
        self.admin_request("GET", &format!("/v1/approvals/{id}"), &Value::Null).await.1
    }
}

fn pending(reply: &Reply) -> String {
    reply.assert_refused(403, "approval_pending");
    reply.problem()["approval"].as_str().unwrap().to_owned()
}

fn question(command: &str) -> Value {
    json!({
        "command": command, "sandbox": "work", "directory": "/home/a/work", "network": false, "timeout_s": 60,
        "read_only": ["/opt/tools"], "statement": "0".repeat(64),
    })
}

async fn lab(commands: &str) -> Lab {
    Place::new(commands, "").await.lab
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_sees_the_whole_command_and_it_passes_once() {
    let lab = lab(BY_APPROVAL).await;
    let text = "ls -l | wc\n  echo \\n done";
    let id = pending(&lab.ask_for(&question(text)).await);
    let line = lab.ended(0).await;
    let of = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
    assert_eq!(
        ["event", "code", "stage", "tool", "approval"].map(|key| of(&line, key)),
        ["refused", "approval_pending", "approve", "self.command", &id],
        "{line}"
    );
    let rule = of(&line, "rule");
    assert!(rule.starts_with("in sandbox work without a network, sha256 "), "{rule}");
    assert!(rule.ends_with(": ls -l | wc\\n  echo \\\\n done"), "{rule}");

    assert_eq!(pending(&lab.ask_for(&question(text)).await), id, "asked once");
    let shown = lab.shown(&id).await;
    let bound = &shown["bound"];
    assert_eq!(["tool", "method", "url"].map(|key| of(&shown, key)), ["dangerous_shell", "RUN", "sandbox:work"]);
    assert_eq!((&bound["body"]["text"], &bound["body"]["is_whole"]), (&json!(text), &json!(true)), "{bound:#}");
    assert_eq!(bound["is_complete"], true, "{bound:#}");
    let conditions = json!([
        ["sandbox", "work"],
        ["workspace", "/home/a/work"],
        ["network", "none"],
        ["timeout", "60 s"],
        ["sandbox-sha256", "0".repeat(64)],
        ["reads", "/opt/tools"]
    ]);
    assert_eq!(bound["fields"], conditions);
    // The caller learns neither the text nor the sandbox.
    let own = lab.own(&format!("/v1/self/approvals/{id}")).await;
    assert_eq!((&own["tool"], &own["method"], &own["url"]), (&json!("dangerous_shell"), &Value::Null, &Value::Null));

    lab.approve_command(&id).await;
    let reply = lab.ask_for(&question(text)).await;
    assert_eq!((reply.status.as_u16(), reply.problem()), (200, json!({ "approval": id })));
    let lines = lab.audit().await;
    let decided: Vec<&Value> = lines.iter().filter(|line| line["event"] == "decided").collect();
    let [decided] = &*decided else { panic!("{lines:#?}") };
    assert_eq!((of(decided, "approval"), of(decided, "rule")), (id.clone(), rule), "{decided}");
    assert_ne!(pending(&lab.ask_for(&question(text)).await), id, "it is used once");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_is_for_nothing_else() {
    let lab = lab(BY_APPROVAL).await;
    let id = pending(&lab.ask_for(&question("ls")).await);
    lab.approve_command(&id).await;
    for (name, value) in [
        ("command", json!("ls\n")),
        ("sandbox", json!("other")),
        ("directory", json!("/home/a")),
        ("network", json!(true)),
        ("timeout_s", json!(61)),
        ("read_only", json!([])),
        ("statement", json!("1".repeat(64))),
    ] {
        let mut other = question("ls");
        other[name] = value;
        assert_ne!(pending(&lab.ask_for(&other).await), id, "{name}");
    }
    assert_eq!(lab.ask_for(&question("ls")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_malformed_or_hides_something_is_refused() {
    let lab = lab(BY_APPROVAL).await;
    let with = |name: &str, value: Value| {
        let mut other = question("ls");
        other[name] = value;
        other.to_string()
    };
    let whole = question("ls").to_string();
    let mut bodies = vec![
        String::new(),
        "[]".to_owned(),
        whole.replacen("\"command\":\"ls\"", "\"command\":\"ls\",\"command\":\"ls\"", 1),
        with("extra", json!(1)),
        with("command", Value::Null),
        with("sandbox", json!("a b")),
        with("directory", json!("relative")),
        with("timeout_s", json!(0)),
        with("timeout_s", json!(3601)),
        with("statement", json!("x")),
        with("read_only", json!(vec!["/a"; 65])),
    ];
    let long = "x".repeat(8_001);
    let commands = [
        "",
        " \n",
        "a\r\nb",
        "a\u{1b}[2Kb",
        "a\u{0}",
        "l\u{455}",
        "a\u{a0}b",
        "a\u{202e}b",
        "a\tb",
        "echo \\ \nrm x",
        &long,
    ];
    bodies.extend(commands.map(|command| with("command", json!(command))));
    for body in bodies {
        lab.ask(body.clone()).await.assert_refused(400, "request_malformed");
    }
    let mut request = Request::builder().method("GET").uri("/v1/self/commands").header("host", lab.proxy.to_string());
    request = request.header("proxy-authorization", auth());
    assert_eq!(lab.send(request.body(Full::new(Bytes::new())).unwrap()).await.status, 405);
    assert_eq!(lab.waiting().await, Vec::<String>::new());
    // Its own credential is a find, also as JSON escapes it.
    let key: String = KEY.bytes().map(|byte| format!("\\u{byte:04x}")).collect();
    for body in [
        with("command", json!(format!("echo {KEY}"))),
        whole.replace("ls", &key),
        with("directory", json!(format!("/{KEY}"))),
    ] {
        lab.ask(body).await.assert_refused(403, "leak_detected");
    }
    let log = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains(KEY), "{log}");
}

/// A value of another task is masked. The operator is told that not all of the command is shown, and the caller learns nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_masked_command_is_not_shown_as_whole() {
    let lab = lab(BY_APPROVAL).await;
    let id = pending(&lab.ask_for(&question(&format!("echo {OTHER_KEY}"))).await);
    let shown = lab.shown(&id).await;
    let bound = &shown["bound"];
    assert_eq!((&bound["is_complete"], &bound["body"]["is_whole"]), (&json!(false), &json!(false)), "{bound:#}");
    assert!(!shown.to_string().contains(OTHER_KEY), "{shown}");
    let mut other = question("ls");
    other["directory"] = json!(format!("/{OTHER_KEY}"));
    let id = pending(&lab.ask_for(&other).await);
    assert_eq!(lab.shown(&id).await["bound"]["is_complete"], false);
    let log = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains(OTHER_KEY), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_in_force_decides() {
    let lab = lab(BY_APPROVAL).await;
    let reload = |commands: &str| lab.reload(&config(443, commands));
    let id = pending(&lab.ask_for(&question("ls")).await);
    lab.approve_command(&id).await;
    reload("");
    lab.ask_for(&question("ls")).await.assert_refused(403, "tool_not_enabled");
    assert_eq!(lab.ended(1).await["rule"], "tasks.t.commands is not set");
    // A shorter time ends the approvals that were asked for under the longer one.
    reload("commands = { expires = \"5m\" }");
    let shorter = pending(&lab.ask_for(&question("ls")).await);
    assert_ne!(shorter, id);
    reload(BY_APPROVAL);
    assert_eq!(lab.ask_for(&question("ls")).await.status, 200);
    let about = async || lab.own("/v1/self").await["commands"].clone();
    assert_eq!(about().await, "by_approval");
    reload("");
    assert_eq!(about().await, Value::Null);
}

/// The request has been taken before the execution is stopped, and is asked for when its body is complete.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_execution_runs_nothing() {
    let lab = lab(BY_APPROVAL).await;
    let id = pending(&lab.ask_for(&question("ls")).await);
    lab.approve_command(&id).await;
    let body = question("ls").to_string();
    let mut stream = lab.connect().await;
    let head = format!(
        "POST /v1/self/commands HTTP/1.1\r\nHost: {}\r\nProxy-Authorization: {}\r\nContent-Length: {}\r\nExpect: 100-continue\r\n\r\n",
        lab.proxy,
        auth(),
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 100 "));
    let (status, said) = lab.admin_request("DELETE", "/v1/executions/t", &Value::Null).await;
    assert_eq!(status, 200, "{said}");
    stream.write_all(body.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await.to_lowercase();
    assert!(head.starts_with("http/1.1 403 ") && head.contains("exeat-refusal: execution_stopped"), "{head}");
    lab.ask_for(&question("ls")).await.assert_refused(403, "execution_stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_approves_a_command_only_with_its_code() {
    let lab = lab(BY_APPROVAL).await;
    let id = pending(&lab.ask_for(&question(&format!("ls -l |\n  wc # {}end", "-".repeat(80)))).await);
    let admin = format!("http://{}", lab.daemon.admin_address().unwrap());
    let token = fs::read_to_string(lab.dir.path().join("admin.token")).unwrap();
    let run = async |args: &[&str]| {
        let mut command = exeat(lab.dir.path(), &[&["--admin", &admin], args].concat());
        command.env("EXEAT_ADMIN_TOKEN", token.trim());
        let output = output(command).await;
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), text)
    };
    let code_of = async |id: &str| lab.shown(id).await["bound"]["code"].as_str().unwrap().to_owned();
    let code = code_of(&id).await;
    let (status, text) = run(&["approvals", &id]).await;
    assert_eq!(status, 0, "{text}");
    for part in [
        "         1 | ls -l |\n         2 |   wc # ---",
        "\n           : ---",
        "\nrequest    = RUN sandbox:work\n",
        "\nfield      = workspace: /home/a/work\n",
        "\nfield      = network: none\n",
        "\nshown      = all of it\n",
        &format!("\ncode       = {code}\n"),
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let wrong = if code == "00000000" { "11111111" } else { "00000000" };
    for (args, want) in [
        (&["approve", &id][..], "it is a command; read it with exeat approvals"),
        (&["approve", &id, "--code", wrong], "the code is another one"),
        (&["approve", &id, "--code", &code[..7]], "the code is another one"),
        (&["approve", &id, "--code", ""], "the code is another one"),
    ] {
        let (status, text) = run(args).await;
        assert!(status == 1 && text.contains(want), "{args:?}: {text}");
        assert_eq!(lab.waiting().await, std::slice::from_ref(&id), "{args:?}");
    }
    let (status, text) = run(&["approve", &id, "--code", &code]).await;
    assert!(status == 0 && text.contains("is approved"), "{text}");
    // A masked command says so.
    let id = pending(&lab.ask_for(&question(&format!("echo {OTHER_KEY}"))).await);
    let (_, text) = run(&["approvals", &id]).await;
    assert!(text.contains("= NOT ALL: a part is masked") && !text.contains(OTHER_KEY), "{text}");
    let code = code_of(&id).await;
    let (status, text) = run(&["approve", &id, "--code", &code]).await;
    assert!(status == 1 && text.contains("not all of it is shown"), "{text}");
    assert_eq!(run(&["approve", &id, "--code", &code, "--incomplete"]).await.0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_run_is_denied_without_a_question() {
    let place = Place::new(BY_APPROVAL, "shell = { resource = \"SHELL\" }\nblacklist = [\"project-x\"]").await;
    let of = |shell: &str, resource: &str, command: &str| {
        place.call(&json!({ "resourceId": resource, "shellType": shell, "command": command }).to_string())
    };
    let other = "00000000-0000-4000-8000-000000000000";
    let rows = [
        (of("Bash", other, "ls"), "Denied error=the dangerous shell is not served here"),
        (of("PowerShell", SHELL, "ls"), "Denied error=there is no PowerShell on this machine"),
        (of("CommandPrompt", SHELL, "dir"), "Denied error=there is no CommandPrompt"),
        (of("Bash", SHELL, "cat Project-X"), "Denied error=an argument contains 'project-x'"),
        (of("Bash", SHELL, "ls\r\n"), "Failed error=not run: a command has 1 to 8000 bytes of printable ASCII"),
        (
            of("Bash", SHELL, &"x".repeat(8_001)),
            "Failed error=not run: a command has 1 to 8000 bytes of printable ASCII",
        ),
        (of("Bash", SHELL, &format!("echo {KEY}")), "Denied error="),
        (
            place.call(&format!(
                "{{\"resourceId\":\"{SHELL}\",\"shellType\":\"Bash\",\"command\":\"a\",\"command\":\"b\"}}"
            )),
            "Failed error=what follows the id is not valid JSON, or has a member twice",
        ),
    ];
    for (line, want) in rows {
        assert!(line.starts_with(want), "{want}: {line}");
    }
    assert_eq!(place.lab.waiting().await, Vec::<String>::new());
    assert!(place.tools(&["preamble"], "").1.contains(&format!("A shell runs {{\"resourceId\":\"{SHELL}\"")));

    place.write_sandbox("shell = { resource = \"SHELL\", network = true }");
    let line = of("Bash", SHELL, "ls");
    assert!(line.starts_with("Denied error=sandbox 'work' is not run: it is not what was signed"), "{line}");
    let unconfigured = Place::new("", "shell = { resource = \"SHELL\" }").await;
    let line = unconfigured.run("ls");
    assert_eq!(line, "Denied error=tool 'dangerous_shell' not enabled for this task");
    assert!(!unconfigured.tools(&["preamble"], "").1.contains("served here"));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_else_runs_while_a_command_waits() {
    let place = Place::new(BY_APPROVAL, "shell = { resource = \"SHELL\" }").await;
    assert_eq!(place.run("ls"), "AwaitingApproval");
    for command in ["ls", "pwd"] {
        let line = place.run(command);
        assert!(line.starts_with("Denied error=not run: a command of the dangerous shell awaits"), "{line}");
    }
    let [id] = &*place.lab.waiting().await else { panic!() };
    let decision = json!({ "decision": "deny" });
    assert_eq!(place.lab.admin_request("POST", &format!("/v1/approvals/{id}"), &decision).await.0, 200);
    let line = place.run("ls");
    assert!(line.starts_with("Denied error="), "{line}");
    let bound = place.lab.shown(id).await["bound"].clone();
    let workspace = fs::canonicalize(place.workspace()).unwrap();
    assert_eq!(bound["fields"][1], json!(["workspace", workspace.to_str().unwrap()]), "{bound:#}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn an_approved_command_runs_once_in_the_workspace() {
    let place =
        Place::new(BY_APPROVAL, "shell = { resource = \"SHELL\", timeout = 20 }\nenv = { APP = \"demo\" }").await;
    fs::write(place.workspace().join("a.txt"), "one\ntwo\n").unwrap();
    assert_eq!(
        place.approved("pwd; wc -l < a.txt | tr -d ' '; echo $APP > made").await,
        "Completed result=/workspace\\n2"
    );
    assert_eq!(fs::read_to_string(place.workspace().join("made")).unwrap(), "demo\n");
    assert_eq!(
        place.run("pwd; wc -l < a.txt | tr -d ' '; echo $APP > made"),
        "AwaitingApproval",
        "it is approved once"
    );
    let [id] = &*place.lab.waiting().await else { panic!() };
    let decision = json!({ "decision": "deny" });
    assert_eq!(place.lab.admin_request("POST", &format!("/v1/approvals/{id}"), &decision).await.0, 200);

    let token = place.approved("env; cat /proc/\"1\"/environ /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true").await;
    assert!(token.contains("APP=demo") && !token.contains(crate::lab::TOKEN) && !token.contains("EXEAT"), "{token}");
    let outside = place
        .approved("cat /etc/passwd; ls /home /root; cat ../outside.txt; find / \\( -path /usr -o -path /proc \\) -prune -o -name outside.txt -print 2>/dev/null; echo end")
        .await;
    assert!(outside.ends_with("end") && !outside.contains("root:") && !outside.contains("outside\\n"), "{outside}");
    let online = place.approved("exec 3<>/dev/tcp/127.0.0.1/3128 && echo online; ls /sys/class/net; echo end").await;
    assert!(online.contains("end") && !online.contains("online"), "{online}");
    let failed = place.approved("echo said >&2; exit 3").await;
    assert_eq!(failed, "Failed error=exit status 3: said");
    let option = place.approved("-c 'echo option'").await;
    assert!(option.starts_with("Failed error=exit status 127"), "{option}");
    let changed =
        place.approved("mkdir -p .git/hooks; echo x > .git/hooks/post-commit; rm -r -f / 2>/dev/null; echo left").await;
    assert!(changed.contains("left"), "{changed}");
    assert_eq!(fs::read_to_string(place.dir.path().join("outside.txt")).unwrap(), "outside");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and curl"]
async fn a_command_reaches_the_network_through_the_proxy_only() {
    let place = Place::new(BY_APPROVAL, "shell = { resource = \"SHELL\", network = true }").await;
    let url = format!("https://api.test:{}/page", place.origin.port());
    let command = format!("curl -sS {url}; curl -sS https://other.test/ || echo refused");
    let done = place.approved(&command).await;
    assert!(done.contains("refused"), "{done}");
    assert_eq!(place.origin.last().headers["authorization"], format!("Bearer {KEY}"), "the proxy adds the credential");
    assert!(!done.contains(KEY), "{done}");
    let direct = place
        .approved(&format!(
            "curl -sS --noproxy '*' --max-time 3 https://127.0.0.1:{}/ || echo none",
            place.origin.port()
        ))
        .await;
    assert!(direct.contains("none"), "{direct}");
    assert_eq!(place.origin.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn a_command_ends_with_its_time() {
    let place = Place::new(BY_APPROVAL, "shell = { resource = \"SHELL\", timeout = 5 }").await;
    let line = place.approved("echo begun; (setsid sleep 1000 &) ; sleep 1000").await;
    assert!(line.starts_with("Failed error=exceeded its time-out, and was ended with all that it started"), "{line}");
    assert!(line.contains("begun"), "{line}");
}
