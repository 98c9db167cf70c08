//! Overwrites credentials in response heads, bodies and trailers, byte for byte. Content codings are decoded for this.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, ETAG, HeaderName, HeaderValue};
use http::{HeaderMap, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::audit::progress::{ScanDirection, TransferCounts};
use crate::audit::record::Record;
use crate::coding::{DecodeLimits, Decoder, WindowPool};
use crate::leak::{FindCount, Matcher, Redactor, ValueOwner};
use crate::model::name::CredentialName;
use crate::model::refusal::{Fail, Verdict};
use crate::stages::authorize::Grant;
use crate::stages::inspect::outbound::{GRPC_WEB_TEXT, PORTION, codings, media_types};
use crate::stages::message::arrivals::{Arrivals, PauseWatch};
use crate::stages::message::request_body::{BodyError, RequestBody, add_held};
use crate::stages::scan_limit::{PolledScanLimit, ScanLimit};
use crate::stages::work_slice::WorkSlice;

/// The longest time that a head waits for the first bytes of an encoded body. The body of a stream may start long after
/// its head.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_millis(500);
/// The longest time that it waits for more bytes when those received have not produced any output.
const MORE_BYTES_TIMEOUT: Duration = Duration::from_millis(50);
/// After this many encoded bytes without output, there is no point in waiting for more.
const MAX_WITHOUT_OUTPUT: u64 = 64 * 1024;

/// The size of the pieces in which an encoded body is delivered if its origin may know a value, in bytes.
const BLOCK: usize = 16 * 1024;

/// The values to redact in a response.
#[derive(Clone)]
pub(crate) struct RedactionPlan {
    /// The protected values.
    pub(crate) values: Arc<Matcher>,
    /// The credential sent with this request. If the origin returns its value, it is redacted, but is no find.
    pub(crate) sent: Vec<CredentialName>,
    /// The decoding limits for an encoded response.
    pub(crate) bounds: DecodeLimits,
    /// The memory for its windows.
    pub(crate) pool: Arc<WindowPool>,
    /// The limit of concurrent scans of the execution.
    pub(crate) limit: ScanLimit,
    /// The origin may know a value.
    pub(crate) may_be_known: bool,
}

/// The content decoder of a response.
pub(crate) enum ContentDecoder {
    /// The response is not encoded.
    Identity,
    /// The coding is removed, and the head is changed accordingly.
    Coding(Box<Decoder>),
}

impl RedactionPlan {
    /// Returns the plan for the response to a granted request, or `None` if there are no values to redact.
    pub(crate) fn of(grant: &Grant, body: &RequestBody) -> Option<Self> {
        let values = grant.values_in_response();
        let may_be_known = grant.may_know_credential();
        // Whether a limit that depends on the coded size is reached would tell how well an echo compresses.
        let bounds = grant.decode_limits();
        let bounds = if may_be_known { bounds.without_ratio() } else { bounds };
        (!values.is_empty()).then(|| Self {
            values: values.clone(),
            sent: grant.sent_values().map(|credential| credential.name().clone()).collect(),
            bounds,
            pool: body.response_windows(),
            may_be_known,
            limit: body.scan_limit(),
        })
    }

    /// Returns the decoder for a response.
    ///
    /// # Errors
    /// [`Fail::UpstreamProtocol`] if the response cannot be decoded, or is a part of an encoded representation that can
    /// only be decoded as a whole.
    pub(crate) fn decoder<B: Body>(&self, response: &Response<B>) -> Verdict<ContentDecoder> {
        let headers = response.headers();
        let of_messages = ["grpc-encoding", "connect-content-encoding", "im"].map(HeaderName::from_static);
        if !of_messages.iter().all(|name| codings(headers, name).is_some_and(|codings| codings.is_empty())) {
            return Err(Fail::UpstreamProtocol.into());
        }
        // A stream of base64 segments. Values in it cannot be overwritten.
        if media_types(headers).any(|kind| kind.starts_with(GRPC_WEB_TEXT)) {
            return Err(Fail::UpstreamProtocol.into());
        }
        let codings = codings(headers, &CONTENT_ENCODING);
        if codings.as_ref().is_some_and(Vec::is_empty) || (codings.is_none() && response.body().is_end_stream()) {
            return Ok(ContentDecoder::Identity);
        }
        if response.status() == StatusCode::PARTIAL_CONTENT {
            return Err(Fail::UpstreamProtocol.into());
        }
        let decoder =
            Decoder::new(&codings.unwrap_or_default(), self.bounds, &self.pool).ok_or(Fail::UpstreamProtocol)?;
        Ok(ContentDecoder::Coding(Box::new(decoder)))
    }
}

/// An origin's body with credentials overwritten.
pub(crate) struct RedactedBody {
    inner: CountedBody,
    guard: Option<Box<Redaction>>,
}

/// An origin's body as received, counted before decoding.
struct CountedBody {
    body: Incoming,
    is_http2: bool,
    counts: Option<Arc<TransferCounts>>,
}

impl CountedBody {
    /// hyper reports a stream that is reset with `NO_ERROR` as ended. An origin that has answered may stop a request body
    /// so (RFC 9113 §8.1); without the end of the answer, it is cut off.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx)).map(|frame| frame.map_err(BodyError::Peer));
        if frame.is_none() && self.is_http2 && !self.body.is_end_stream() {
            return Poll::Ready(Some(Err(BodyError::Truncated)));
        }
        if let (Some(counts), Some(Ok(frame))) = (&self.counts, &frame) {
            counts.received(frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(frame)
    }
}

struct Redaction {
    redactor: Redactor,
    may_be_known: bool,
    decoder: Option<Box<Decoder>>,
    limit: PolledScanLimit,
    pauses: PauseWatch,
    slice: WorkSlice,
    /// Received bytes that have not been decoded and scanned.
    waiting: Bytes,
    /// Trailers that have not been scanned. All data before them has been.
    trailers: Option<HeaderMap>,
    /// The number of bytes received, and the number of bytes decoded from them.
    received: u64,
    decoded: u64,
    /// The body is encoded. `decoder` is removed at its end.
    decodes: bool,
    /// The redacted data of a body that is delivered in blocks.
    block: BytesMut,
    /// The number of bytes delivered in blocks.
    delivered: u64,
    /// The decoder has more output for the bytes it has consumed.
    more: bool,
    ended: bool,
    /// The final item, sent after the data: the trailers, or the error that ended the body.
    last: Option<Result<Frame<Bytes>, BodyError>>,
}

/// As [`head`], when the execution may scan. `arrivals` are those of the connection.
///
/// # Errors
/// As [`ScanLimit::acquire`].
pub(crate) async fn head_within_limit(
    response: Response<Incoming>,
    guard: Option<(RedactionPlan, ContentDecoder)>,
    arrivals: Arc<Arrivals>,
) -> Verdict<Response<RedactedBody>> {
    let _permit = match &guard {
        Some((guard, _)) => Some(guard.limit.acquire().await?),
        None => None,
    };
    Ok(head(response, guard, arrivals))
}

/// Redacts a response head and wraps the body for redaction.
fn head(
    mut response: Response<Incoming>,
    guard: Option<(RedactionPlan, ContentDecoder)>,
    arrivals: Arc<Arrivals>,
) -> Response<RedactedBody> {
    // From here on, the version is that of the connection to the client.
    let is_http2 = std::mem::replace(response.version_mut(), Version::HTTP_11) == Version::HTTP_2;
    let raw = |body| CountedBody { body, is_http2, counts: None };
    let Some((guard, undo)) = guard else { return response.map(|body| RedactedBody { inner: raw(body), guard: None }) };
    let (mut parts, body) = response.into_parts();
    let mut redactor = Redactor::with_sent(guard.values, guard.sent);
    let limit = guard.limit.polled();
    if guard.may_be_known {
        remove_digests(&mut parts.headers);
    }
    let decoder = match undo {
        ContentDecoder::Identity => None,
        ContentDecoder::Coding(decoder) => {
            remove_coding_fields(&mut parts.headers);
            Some(decoder)
        }
    };
    redact_fields(&mut parts.headers, &mut redactor);
    // A reason phrase could contain a value, and no client needs it.
    parts.extensions.remove::<hyper::ext::ReasonPhrase>();
    let guarding = Redaction {
        redactor,
        may_be_known: guard.may_be_known,
        decodes: decoder.is_some(),
        block: BytesMut::new(),
        delivered: 0,
        decoder,
        limit,
        pauses: PauseWatch::new(arrivals),
        slice: WorkSlice::default(),
        waiting: Bytes::new(),
        trailers: None,
        received: 0,
        decoded: 0,
        more: false,
        ended: false,
        last: None,
    };
    Response::from_parts(parts, RedactedBody { inner: raw(body), guard: Some(Box::new(guarding)) })
}

/// Redacts texts of an origin that appear in the proxy's own responses. No credential was sent for these texts.
pub struct TextRedactor(Redactor);

impl TextRedactor {
    /// Redacts these values.
    #[must_use]
    pub fn new(values: Arc<Matcher>) -> Self {
        Self(Redactor::new(values))
    }

    /// Returns the text with values overwritten.
    pub fn redact(&mut self, text: String) -> String {
        let redacted = self.0.redact_text(text.as_bytes());
        redacted.map_or(text, |bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Records the redactions. Each overwritten value confirms the caller's guess, so it counts as a find.
    ///
    /// # Errors
    /// As [`Record::finds_in_answer`].
    pub fn record(self, record: &mut Record) -> Verdict<()> {
        let reported = record.finds_in_answer(self.0.find_count(true));
        if self.0.count() > 0 {
            record.redacted(self.0.count(), &self.0.found().collect::<Vec<_>>());
        }
        reported
    }
}

/// The words in the names of fields with a digest of the body as the origin sent it (RFC 9530, older ones, and those of
/// storage services).
const DIGEST_WORDS: [&str; 8] = ["checksum", "crc", "digest", "fnv", "hash", "integrity", "sha", "siphash"];
/// The names of algorithms, which some write with a hyphen.
const DIGEST_ALGORITHMS: [&str; 15] = [
    "adler32", "b3sum", "blake2", "blake3", "crc32", "crc64", "fnv1", "md5", "murmur3", "sha1", "sha256", "sha384",
    "sha512", "xxh32", "xxh64",
];
/// The beginnings of the names of others.
const DIGEST_PREFIXES: [&str; 2] = ["x-bz-content-", "x-checksum"];
/// The digest by which clients of registries identify a manifest. It names what they asked for.
const KEPT_DIGEST: &str = "docker-content-digest";

/// Removes the digests of the body. A digest of a body with a value, beside the redacted body, would let a client guess
/// the value without asking again.
fn remove_digests(headers: &mut HeaderMap) {
    let is_digest = |name: &str| {
        let has_word = || name.split(['-', '_']).any(|word| DIGEST_WORDS.contains(&word));
        let has_algorithm = || {
            // Every one of them has a digit.
            let joined = name.bytes().any(|byte| byte.is_ascii_digit()).then(|| name.replace(['-', '_'], ""));
            joined.is_some_and(|name| DIGEST_ALGORITHMS.iter().any(|algorithm| name.contains(algorithm)))
        };
        let has_prefix = || DIGEST_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        name != KEPT_DIGEST && (has_word() || has_prefix() || has_algorithm())
    };
    let digests: Vec<HeaderName> = headers.keys().filter(|name| is_digest(name.as_str())).cloned().collect();
    for name in digests {
        headers.remove(name);
    }
}

/// Removes the fields that describe only the encoded body (RFC 9110 §8.4, §8.8.3; RFC 9530).
fn remove_coding_fields(headers: &mut HeaderMap) {
    remove_digests(headers);
    for name in [CONTENT_ENCODING, CONTENT_LENGTH] {
        headers.remove(name);
    }
    // The decoded body is equivalent, but not byte-for-byte identical.
    if let Some(tag) = headers.get(ETAG).filter(|tag| tag.as_bytes().first() == Some(&b'"'))
        && let Ok(weak) = HeaderValue::from_bytes(&[b"W/", tag.as_bytes()].concat())
    {
        headers.insert(ETAG, weak);
    }
}

/// Overwrites values in header fields, and removes fields whose names contain a value.
fn redact_fields(headers: &mut HeaderMap, redactor: &mut Redactor) {
    let named: Vec<HeaderName> = headers.keys().filter(|name| redactor.check_name(name.as_str())).cloned().collect();
    for name in named {
        headers.remove(name);
    }
    for value in headers.values_mut() {
        let redacted = redactor.redact_text(value.as_bytes()).map(Bytes::from);
        if let Some(Ok(redacted)) = redacted.map(HeaderValue::from_maybe_shared) {
            *value = redacted;
        }
    }
}

impl RedactedBody {
    /// Counts the bytes received from the origin.
    pub(crate) fn count(&mut self, counts: Arc<TransferCounts>) {
        if let Some(guard) = &mut self.guard {
            guard.slice = WorkSlice::of(counts.clone(), ScanDirection::Response);
        }
        self.inner.counts = Some(counts);
    }

    /// Reads an encoded body until the decoder has produced output, so that a body that does not match its coding is
    /// detected before the head is sent. Does not wait for an origin that sends nothing, or nothing that decodes to
    /// data.
    ///
    /// # Errors
    /// The error that ended the body before any output.
    pub(crate) async fn await_output(&mut self) -> Result<(), BodyError> {
        let first = poll_fn(|cx| match self.poll_output(cx) {
            Poll::Pending if self.has_received() => Poll::Ready(None),
            begun => begun.map(Some),
        });
        match timeout(FIRST_BYTES_TIMEOUT, first).await {
            Err(_) => Ok(()),
            Ok(Some(begun)) => begun,
            Ok(None) => timeout(MORE_BYTES_TIMEOUT, poll_fn(|cx| self.poll_output(cx))).await.unwrap_or(Ok(())),
        }
    }

    /// Returns true if the body has to be decoded.
    pub(crate) fn is_coded(&self) -> bool {
        self.guard.as_ref().is_some_and(|guard| guard.decoder.is_some())
    }

    /// Returns the number of bytes decoded from the body, or `None` if it is not delivered in blocks. Of such bodies, the
    /// caller may not learn the encoded size. If the body is not read to its end, only the delivered bytes count, because
    /// how many more have been decoded depends on the encoded size.
    pub(crate) fn decoded_size(&self) -> Option<u64> {
        let guard = self.guard.as_ref().filter(|guard| guard.is_in_blocks())?;
        Some(if guard.ended { guard.decoded } else { guard.delivered })
    }

    fn has_received(&self) -> bool {
        self.guard.as_ref().is_some_and(|guard| guard.received > 0)
    }

    /// Returns ready once there is output, or the body has ended without any.
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        let Some(guard) = &mut self.guard else { return Poll::Ready(Ok(())) };
        loop {
            if guard.ended {
                let broken = guard.last.take_if(|last| last.is_err());
                return Poll::Ready(broken.map_or(Ok(()), |broken| broken.map(drop)));
            }
            let enough = guard.redactor.held() > 0 || (guard.received >= MAX_WITHOUT_OUTPUT && !guard.has_work());
            if guard.decoder.is_none() || enough {
                return Poll::Ready(Ok(()));
            }
            if guard.slice.must_yield() {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            match guard.step(&mut self.inner, cx) {
                Poll::Ready(()) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Returns the redactor that has processed the head, to continue with the bytes after it.
    pub(crate) fn into_redactor(self) -> Option<Redactor> {
        self.guard.map(|guard| guard.redactor)
    }

    /// Returns the number of finds. With `is_over`, includes those that count only if the stream ends here.
    pub(crate) fn finds(&self, is_over: bool) -> FindCount {
        self.guard.as_ref().map_or_else(FindCount::default, |guard| guard.redactor.find_count(is_over))
    }

    /// Returns the number of redactions and the owners of the redacted values, or `None` without redactions.
    pub(crate) fn found(&self) -> Option<(u64, Vec<Vec<&ValueOwner>>)> {
        let redactor = &self.guard.as_ref()?.redactor;
        (redactor.count() > 0).then(|| (redactor.count(), redactor.found().collect()))
    }
}

impl Redaction {
    /// Returns whether the body is delivered in blocks of a fixed size: it is encoded, and its origin may know a value.
    /// How well the value compresses beside a text of the caller tells whether they have a part in common. Pieces that end
    /// where an encoded piece ended would show that.
    fn is_in_blocks(&self) -> bool {
        self.decodes && self.may_be_known
    }

    /// Returns redacted data that may be delivered.
    fn output(&mut self) -> Option<Bytes> {
        if !self.is_in_blocks() {
            return self.redactor.take();
        }
        // A step decodes a bounded number of bytes, so the redactor releases no more than that.
        while let Some(data) = self.redactor.take() {
            self.block.extend_from_slice(&data);
        }
        let length = if self.ended { self.block.len().min(BLOCK) } else { BLOCK };
        if length == 0 || length > self.block.len() {
            return None;
        }
        self.delivered = self.delivered.saturating_add(length as u64);
        Some(self.block.split_to(length).freeze())
    }

    /// Returns data that was held back, because the origin pauses.
    fn output_at_pause(&mut self) -> Option<Bytes> {
        if self.is_in_blocks() {
            return None;
        }
        self.redactor.pause();
        self.redactor.take()
    }

    fn take(&mut self, data: Bytes) {
        self.received = self.received.saturating_add(data.len() as u64);
        self.slice.count_bytes(data.len());
        self.waiting = data;
    }

    fn has_work(&self) -> bool {
        self.more || !self.waiting.is_empty() || self.trailers.is_some()
    }

    /// Returns the number of bytes that are delivered as they were received, and have not been yet. A coded body has
    /// other bytes.
    fn held(&self) -> usize {
        let waiting = if self.decoder.is_some() { 0 } else { self.waiting.len() };
        self.undelivered().saturating_add(waiting)
    }

    /// Returns the number of scanned bytes that have not been delivered.
    fn undelivered(&self) -> usize {
        self.redactor.held().saturating_add(self.block.len())
    }

    /// Decodes and scans a portion or the trailers, or polls for the next frame.
    fn step(&mut self, inner: &mut CountedBody, cx: &mut Context<'_>) -> Poll<()> {
        if self.has_work() {
            let _permit = ready!(self.limit.poll_acquire(cx));
            let mut slice = std::mem::take(&mut self.slice);
            slice.run(|| self.work());
            self.slice = slice;
        } else {
            let frame = ready!(inner.poll_frame(cx));
            self.pauses.data_arrived();
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.take(data),
                Some(Ok(Err(frame))) => match frame.into_trailers() {
                    Ok(trailers) => self.trailers = Some(trailers),
                    Err(_) => self.finish(None),
                },
                Some(Err(error)) => self.finish(Some(Err(error))),
                None => self.finish(None),
            }
        }
        // A body of known length may not return another frame after its last byte.
        if !self.ended && !self.has_work() && inner.body.is_end_stream() {
            self.finish(None);
        }
        Poll::Ready(())
    }

    /// Decodes and scans a portion, or the trailers after all data.
    fn work(&mut self) {
        if let Some(mut trailers) = self.trailers.take() {
            if self.may_be_known {
                remove_digests(&mut trailers);
            }
            redact_fields(&mut trailers, &mut self.redactor);
            return self.finish(Some(Ok(Frame::trailers(trailers))));
        }
        let Some(decoder) = &mut self.decoder else {
            let portion = self.waiting.split_to(PORTION.min(self.waiting.len()));
            return self.redactor.feed(portion);
        };
        let (mut coded, mut text) = (&*self.waiting, Vec::new());
        match decoder.decode(&mut coded, &mut text) {
            Ok(more) => {
                self.more = more;
                let taken = self.waiting.len().saturating_sub(coded.len());
                self.waiting.advance(taken);
                self.decoded = self.decoded.saturating_add(text.len() as u64);
                self.redactor.feed(text.into());
            }
            Err(why) => self.finish(Some(Err(BodyError::Unread(why)))),
        }
    }

    /// Ends the body: the origin has sent everything, or failed.
    fn finish(&mut self, last: Option<Result<Frame<Bytes>, BodyError>>) {
        let cut = self.decoder.take().and_then(|decoder| decoder.end().err());
        self.last = match (last, cut) {
            (Some(Err(error)), _) => Some(Err(error)),
            (_, Some(why)) => Some(Err(BodyError::Unread(why))),
            (last, None) => last,
        };
        (self.waiting, self.trailers, self.more, self.ended) = (Bytes::new(), None, false, true);
        self.redactor.end();
    }
}

impl Body for RedactedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Some(guard) = &mut this.guard else {
            return this.inner.poll_frame(cx);
        };
        loop {
            if let Some(data) = guard.output() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if guard.ended {
                return Poll::Ready(guard.last.take());
            }
            if guard.slice.must_yield() {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            // Before the body is asked for data: what arrives afterwards is no part of a pause.
            let is_drained = guard.pauses.is_drained();
            if guard.step(&mut this.inner, cx).is_pending() {
                if guard.has_work() || guard.redactor.held() == 0 {
                    // The data waits to be scanned, or there is none to release.
                    return Poll::Pending;
                }
                if !is_drained {
                    ready!(guard.pauses.poll_drained(cx));
                    continue;
                }
                let Some(data) = guard.output_at_pause() else { return Poll::Pending };
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.guard {
            None => self.inner.body.is_end_stream(),
            Some(guard) if guard.ended => guard.last.is_none() && guard.undelivered() == 0,
            Some(guard) => self.inner.body.is_end_stream() && guard.undelivered() == 0 && !guard.has_work(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.guard {
            None => self.inner.body.size_hint(),
            Some(guard) if guard.decoder.is_some() && !self.is_end_stream() => SizeHint::new(),
            Some(guard) => add_held(self.inner.body.size_hint(), guard.held() as u64),
        }
    }
}
