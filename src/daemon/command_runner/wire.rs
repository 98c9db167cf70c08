//! The messages between the daemon and the process that runs commands, over a socket pair.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use zeroize::Zeroizing;

/// The longest output of a command, in bytes.
pub(super) const MAX_OUTPUT: usize = 64 * 1024;
/// The longest list of commands, in bytes.
pub(super) const MAX_LIST: usize = 16 * 1024 * 1024;

/// A request to run a command of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunRequest {
    pub(super) id: u32,
    /// The command's place in the list.
    pub(super) command: u32,
}

/// The result of a command.
pub(super) struct RunResult {
    pub(super) id: u32,
    /// The output, or why there is none.
    pub(super) output: Result<Zeroizing<Vec<u8>>, String>,
}

impl RunRequest {
    pub(super) async fn write(self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let mut bytes = [0; 8];
        let (id, command) = bytes.split_at_mut(4);
        id.copy_from_slice(&self.id.to_be_bytes());
        command.copy_from_slice(&self.command.to_be_bytes());
        to.write_all(&bytes).await
    }

    /// Reads a request. `None` at the end of the stream.
    pub(super) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let id = match from.read_u32().await {
            Ok(id) => id,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(Some(Self { id, command: from.read_u32().await? }))
    }
}

impl RunResult {
    pub(super) async fn write(&self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let (is_output, bytes) = match &self.output {
            Ok(output) => (1, output.as_slice()),
            Err(why) => (0, why.as_bytes()),
        };
        let bytes = bytes.get(..MAX_OUTPUT).unwrap_or(bytes);
        to.write_u32(self.id).await?;
        to.write_u8(is_output).await?;
        to.write_u32(u32::try_from(bytes.len()).unwrap_or_default()).await?;
        to.write_all(bytes).await
    }

    pub(super) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        let (id, is_output, length) = (from.read_u32().await?, from.read_u8().await?, from.read_u32().await?);
        let length = usize::try_from(length).ok().filter(|length| *length <= MAX_OUTPUT);
        let mut bytes = Zeroizing::new(vec![0; length.ok_or(io::ErrorKind::InvalidData)?]);
        from.read_exact(&mut bytes).await?;
        let output = match is_output {
            0 => Err(String::from_utf8_lossy(&bytes).into_owned()),
            _ => Ok(bytes),
        };
        Ok(Self { id, output })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        let request = RunRequest { id: 7, command: 65_536 };
        request.write(&mut bytes).await.unwrap();
        assert_eq!(RunRequest::read(&mut bytes.as_slice()).await.unwrap(), Some(request));
        assert!(RunRequest::read(&mut &bytes[..6]).await.is_err());
        assert_eq!(RunRequest::read(&mut &[][..]).await.unwrap(), None);
        for output in [Ok(Zeroizing::new(b"a\n\0".to_vec())), Err("exit status 1".to_owned())] {
            let mut bytes = Vec::new();
            RunResult { id: 9, output: output.clone() }.write(&mut bytes).await.unwrap();
            let read = RunResult::read(&mut bytes.as_slice()).await.unwrap();
            assert_eq!((read.id, read.output), (9, output));
        }
        let too_long = [0, 0, 0, 1, 1, 0, 1, 0, 1];
        assert!(RunResult::read(&mut too_long.as_slice()).await.is_err());
    }
}
