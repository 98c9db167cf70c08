//! Values in requests with whitespace that origins ignore, and in lists of numbers that end at a pause.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exeat::leak::strength::Strength;
use exeat::leak::{Holdback, Matcher, Value, ValueOwner};
use http::Request;
use http_body_util::Full;
use tokio::io::AsyncWriteExt;

use super::Field;
use super::forms::{contains, encode};
use super::road::{Ask, Payload, Way, chunk, frame};

const SHORT: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb";
/// In a URL without a password, only the whole value is searched for.
const URL: &str = "https://hooks.slack.com/services/T01ABCDEF23/B04GHIJKL56/k7Qz2mXv9LpW4sVt6eRRu8Yb";

/// Returns a value as lists of numbers, without a closing delimiter.
pub fn lists(value: &str) -> Vec<String> {
    let join = |write: &dyn Fn(u8) -> String, between: &str| value.bytes().map(write).collect::<Vec<_>>().join(between);
    vec![
        join(&|byte| byte.to_string(), ","),
        join(&|byte| format!("{byte:02x}"), "-"),
        join(&|byte| format!("0x{byte:02x}"), ", "),
    ]
}

/// Whitespace before a media type: HTTP/2 keeps it, and HTTP/1.1 treats it as the whitespace after the colon. The
/// origin reads the type, and therefore decodes the messages.
#[tokio::test(flavor = "multi_thread")]
async fn whitespace_before_a_media_type_hides_no_compressed_message() {
    let field = Field::holding(&[("KEY", SHORT)]).await;
    let message = encode("gzip", format!("{{\"k\":\"{SHORT}\"}}").as_bytes());
    let mut body = vec![1];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend(&message);
    let mut passed = Vec::new();
    for (name, origin) in [("HTTP/1.1", &field.origins.h1), ("HTTP/2", &field.origins.h2)] {
        let to = format!("api.test:{}", origin.port);
        for (kind, coding) in
            [("application/connect+json", "connect-content-encoding"), ("application/grpc+json", "grpc-encoding")]
        {
            for blank in ["", " ", "\t"] {
                let mut sender = field.lab.h2(&to).await;
                let request = Request::post(format!("https://{to}/cell/one"))
                    .header("content-type", format!("{blank}{kind}"))
                    .header(coding, "gzip")
                    .body(Full::new(Bytes::from(body.clone())))
                    .unwrap();
                let status = sender.send_request(request).await.map_or(0, |answer| answer.status().as_u16());
                let arrived = origin.arrived("one").unwrap_or_default();
                if status == 200 && contains(&arrived.body, &message) {
                    passed.push((name, blank, arrived.fields.get("content-type").cloned()));
                }
            }
        }
    }
    assert!(passed.is_empty(), "the origin got the message with: {passed:#?}");
}

/// The whole value has arrived, and the sender pauses directly after its last digit.
#[test]
fn a_whole_value_in_a_list_of_numbers_does_not_leave_at_a_pause() {
    let mut left = Vec::new();
    for value in [SHORT, URL, "U9&pYb`w(^#Z!"] {
        let strength = Strength::of(value.as_bytes());
        assert!(strength.is_strong(), "{value}");
        let value_of = Value::new(ValueOwner::Token, value.as_bytes()).with_halves(strength);
        let matcher = Arc::new(Matcher::new(std::iter::once(value_of)));
        for list in lists(value) {
            let mut hold = Holdback::new(matcher.clone());
            let fed = hold.feed(Bytes::from(format!("[{list}"))).and_then(|()| hold.pause());
            if fed.is_ok() && std::iter::from_fn(|| hold.take()).flatten().count() > list.len() {
                left.push((value, list));
            }
        }
    }
    assert!(left.is_empty(), "{left:#?}");
}

