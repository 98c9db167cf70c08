//! A sandbox that guesses, with its own origin, its own bodies and any clock. The bytes that leave, and their timing,
//! must reveal nothing before the guess is a whole value, or half of one at the end of the sent bytes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use exeat::leak::{Holdback, Matcher, ValueOwner};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::lab::client::auth;
use crate::lab::{self, LabBuilder, TIMEOUT};

const VALUE: &str = "ghp_7q2zt9lmx4vbn8kcyw3pdf6sjg1haeroutk5";

fn matcher() -> Arc<Matcher> {
    let whose = ValueOwner::Credential(exeat::model::name::CredentialName::new("KEY"));
    Arc::new(Matcher::new([(whose, VALUE.as_bytes())].into_iter()))
}

/// An action of a sender.
#[derive(Clone, Debug)]
enum Step {
    Junk(usize),
    /// Sends this many bytes of the guess.
    Guess(usize),
    /// Sends this many bytes of the guess, followed by junk.
    Missed(usize),
    Pause,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let half = VALUE.len() / 2;
    let step = prop_oneof![
        (0_usize..9_000).prop_map(Step::Junk),
        (0..half).prop_map(Step::Guess),
        (0..VALUE.len()).prop_map(Step::Missed),
        Just(Step::Pause),
    ];
    // A guess that continues where another ended could grow to half of the value, so junk separates them.
    proptest::collection::vec(step, 1..12)
        .prop_map(|steps| steps.into_iter().flat_map(|step| [step, Step::Junk(1)]).collect())
}

/// Returns, for each step, how many bytes of the body have left.
fn left(steps: &[Step], guess: &str) -> Vec<usize> {
    let mut hold = Holdback::new(matcher());
    let mut sum = 0;
    let feed = |hold: &mut Holdback, text: &[u8]| hold.feed(Bytes::copy_from_slice(text)).unwrap();
    let seen = steps.iter().map(|step| {
        match step {
            Step::Junk(n) => feed(&mut hold, &vec![b'#'; *n]),
            Step::Guess(n) => feed(&mut hold, &guess.as_bytes()[..*n]),
            Step::Missed(n) => {
                feed(&mut hold, &guess.as_bytes()[..*n]);
                feed(&mut hold, b"#");
            }
            Step::Pause => hold.pause().unwrap(),
        }
        hold.release_beyond_lag().unwrap();
        while let Some(piece) = hold.take() {
            sum += piece.len();
        }
        sum
    });
    seen.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    /// Thousands of tries: for a right and a wrong guess, the same bytes leave after each step.
    #[test]
    fn bytes_and_timing_do_not_reveal_how_much_of_a_guess_is_right(steps in steps()) {
        let wrong: String = VALUE.chars().map(|c| if c == 'z' { 'a' } else { char::from(c as u8 ^ 1) }).collect();
        prop_assert_eq!(left(&steps, VALUE), left(&steps, &wrong));
    }
}

/// One try: the bytes that the origin had received when the sender paused, the time that they took, and the answer.
struct Seen {
    at_pause: usize,
    after: Duration,
    answer: String,
}

async fn attempt(lab: &lab::Lab, listener: &TcpListener, guess: &str) -> Seen {
    let port = listener.local_addr().unwrap().port();
    let mut client = lab.connect().await;
    let head = format!(
        "POST http://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\nTransfer-Encoding: chunked\r\n\r\n",
        auth()
    );
    let body = format!("{}{guess}", "#".repeat(10_000));
    client.write_all(format!("{head}{:x}\r\n{body}\r\n", body.len()).as_bytes()).await.unwrap();
    let start = Instant::now();
    let (mut origin, _) = listener.accept().await.unwrap();
    // All of it arrives, however much of the guess is right, because the sender pauses.
    let mut got = Vec::new();
    while got.iter().filter(|byte| **byte == b'#').count() < 10_000 || !String::from_utf8_lossy(&got).contains(guess) {
        let n =
            tokio::time::timeout(TIMEOUT, origin.read_buf(&mut got)).await.expect("the bytes are released").unwrap();
        assert!(n > 0, "the stream continues");
    }
    let (at_pause, after) = (got.len(), start.elapsed());
    client.write_all(b"1\r\n#\r\n0\r\n\r\n").await.unwrap();
    while !got.ends_with(b"0\r\n\r\n") {
        assert!(origin.read_buf(&mut got).await.unwrap() > 0);
    }
    origin.write_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    while !answer.contains("\r\n\r\n") {
        let mut buffer = [0; 1024];
        let n = client.read(&mut buffer).await.unwrap();
        answer.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    let answer = answer.lines().next().unwrap_or_default().to_owned();
    Seen { at_pause, after, answer }
}

/// The same over the network, with a clock.
#[tokio::test(flavor = "multi_thread")]
async fn an_origin_with_a_clock_learns_nothing_from_a_guess() {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), VALUE).unwrap();
    builder.dns.set("api.test", &["127.0.0.1"]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nplain_http = true\n[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"api.test\"]\n[tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
    );
    let lab = builder.proxy(&text).await;
    let wrong = "hhq_1032547698badcfehgjilknmporqtsvuxwzy";
    let (mut right_times, mut wrong_times) = (Vec::new(), Vec::new());
    for round in 0..3 {
        for n in (0..VALUE.len() / 2).step_by(3) {
            // Alternately, so that the load of the machine affects both.
            let right = attempt(&lab, &listener, &VALUE[..n]).await;
            let other = attempt(&lab, &listener, &wrong[..n]).await;
            assert_eq!((right.at_pause, &right.answer), (other.at_pause, &other.answer), "{n}, round {round}");
            assert!(right.answer.contains(" 204 "), "{}", right.answer);
            right_times.push(right.after);
            wrong_times.push(other.after);
        }
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let (right, wrong) = (median(&mut right_times), median(&mut wrong_times));
    println!("median until all had left: right guesses {right:?}, wrong ones {wrong:?}");
    assert!(right.abs_diff(wrong) < Duration::from_millis(20), "{right:?} {wrong:?}");
}
