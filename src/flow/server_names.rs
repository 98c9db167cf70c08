//! Checks the server name of the second `ClientHello` in an opaque tunnel, which follows a HelloRetryRequest.

use std::borrow::Cow;
use std::io;
use std::sync::OnceLock;

use super::io::Filter;
use crate::model::refusal::{Deny, Refusal};
use crate::stages::authorize::Admitted;
use crate::stages::sni;
use crate::tls::hello::NotTls;
use crate::tls::hello_retry::{Answer, ClientRecords, Progress, ServerRecords};

/// The state that the filters of both directions share.
pub(super) struct ServerNames<'a> {
    admitted: &'a Admitted,
    answer: OnceLock<Answer>,
    refusal: OnceLock<Refusal>,
}

impl<'a> ServerNames<'a> {
    pub(super) fn new(admitted: &'a Admitted) -> Self {
        Self { admitted, answer: OnceLock::new(), refusal: OnceLock::new() }
    }

    /// Returns the filters for the bytes of the client and for those of the origin.
    pub(super) fn filters(&self) -> (UpFilter<'_>, DownFilter<'_>) {
        let up = UpFilter { names: self, records: ClientRecords::default() };
        (up, DownFilter { names: self, records: ServerRecords::default() })
    }

    /// Returns the refusal for which a filter ended the tunnel.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        self.refusal.get().copied()
    }

    fn refuse(&self, refusal: Refusal) -> io::Error {
        let _ = self.refusal.set(refusal);
        io::ErrorKind::InvalidData.into()
    }
}

/// The filter for the bytes of the client.
pub(super) struct UpFilter<'a> {
    names: &'a ServerNames<'a>,
    records: ClientRecords,
}

impl Filter for UpFilter<'_> {
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        match self.records.read(bytes, self.names.answer.get().copied()) {
            Ok(Progress::Pass) => Ok(Cow::Borrowed(bytes)),
            Ok(Progress::Held) => Ok(Cow::Borrowed(&[])),
            Ok(Progress::Second(hello, held)) => match sni::check(self.names.admitted, &hello) {
                Ok(()) => Ok(Cow::Owned(held)),
                Err(refusal) => Err(self.names.refuse(refusal)),
            },
            Err(NotTls) => Err(self.names.refuse(Deny::NotTls.into())),
        }
    }
}

/// The filter for the bytes of the origin.
pub(super) struct DownFilter<'a> {
    names: &'a ServerNames<'a>,
    records: ServerRecords,
}

impl Filter for DownFilter<'_> {
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        // The client gets these bytes afterwards, so the answer is known before the client can react to it.
        if self.names.answer.get().is_none()
            && let Some(answer) = self.records.read(bytes)
        {
            let _ = self.names.answer.set(answer);
        }
        Ok(Cow::Borrowed(bytes))
    }
}
