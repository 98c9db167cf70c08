//! Tells another server of requests that wait for an approval: signed JSON, or a message for Slack.
//!
//! A notice decides nothing. A request waits whether or not anybody learns of it, and a notice that fails is only logged.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use http::header::{CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderName, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use sha2::Sha256;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::own_server::{OwnServerDialer, OwnServers, ServerAddress};
use crate::files;
use crate::flow::documents;
use crate::ledger::{Approval, Millis, Stream};
use crate::policy::hook_url::HookUrl;
use crate::policy::settings::{Notify, NotifyFormat, NotifyUrl, Source};
use crate::policy::source;
use crate::stages::pin::OwnServer;

/// The time limit for a connection, and for the answer to a notice.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The pauses before further attempts.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];
/// The most notices that are being sent.
const MAX_CONCURRENT: usize = 8;
/// The most notices in a minute. A sandbox can ask for many approvals.
const MAX_PER_MINUTE: u32 = 30;
/// The most characters of a text from a request.
const MAX_TEXT: usize = 500;
const MAX_HEAD: usize = 32 * 1024;
const MAX_BODY: usize = 64 * 1024;

const TIMESTAMP: HeaderName = HeaderName::from_static("exeat-timestamp");
const SIGNATURE: HeaderName = HeaderName::from_static("exeat-signature");
const DELIVERY: HeaderName = HeaderName::from_static("exeat-delivery");

/// Sends notices.
pub(super) struct ApprovalNotifier {
    notify: Notify,
    dialer: OwnServerDialer,
    /// The address of the live page.
    link: Option<String>,
}

/// Why a notice was not sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotifyError {
    /// The URL or the key cannot be read.
    #[error("{0}")]
    Source(String),
    /// The server answered with another status than 2xx.
    #[error("the server answered {0}")]
    Status(StatusCode),
    /// The connection cannot be opened, or has failed.
    #[error("{0}")]
    Connection(String),
}

impl From<io::Error> for NotifyError {
    fn from(error: io::Error) -> Self {
        Self::Connection(error.to_string())
    }
}

impl From<hyper::Error> for NotifyError {
    fn from(error: hyper::Error) -> Self {
        // The text of hyper's error has no data of the server.
        Self::Connection(error.to_string())
    }
}

impl ApprovalNotifier {
    /// `page` is the address of the live page, if the configuration has no other link.
    pub(super) fn new(notify: &Notify, own_servers: &OwnServers<'_>, page: Option<String>) -> Self {
        Self { notify: notify.clone(), dialer: own_servers.dialer(), link: notify.link.clone().or(page) }
    }

    /// Sends notices until the sender is dropped.
    pub(super) async fn run(self, mut approvals: mpsc::Receiver<Approval>) {
        let this = Arc::new(self);
        let permits = Arc::new(Semaphore::new(MAX_CONCURRENT));
        let (mut minute, mut sent, mut left_out) = (Instant::now(), 0_u32, 0_u64);
        while let Some(approval) = approvals.recv().await {
            if minute.elapsed() >= Duration::from_secs(60) {
                (minute, sent) = (Instant::now(), 0);
            }
            if sent >= MAX_PER_MINUTE {
                left_out = left_out.saturating_add(1);
                tracing::warn!(approval = approval.id, "no notice of this approval: there were too many in a minute");
                continue;
            }
            sent = sent.saturating_add(1);
            let body = this.body(&approval, std::mem::take(&mut left_out));
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            let this = this.clone();
            tokio::spawn(async move {
                this.deliver(&approval, body).await;
                drop(permit);
            });
        }
    }

    async fn deliver(&self, approval: &Approval, body: Bytes) {
        let mut pauses = PAUSES.into_iter();
        while let Err(error) = self.send(&approval.id, body.clone()).await {
            let pause = pauses.next().filter(|pause| Millis::now().plus(*pause) < approval.expires_at);
            let Some(pause) = pause else {
                return tracing::warn!(approval = approval.id, %error, "the notice of an approval was not delivered");
            };
            tracing::debug!(approval = approval.id, %error, "the notice of an approval is sent again");
            sleep(pause).await;
        }
    }

    /// Reads the URL and the key, and connects.
    ///
    /// # Errors
    /// [`NotifyError`].
    pub(super) async fn try_open(&self) -> Result<(), NotifyError> {
        let (url, _) = self.secrets().await?;
        timeout(TIMEOUT, self.connect(&url)).await.map_err(|_| no_answer())??;
        Ok(())
    }

    async fn send(&self, delivery: &str, body: Bytes) -> Result<(), NotifyError> {
        let (url, key) = self.secrets().await?;
        timeout(TIMEOUT, self.post(&url, key, delivery, body)).await.map_err(|_| no_answer())?
    }