/// The same against the daemon.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_value_in_a_list_of_numbers_does_not_reach_the_origin_at_a_pause() {
    let field = Field::holding(&[("KEY", URL)]).await;
    let mut left = Vec::new();
    for way in Way::H1 {
        for (n, list) in lists(URL).into_iter().enumerate() {
            let key = format!("list{n}");
            let mut stream = field.wire(way).await;
            let mut bytes = field.head(way, "POST", &key, &Ask::default());
            bytes.extend(b"Transfer-Encoding: chunked\r\n\r\n");
            bytes.extend(chunk(format!("[{list}").as_bytes()));
            stream.write_all(&bytes).await.unwrap();
            stream.flush().await.unwrap();
            tokio::time::sleep(Duration::from_millis(700)).await;
            let arrived = field.origin(way).arrived(&key).unwrap_or_default().body;
            if contains(&arrived, list.as_bytes()) {
                left.push((way, String::from_utf8(arrived).unwrap()));
            }
        }
    }
    assert!(left.is_empty(), "{left:#?}");
}

/// Whitespace around field values: HTTP/2 keeps it, and in HTTP/1.1 it is not part of the value. Adjacent fields, and a
/// body with its trailers, are scanned as one text.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_two_fields_with_ignored_whitespace() {
    let field = Field::holding(&[("KEY", SHORT)]).await;
    let to = format!("api.test:{}", field.origins.h1.port);
    let (one, two) = SHORT.split_at(11);
    let mut passed = Vec::new();
    let parts = [(format!("{one} "), two.to_owned()), (one.to_owned(), format!("\t{two}"))];
    for (n, (one, two)) in parts.iter().enumerate() {
        for (m, names) in [["x-a", "x-b"], ["x-a", "x-a"]].iter().enumerate() {
            let key = format!("two{n}{m}");
            let mut sender = field.lab.h2(&to).await;
            let request = Request::get(format!("https://{to}/cell/{key}"))
                .header(names[0], one.as_str())
                .header(names[1], two.as_str())
                .body(Full::new(Bytes::new()))
                .unwrap();
            let status = sender.send_request(request).await.map_or(0, |answer| answer.status().as_u16());
            let fields = field.origins.h1.arrived(&key).unwrap_or_default().fields;
            let got: Vec<u8> = fields
                .iter()
                .filter(|(name, _)| *name == names[0] || *name == names[1])
                .flat_map(|(_, value)| value.as_bytes().to_vec())
                .collect();
            if status == 200 && got == SHORT.as_bytes() {
                passed.push((names, one, two));
            }
        }
    }
    assert!(passed.is_empty(), "the origin got the value in fields that stand side by side: {passed:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_a_body_and_a_trailer_with_leading_whitespace() {
    let field = Field::holding(&[("KEY", SHORT)]).await;
    let to = format!("api.test:{}", field.origins.h1.port);
    let (one, two) = SHORT.split_at(11);
    let mut sender = field.lab.h2(&to).await;
    let trailers = [(http::HeaderName::from_static("x-t"), http::HeaderValue::from_str(&format!(" {two}")).unwrap())];
    let frames = [
        http_body::Frame::data(Bytes::from(one.to_owned())),
        http_body::Frame::trailers(trailers.into_iter().collect()),
    ];
    let frames = frames.map(Ok::<_, std::convert::Infallible>);
    let body = http_body_util::StreamBody::new(futures_util::stream::iter(frames));
    let request = Request::post(format!("https://{to}/cell/trailer")).body(body).unwrap();
    let status = sender.send_request(request).await.map_or(0, |answer| answer.status().as_u16());
    let arrived = field.origins.h1.arrived("trailer").unwrap_or_default();
    assert_ne!((status, arrived.body), (200, SHORT.as_bytes().to_vec()), "the origin got it");
}

