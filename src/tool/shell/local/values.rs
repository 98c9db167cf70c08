//! Identifiers, random numbers, versions, encodings and formats.

use std::cmp::Ordering;

use uuid::{Builder, Uuid};

use super::hash::hex;
use super::{Args, Output, VerbError, failed, pattern};

const MAX_RANDOM: u32 = 1_000_000;

pub(super) fn run(verb: &str, args: Args<'_>) -> Option<Output> {
    let input = args.text(0);
    Some(match verb {
        "GuidNew" => guid().map(|guid| guid.to_string()),
        "GuidNewShort" => guid().map(|guid| guid.simple().to_string().chars().take(8).collect()),
        "RandomInt" => random(args),
        "VersionCompare" => version(input).and_then(|first| {
            Ok(match compared(&first, &version(args.text(1))?) {
                Ordering::Less => "-1",
                Ordering::Equal => "0",
                Ordering::Greater => "1",
            }
            .to_owned())
        }),
        "VersionParse" => version(input),
        "HexEncode" => Ok(hex(input.as_bytes())),
        "HexDecode" => unhex(input),
        "BaseConvert" => converted(args),
        "FormatBytes" => args.number(0, "byteCount", 0..=u64::MAX, None).map(bytes),
        "FormatDuration" => args.number(0, "seconds", 0.0..=1e12, None).map(duration),
        _ => return None,
    })
}

fn random_bytes<const N: usize>() -> Result<[u8; N], VerbError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|_| VerbError::Failed("no random numbers".to_owned()))?;
    Ok(bytes)
}

fn guid() -> Result<Uuid, VerbError> {
    Ok(Builder::from_random_bytes(random_bytes()?).into_uuid())
}

fn random(args: Args<'_>) -> Output {
    let least = args.number(0, "min", 0..=MAX_RANDOM, None)?;
    let most = args.number(1, "max", 0..=MAX_RANDOM, None)?;
    let Some(count) = most.checked_sub(least).and_then(|span| span.checked_add(1)) else {
        return failed("min is not above max");
    };
    // The bias of the remainder is below one in 2^44.
    let random = u64::from_ne_bytes(random_bytes()?).checked_rem(u64::from(count)).unwrap_or_default();
    Ok(u64::from(least).saturating_add(random).to_string())
}

/// Returns the first version in a text.
fn version(text: &str) -> Output {
    let pattern = pattern(r"[0-9]+(\.[0-9]+)+")?;
    let Some(found) = pattern.find(text) else { return failed("no version, such as 1.2 or 1.2.3, is in the text") };
    let parts: Vec<&str> = found.as_str().split('.').collect();
    if parts.len() > 4 || parts.iter().any(|part| part.len() > 9) {
        return failed("a version has 2 to 4 numbers of at most 9 digits");
    }
    Ok(found.as_str().to_owned())
}

/// Compares by numbers. A part that is missing is 0.
fn compared(first: &str, second: &str) -> Ordering {
    let numbers = |text: &str| text.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u64>>();
    let (first, second) = (numbers(first), numbers(second));
    let part = |numbers: &[u64], at: usize| numbers.get(at).copied().unwrap_or(0);
    (0..4).map(|at| part(&first, at).cmp(&part(&second, at))).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
}

fn unhex(text: &str) -> Output {
    let digits = text.trim().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let is_hex = digits.len().is_multiple_of(2) && digits.iter().all(u8::is_ascii_hexdigit);
    let bytes = is_hex.then(|| digits.chunks_exact(2).map(byte).collect::<Option<Vec<u8>>>()).flatten();
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
    text.map_or_else(|| failed("not the hexadecimal form of a UTF-8 text"), Ok)
}

fn converted(args: Args<'_>) -> Output {
    let base = |index, name| {
        let base: u32 = args.number(index, name, 2..=16, None)?;
        if matches!(base, 2 | 8 | 10 | 16) { Ok(base) } else { failed(format!("{name} is 2, 8, 10 or 16")) }
    };
    let (from, to) = (base(1, "from")?, base(2, "to")?);
    let text = args.text(0).trim().to_ascii_lowercase();
    let prefix = match from {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits = text.strip_prefix(prefix).unwrap_or(&text);
    let Some(value) = u64::from_str_radix(digits, from).ok().filter(|_| !digits.starts_with('+')) else {
        return failed(format!("not a number to the base {from} from 0 to {}", u64::MAX));
    };
    Ok(match to {
        2 => format!("{value:b}"),
        8 => format!("{value:o}"),
        16 => format!("{value:x}"),
        _ => value.to_string(),
    })
}

#[expect(clippy::cast_precision_loss, reason = "two decimal places are shown")]
pub(super) fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KB", "MB", "GB", "TB"] {
        // A value that is rounded to 1024.00 is shown with the next unit.
        if value < 1023.995 || (unit == "B" && count < 1024) {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.2} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.2} PB")
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the number is from 0 to 1e12")]
fn duration(seconds: f64) -> String {
    if seconds < 0.9995 {
        return format!("{}ms", (seconds * 1000.0).round().abs());
    }
    if seconds < 59.95 {
        let rounded = (seconds * 10.0).round() / 10.0;
        return format!("{rounded}s");
    }
    let whole = seconds.round() as u64;
    let part = |unit: u64, of: u64| whole.checked_div(unit).and_then(|count| count.checked_rem(of)).unwrap_or_default();
    let (days, hours, minutes) = (whole.checked_div(86_400).unwrap_or_default(), part(3600, 24), part(60, 60));
    let rest = format!("{minutes}m {}s", part(1, 60));
    match (days, hours) {
        (0, 0) => rest,
        (0, hours) => format!("{hours}h {rest}"),
        (days, hours) => format!("{days}d {hours}h {rest}"),
    }
}
