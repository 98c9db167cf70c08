//! The options of TCP sockets to clients and origins.

#[cfg(target_os = "linux")]
use socket2::SockRef;
use tokio::net::TcpStream;

/// The bytes that the kernel keeps of a connection before it has sent them.
///
/// Without a limit, a connection whose peer does not read holds up to 4 MB of kernel memory (`tcp_wmem`), which no budget
/// of the daemon counts, and holds it for minutes after it has been closed. What has been sent and not been acknowledged
/// is limited by the peer's window, and does not count here, so that long paths are not slower.
#[cfg(target_os = "linux")]
const UNSENT: u32 = 128 * 1024;

/// Sets the options. A socket that does not support them works as well.
pub(crate) fn set(stream: &TcpStream) {
    // Latency matters more than the number of packets.
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT);
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::{Duration, Instant};

    use socket2::{Domain, Socket, Type};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Writes until the socket takes no more, for longer than it takes to send what fits into the peer's window.
    async fn fill(stream: &TcpStream) -> usize {
        let (mut written, mut last) = (0, Instant::now());
        while last.elapsed() < Duration::from_millis(300) {
            match stream.try_write(&[b'x'; 16 * 1024]) {
                Ok(more) => (written, last) = (written + more, Instant::now()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
        written
    }

    /// A peer that has read much, so that the buffers have grown, and then does not read.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_connection_that_is_not_read_holds_little() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut held = Vec::new();
        for is_limited in [true, false] {
            let peer = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            // Fixed, so that only the sender's side grows.
            peer.set_recv_buffer_size(64 * 1024).unwrap();
            peer.connect(&listener.local_addr().unwrap().into()).unwrap();
            peer.set_nonblocking(true).unwrap();
            let mut peer = TcpStream::from_std(peer.into()).unwrap();
            let (mut stream, _) = listener.accept().await.unwrap();
            if is_limited {
                set(&stream);
            }
            let reading = tokio::spawn(async move {
                let mut buffer = vec![0; 1024 * 1024];
                let mut read = 0;
                while read < 64_000_000 {
                    read += peer.read(&mut buffer).await.unwrap();
                }
                peer
            });
            stream.write_all(&vec![b'x'; 64_000_000]).await.unwrap();
            let _peer = reading.await.unwrap();
            held.push(fill(&stream).await);
        }
        assert!(held[0] < 400_000 && held[1] > 2 * held[0], "{held:?}");
    }
}