    async fn post(
        &self,
        url: &HookUrl,
        key: Option<SignatureKey>,
        delivery: &str,
        body: Bytes,
    ) -> Result<(), NotifyError> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()).to_string();
        let mut request = Request::post(url.path())
            .header(HOST, url.host_field())
            .header(USER_AGENT, concat!("exeat/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, "application/json")
            .header(DELIVERY, delivery)
            .header(TIMESTAMP, &seconds);
        if let Some(key) = key {
            request = request.header(SIGNATURE, format!("v1={}", key.sign(&seconds, &body)));
        }
        let request = request.body(Full::new(body)).map_err(|error| NotifyError::Connection(error.to_string()))?;
        let stream = TokioIo::new(self.connect(url).await?);
        let (mut sender, driver) = http1::Builder::new().max_buf_size(MAX_HEAD).handshake(stream).await?;
        let _driver = AbortOnDropHandle::new(tokio::spawn(driver));
        let (head, body) = sender.send_request(request).await?.into_parts();
        if !head.status.is_success() {
            return Err(NotifyError::Status(head.status));
        }
        // Only so that the server does not see a connection that breaks.
        let _ = Limited::new(body, MAX_BODY).collect().await;
        Ok(())
    }

    async fn connect(&self, url: &HookUrl) -> io::Result<Box<dyn Stream>> {
        let HookUrl { host, port, is_tls, .. } = url;
        let server = OwnServer::ApprovalHook;
        self.dialer.connect(&ServerAddress { server, host, port: *port, is_tls: *is_tls }).await
    }

    /// Reads the values each time, because they may have been replaced in their files.
    async fn secrets(&self) -> Result<(HookUrl, Option<SignatureKey>), NotifyError> {
        let Notify { url, key, .. } = self.notify.clone();
        // The file may be on a disk that hangs.
        let read = timeout(TIMEOUT, spawn_blocking(move || read_secrets(&url, key.as_ref()))).await;
        read.map_err(|_| no_answer())?.map_err(io::Error::other)?
    }

    /// Returns the body of a notice. `left_out` approvals before this one had none.
    fn body(&self, approval: &Approval, left_out: u64) -> Bytes {
        let document = match self.notify.format {
            NotifyFormat::Generic => self.generic(approval, left_out),
            NotifyFormat::Slack => self.slack(approval, left_out),
        };
        document.to_string().into()
    }

    fn generic(&self, approval: &Approval, left_out: u64) -> Value {
        json!({
            "event": "approval_requested",
            "approval": approval.id,
            "task": approval.task.as_str(),
            "execution": approval.execution.as_str(),
            "tool": approval.tool,
            "method": approval.method,
            "url": approval.url,
            "created_at": documents::timestamp(approval.created_at),
            "expires_at": documents::timestamp(approval.expires_at),
            "link": self.link,
            "without_notice": left_out,
        })
    }

    fn slack(&self, approval: &Approval, left_out: u64) -> Value {
        let request = format!("{} {}", approval.method, approval.url);
        let by = match &approval.tool {
            Some(tool) => format!("{} of task {}", tool, approval.task),
            None => format!("task {}", approval.task),
        };
        let more = if left_out > 0 { format!("\n{left_out} more before it had no notice.") } else { String::new() };
        let until = documents::timestamp(approval.expires_at);
        let text =
            format!("*A request waits for approval*\n`{}`\nby {}, until {until}{more}", code(&request), escaped(&by));
        let mut blocks = vec![json!({ "type": "section", "text": { "type": "mrkdwn", "text": text } })];
        if let Some(link) = &self.link {
            let button = json!({ "type": "button", "text": { "type": "plain_text", "text": "Open" }, "url": link });
            blocks.push(json!({ "type": "actions", "elements": [button] }));
        }
        json!({ "text": format!("A request waits for approval: {}", escaped(&request)), "blocks": blocks })
    }
}

/// The key of the signatures.
struct SignatureKey(crate::model::secret::Secret);

impl SignatureKey {
    /// Returns the HMAC-SHA-256 of `SECONDS.BODY` in hex.
    fn sign(&self, seconds: &str, body: &[u8]) -> String {
        let Ok(mut hmac) = Hmac::<Sha256>::new_from_slice(self.0.expose()) else { return String::new() };
        [seconds.as_bytes(), b".", body].into_iter().for_each(|part| hmac.update(part));
        files::hex(&hmac.finalize().into_bytes())
    }
}

fn read_secrets(url: &NotifyUrl, key: Option<&Source>) -> Result<(HookUrl, Option<SignatureKey>), NotifyError> {
    let env = |name: &str| std::env::var(name).ok();
    let read = |what: &str, source: &Source| {
        source::read_source(source, &env).map_err(|error| NotifyError::Source(format!("{what}: {error}")))
    };
    let url = match url {
        NotifyUrl::Plain(url) => url.clone(),
        NotifyUrl::Secret(source) => {
            let value = read("notify", source)?;
            let text = std::str::from_utf8(value.expose()).unwrap_or_default();
            HookUrl::parse(text).map_err(|error| NotifyError::Source(format!("notify: {error}")))?
        }
    };
    let key = key.map(|source| read("notify_key", source)).transpose()?;
    Ok((url, key.map(SignatureKey)))
}

/// Checks that the URL and the key can be read.
///
/// # Errors
/// [`NotifyError::Source`].
pub(super) fn check_secrets(notify: &Notify) -> Result<(), NotifyError> {
    read_secrets(&notify.url, notify.key.as_ref()).map(drop)
}

/// Escapes a text for Slack, so that it is no markup, no mention and no link.
fn escaped(text: &str) -> String {
    let short: String = text.chars().filter(|c| !c.is_control()).take(MAX_TEXT).collect();
    short.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// As [`escaped`], for a text between back quotes.
fn code(text: &str) -> String {
    escaped(&text.replace('`', "'"))
}

fn no_answer() -> NotifyError {
    NotifyError::Connection("no answer in time".to_owned())
}
