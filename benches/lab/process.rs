//! What a started daemon needs: files, ports and names.

use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Writes a file that only its owner can read.
pub(crate) fn private(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Creates the state directory of exeat in `dir`, with the interception CA that is in `ca_dir`.
pub(crate) fn create_state(dir: &Path, ca_dir: &Path) {
    fs::create_dir(dir.join("state")).unwrap();
    fs::set_permissions(dir.join("state"), fs::Permissions::from_mode(0o700)).unwrap();
    for name in ["ca.pem", "ca-key.pem"] {
        private(&dir.join("state").join(name), &fs::read_to_string(ca_dir.join(name)).unwrap());
    }
}

/// Mixes the bits of a number, so that consecutive numbers give unrelated results.
pub(crate) fn mixed(n: u64) -> u64 {
    let mixed = (n ^ 0x5851_f42d_4c95_7f2d).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ mixed >> 32
}

/// Answers every query for an IPv4 address with 127.0.0.1, and all others with no record.
pub(crate) fn serve_dns() -> u16 {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut query = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut query) {
            // The question ends with the type and the class (RFC 1035 §4.1.2).
            let Some(end) = query[12..length].iter().position(|byte| *byte == 0).map(|at| 12 + at + 5) else {
                continue;
            };
            let is_ipv4 = query[end - 4..end - 2] == [0, 1];
            let mut answer = query[..end].to_vec();
            answer[2..12].copy_from_slice(&[0x84, 0, 0, 1, 0, u8::from(is_ipv4), 0, 0, 0, 0]);
            if is_ipv4 {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0x0e, 0x10, 0, 4, 127, 0, 0, 1]);
            }
            let _ = socket.send_to(&answer, from);
        }
    });
    port
}