/// Cookies as servers parse them: without the surrounding whitespace and without quotes.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_two_cookies_with_whitespace_or_quotes() {
    let field = Field::holding(&[("KEY", SHORT)]).await;
    let (one, two) = SHORT.split_at(11);
    let mut passed = Vec::new();
    for way in Way::ALL {
        for cookies in [
            format!("a={one};b={two}"),
            format!("a={one}; b={two}"),
            format!("a={one} ; b={two}"),
            format!("a={one}; b= {two}"),
            format!("a={one}; {two}"),
            format!("a=\"{one}\"; b=\"{two}\""),
        ] {
            let fields = vec![("cookie".into(), cookies.clone().into_bytes())];
            let answer = field.road(way).send("cookies", &Ask { fields, ..Ask::default() }).await;
            if answer.status == 200 {
                passed.push((way, cookies));
            }
        }
    }
    assert!(passed.is_empty(), "{passed:#?}");
}

/// A message that consists of the list alone: its end is the end of the last number.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_value_in_a_list_of_numbers_does_not_leave_as_a_message() {
    let field = Field::holding(&[("KEY", URL)]).await;
    let mut left = Vec::new();
    for way in Way::H1 {
        for (n, list) in lists(URL).into_iter().enumerate() {
            let key = format!("message{n}");
            let (mut stream, _) = field.socket(way, &key).await;
            stream.write_all(&frame(1, true, list.as_bytes())).await.unwrap();
            stream.flush().await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            let arrived = field.origin(way).arrived(&key).unwrap_or_default().body;
            if contains(&arrived, list.as_bytes()) {
                left.push((way, list));
            }
        }
    }
    let list = &lists(URL)[0];
    let head = [&[0][..], &u32::try_from(list.len()).unwrap().to_be_bytes()].concat();
    for way in Way::ALL {
        let name = if way == Way::TunnelH2 { "content-type" } else { "Content-Type" };
        let fields = vec![(name.into(), "application/grpc".into())];
        // Another message follows, and a number in it ends the list elsewhere.
        let body = [&head[..], list.as_bytes(), &[0, 0, 0, 0, 1], b"1"].concat();
        let ask = Ask { fields, payload: Payload::Known(body), ..Ask::default() };
        if field.road(way).send("grpc", &ask).await.status == 200 {
            left.push((way, "gRPC".into()));
        }
    }
    assert!(left.is_empty(), "{left:#?}");
}

/// A value with a dot, percent-encoded in part, as the name of a field.
#[tokio::test(flavor = "multi_thread")]
async fn a_value_with_a_dot_does_not_pass_percent_encoded_in_the_name_of_a_field() {
    let value = "SG.k7Qz2mXv9LpW4sVt6eRRu8";
    let field = Field::holding(&[("KEY", value)]).await;
    let escaped: String = value
        .chars()
        .enumerate()
        .map(|(n, c)| if n % 5 == 1 { format!("%{:02X}", u32::from(c)) } else { c.into() })
        .collect();
    let mut passed = Vec::new();
    for way in Way::ALL {
        for name in [value.to_owned(), escaped.clone()] {
            let name = format!("x-{}", name.to_ascii_lowercase());
            let ask = Ask { fields: vec![(name.clone().into_bytes(), "1".into())], ..Ask::default() };
            if field.road(way).send("name", &ask).await.status == 200 {
                passed.push((way, name));
            }
        }
    }
    assert!(passed.is_empty(), "{passed:#?}");
}

/// The first half ends within a character beyond ASCII.
#[test]
fn half_of_a_long_value_that_ends_within_a_character_does_not_leave_at_a_pause() {
    let value = "k7Qz2mXv9LpW4sVt6€Ru8YbwN3cHd5JfTg";
    let strength = Strength::of(value.as_bytes());
    let value_of = Value::new(ValueOwner::Token, value.as_bytes()).with_halves(strength);
    let matcher = Arc::new(Matcher::new(std::iter::once(value_of)));
    let half = value.len().div_ceil(2);
    let mut hold = Holdback::new(matcher);
    let fed = hold.feed(Bytes::copy_from_slice(&value.as_bytes()[..half])).and_then(|()| hold.pause());
    let left = std::iter::from_fn(|| hold.take()).flatten().count();
    assert!(fed.is_err() && left == 0, "{left} of {half} bytes of the first half have left");
}
