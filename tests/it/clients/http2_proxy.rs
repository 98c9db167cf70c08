//! Clients that speak HTTP/2 to the proxy itself: libcurl, Node and Chromium.

use std::process::{Command, Output};

use crate::callers::listeners::Certificates;
use crate::clients::with_clients;
use crate::lab::h2_proxy::TLS;
use crate::lab::{self, Lab, LabBuilder, Origin, TOKEN};
use crate::operation::cli::{output, text};

/// Fetches URLs with libcurl, as `curl --proxy-http2` does: each after the other, then all at once. Prints the protocol with the
/// proxy, and what was received.
const CURL: &str = r#"
import io, os, sys, pycurl

HTTPS2 = 3  # CURLPROXY_HTTPS2, which this binding has no name for.
notes = []

def easy(url, body=None):
    c, out = pycurl.Curl(), io.BytesIO()
    c.setopt(c.URL, url)
    c.setopt(c.PROXY, f"https://localhost:{os.environ['PORT']}")
    c.setopt(c.PROXYTYPE, HTTPS2)
    c.setopt(c.PROXYUSERPWD, "t:" + os.environ["TOKEN"])
    c.setopt(c.PROXY_CAINFO, "clients.pem")
    c.setopt(c.CAINFO, os.environ["CA"])
    c.setopt(c.HTTPPROXYTUNNEL, True)
    c.setopt(c.TIMEOUT, 20)
    c.setopt(c.WRITEDATA, out)
    c.setopt(c.VERBOSE, True)
    c.setopt(c.DEBUGFUNCTION, lambda kind, line: notes.append(line.decode("utf-8", "replace")) if kind == 0 else None)
    if body is not None:
        c.setopt(c.POSTFIELDS, body)
    c.out = out
    return c

def fetch(*args):
    c = easy(*args)
    c.perform()
    return f"{c.getinfo(c.RESPONSE_CODE)} {c.out.getvalue().decode()!r}"

url, plain = sys.argv[1], sys.argv[2]
print(fetch(url + "/"))
print(fetch(url + "/sink", b"x" * 3000000))
print(fetch(plain + "/"))
print(fetch("https://evil.test/")[:4])
multi, handles = pycurl.CurlMulti(), [easy(f"{url}/?{n}") for n in range(30)]
for c in handles:
    multi.add_handle(c)
running = 1
while running:
    _, running = multi.perform()
    multi.select(1.0)
print(sum(c.out.getvalue() == b"hello\n" for c in handles))
# The refused tunnel is none.
print(sum("CONNECT phase completed for HTTP/2 proxy" in note for note in notes) > 30)

"#;

/// Opens tunnels, and sends a request in absolute form, on one session of Node's HTTP/2 client.
const NODE: &str = r#"
const fs = require('fs'), http = require('http'), http2 = require('http2'), tls = require('tls');
const [url] = process.argv.slice(2);
const to = new URL(url).host;
const own = { 'proxy-authorization': 'Basic ' + Buffer.from('t:' + process.env.TOKEN).toString('base64') };
const session = http2.connect(`https://localhost:${process.env.PORT}`, { ca: fs.readFileSync('clients.pem') });
session.on('error', error => { console.error(error); process.exit(1); });

const text = stream => new Promise((resolve, reject) => {
  let all = '';
  stream.setEncoding('utf8').on('data', data => all += data).on('end', () => resolve(all)).on('error', reject);
});

const tunnel = () => new Promise((resolve, reject) => {
  const stream = session.request({ ':method': 'CONNECT', ':authority': to, ...own });
  stream.on('response', head => head[':status'] === 200 ? resolve(stream) : reject(new Error(head[':status'])));
  stream.on('error', reject);
});

async function get(path) {
  const socket = tls.connect({ socket: await tunnel(), servername: 'api.test', ca: fs.readFileSync(process.env.CA) });
  // The socket is that of TLS already.
  const options = { host: 'api.test', path, headers: { host: to }, createConnection: () => socket };
  return text(await new Promise((resolve, reject) => http.get(options, resolve).on('error', reject)));
}

