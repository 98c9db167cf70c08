//! Tells another server of requests that wait for an approval: signed JSON, or a message for Slack.
//!
//! A notice decides nothing. A request waits whether or not anybody learns of it, and a notice that fails is only logged.

use std::collections::HashMap;
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
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::own_server::{OwnServerDialer, OwnServers, ServerAddress};
use crate::files;
use crate::flow::documents;
use crate::ledger::{Approval, Millis, Stream};
use crate::model::name::TaskName;
use crate::model::unique_id;
use crate::policy::hook_url::HookUrl;
use crate::policy::settings::{Notify, NotifyFormat, NotifyUrl, Source};
use crate::policy::source;
use crate::stages::approve::NoticeReceiver;
use crate::stages::pin::OwnServer;

/// The time limit for a connection, and for the answer to a notice.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The pauses before further attempts.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];
/// The most notices that are being sent.
const MAX_CONCURRENT: usize = 8;
/// The most notices in a minute, of one task and of all. A sandbox can ask for many approvals.
const MAX_PER_MINUTE: [u32; 2] = [20, 60];
const MINUTE: Duration = Duration::from_secs(60);
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
    /// Held while the URL and the key are read. A file system that hangs occupies one thread, however many notices there are.
    reading: Arc<Mutex<()>>,
}

/// The notices of a minute.
struct Minute {
    ends_at: Instant,
    of_tasks: HashMap<TaskName, u32>,
    all: u32,
    /// Approvals that had no notice.
    left_out: u64,
}

impl Minute {
    fn new() -> Self {
        let now = Instant::now();
        Self { ends_at: now.checked_add(MINUTE).unwrap_or(now), of_tasks: HashMap::new(), all: 0, left_out: 0 }
    }

    /// Counts a notice, and returns whether it may be sent.
    fn admits(&mut self, task: &TaskName) -> bool {
        let [most_of_task, most] = MAX_PER_MINUTE;
        let of_task = self.of_tasks.entry(task.clone()).or_default();
        let is_admitted = *of_task < most_of_task && self.all < most;
        if is_admitted {
            *of_task = of_task.saturating_add(1);
            self.all = self.all.saturating_add(1);
        } else {
            self.left_out = self.left_out.saturating_add(1);
        }
        is_admitted
    }
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

impl NotifyError {
    /// Returns whether the same notice may succeed later.
    fn may_pass(&self) -> bool {
        match self {
            Self::Status(status) => {
                !status.is_client_error()
                    || matches!(*status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
            }
            Self::Source(_) | Self::Connection(_) => true,
        }
    }
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
        Self {
            notify: notify.clone(),
            dialer: own_servers.dialer(),
            link: notify.link.clone().or(page),
            reading: Arc::default(),
        }
    }

    /// Sends notices until the sender is dropped.
    pub(super) async fn run(self, mut approvals: NoticeReceiver) {
        let this = Arc::new(self);
        let permits = Arc::new(Semaphore::new(MAX_CONCURRENT));
        let mut minute = Minute::new();
        loop {
            let approval = tokio::select! {
                approval = approvals.next() => match approval {
                    Some(approval) => Some(approval),
                    None => return,
                },
                () = sleep_until(minute.ends_at) => None,
            };
            let (delivery, body, expires_at) = match approval {
                Some(approval) if minute.admits(&approval.task) => {
                    (approval.id.clone(), this.body(&approval), approval.expires_at)
                }
                Some(_) => continue,
                None => {
                    let left_out = minute.left_out.saturating_add(approvals.take_dropped());
                    minute = Minute::new();
                    if left_out == 0 {
                        continue;
                    }
                    tracing::warn!(approvals = left_out, "approvals had no notice: there were too many in a minute");
                    let id = unique_id::new().simple().to_string();
                    (id, this.body_without(left_out), Millis::now().plus(MINUTE))
                }
            };
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            let this = this.clone();
            tokio::spawn(async move {
                this.deliver(&delivery, body, expires_at).await;
                drop(permit);
            });
        }
    }

    async fn deliver(&self, delivery: &str, body: Bytes, expires_at: Millis) {
        let mut pauses = PAUSES.into_iter();
        while Millis::now() < expires_at
            && let Err(error) = self.send(delivery, body.clone()).await
        {
            let pause = pauses.next().filter(|_| error.may_pass());
            let Some(pause) = pause else {
                return tracing::warn!(delivery, %error, "the notice of an approval was not delivered");
            };
            tracing::debug!(delivery, %error, "the notice of an approval is sent again");
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
        let read = async {
            let turn = self.reading.clone().lock_owned().await;
            // The file may be on a disk that hangs.
            let read = move || {
                let _turn = turn;
                read_secrets(&url, key.as_ref())
            };
            spawn_blocking(read).await
        };
        timeout(TIMEOUT, read).await.map_err(|_| no_answer())?.map_err(io::Error::other)?
    }

    /// Returns the body of a notice.
    fn body(&self, approval: &Approval) -> Bytes {
        let document = match self.notify.format {
            NotifyFormat::Generic => self.generic(approval),
            NotifyFormat::Slack => self.slack(approval),
        };
        document.to_string().into()
    }

    /// Returns the body of a notice that approvals had none.
    fn body_without(&self, count: u64) -> Bytes {
        let document = match self.notify.format {
            NotifyFormat::Generic => {
                json!({ "event": "approvals_without_notice", "count": count, "link": self.link })
            }
            NotifyFormat::Slack => json!({ "text": format!("{count} more requests wait for approval") }),
        };
        document.to_string().into()
    }

    fn generic(&self, approval: &Approval) -> Value {
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
        })
    }

    fn slack(&self, approval: &Approval) -> Value {
        let request = format!("{} {}", approval.method, approval.url);
        let by = match &approval.tool {
            Some(tool) => format!("{} of task {}", tool, approval.task),
            None => format!("task {}", approval.task),
        };
        let until = documents::timestamp(approval.expires_at);
        let text = format!("*A request waits for approval*\n`{}`\nby {}, until {until}", code(&request), escaped(&by));
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