(async () => {
  const all = await Promise.all(Array.from({ length: 20 }, (_, n) => get(`/?${n}`)));
  console.log(all.filter(one => one === 'hello\n').length);
  console.log((await get('/known?3000000')).length);
  const absolute = session.request({ ':authority': to, ':scheme': 'https', ':path': '/', ...own });
  console.log(JSON.stringify(await text(absolute)));
  const self = session.request({ ':path': '/v1/self', ...own });
  console.log(JSON.parse(await text(self)).task);
  session.close();
})().catch(error => { console.error(error); process.exit(1); });
"#;

struct Place {
    lab: Lab,
    origin: Origin,
    plain: Origin,
}

async fn place() -> Place {
    let builder = LabBuilder::new().await;
    let (origin, plain) = (builder.origin("api.test").await, Origin::http().await);
    builder.dns.set("plain.test", &["127.0.0.1"]);
    Certificates::new(builder.dir.path());
    let text = format!(
        "{TLS}[integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n{}",
        plain.port(),
        lab::allow_api(origin.port()).replace("[\"api\"]", "[\"api\", \"plain\"]")
    );
    let lab = builder.proxy(&text).await;
    std::fs::write(lab.dir.path().join("interception.pem"), lab.daemon.ca_pem()).unwrap();
    Place { lab, origin, plain }
}

impl Place {
    fn url(&self) -> String {
        format!("https://api.test:{}", self.origin.port())
    }

    async fn run(&self, program: &str, args: &[&str]) -> Output {
        let port = self.lab.proxy.port().to_string();
        let mut command = Command::new(program);
        with_clients(&mut command);
        command
            .args(args)
            .current_dir(self.lab.dir.path())
            .envs([("PORT", port.as_str()), ("TOKEN", TOKEN), ("CA", "interception.pem")])
            .env("HTTPS_PROXY", format!("https://t:{TOKEN}@localhost:{port}"))
            .env("HOME", self.lab.dir.path());
        output(command).await
    }

    async fn lines(&self, program: &str, args: &[&str]) -> Vec<String> {
        let output = self.run(program, args).await;
        assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout).lines().map(str::to_owned).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python with pycurl"]
async fn libcurl_speaks_http2_to_the_proxy() {
    let place = place().await;
    let plain = format!("http://plain.test:{}", place.plain.port());
    std::fs::write(place.lab.dir.path().join("fetch.py"), CURL).unwrap();
    let said = place.lines("python", &["fetch.py", &place.url(), &plain]).await;
    assert_eq!(said, ["200 'hello\\n'", "200 '3000000'", "200 'hello\\n'", "403 ", "30", "True"]);
    assert_eq!(place.lab.dns.queries("evil.test"), 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs node"]
async fn node_opens_tunnels_on_one_session() {
    let place = place().await;
    std::fs::write(place.lab.dir.path().join("fetch.js"), NODE).unwrap();
    let said = place.lines("node", &["fetch.js", &place.url()]).await;
    assert_eq!(said, ["20", "3000000", "\"hello\\n\"", "t"]);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium, certutil and node"]
async fn chromium_speaks_http2_to_the_proxy() {
    let place = place().await;
    std::fs::write(place.lab.dir.path().join("chromium.js"), include_str!("chromium.js")).unwrap();
    let script = "mkdir -p .pki/nssdb && certutil -d sql:.pki/nssdb -N --empty-password && \
                  certutil -d sql:.pki/nssdb -A -t C,, -n exeat -i interception.pem && \
                  certutil -d sql:.pki/nssdb -A -t C,, -n proxy -i clients.pem && \
                  NET_LOG=net.log timeout 60 node chromium.js \"$0/\" \"$0/sink\"";
    let said = place.lines("sh", &["-c", script, &place.url()]).await;
    assert_eq!(said, ["hello h2 100000"]);
    let log = std::fs::read_to_string(place.lab.dir.path().join("net.log")).unwrap();
    let session = format!("\"host\":\"localhost:{}\"", place.lab.proxy.port());
    assert!(log.contains(&session), "Chromium has no HTTP/2 session with the proxy");
}
