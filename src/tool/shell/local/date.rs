//! `Time*` and the dates of `Sys*`, all in UTC.

use time::format_description::well_known::Rfc3339;
use time::{Date, Duration, Month, OffsetDateTime, Time};

use super::{Args, Output, VerbError, failed};

const MAX_FORMAT: usize = 32;
/// The years 1 to 9999.
const SECONDS: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;

pub(super) fn run(verb: &str, args: Args<'_>) -> Option<Output> {
    let seconds = |index, name| args.number(index, name, SECONDS, None);
    Some(match verb {
        "TimeFormat" => seconds(0, "unixSec").and_then(moment).and_then(|moment| formatted(moment, args.optional(1))),
        "TimeParse" => parsed(args.text(0), args.optional(1)).map(|moment| moment.unix_timestamp().to_string()),
        "TimeAdd" => seconds(0, "unixSec").and_then(|from| {
            let sum = from.checked_add(seconds(1, "secondsToAdd")?).filter(|sum| SECONDS.contains(sum));
            sum.map_or_else(|| failed("the sum is out of range"), |sum| Ok(sum.to_string()))
        }),
        "TimeDiff" => seconds(0, "unixSec1").and_then(|a| Ok(a.abs_diff(seconds(1, "unixSec2")?).to_string())),
        "SysDate" => formatted(OffsetDateTime::now_utc(), None),
        "SysDateFormat" => formatted(OffsetDateTime::now_utc(), args.optional(0)),
        "SysTimestamp" => Ok(OffsetDateTime::now_utc().unix_timestamp().to_string()),
        _ => return None,
    })
}

fn moment(seconds: i64) -> Result<OffsetDateTime, VerbError> {
    OffsetDateTime::from_unix_timestamp(seconds).map_err(|_| VerbError::Failed("the time is out of range".to_owned()))
}

/// A part of a format, as in .NET: `yyyy-MM-dd HH:mm:ss`.
enum Part {
    Field(char, usize),
    Text(char),
}

fn parts(format: &str) -> Result<Vec<Part>, VerbError> {
    if format.is_empty() || format.len() > MAX_FORMAT {
        return failed(format!("a format has 1 to {MAX_FORMAT} characters"));
    }
    let mut parts = Vec::new();
    for c in format.chars() {
        match (c, parts.last_mut()) {
            (c, Some(Part::Field(last, count))) if *last == c => *count = count.saturating_add(1),
            ('y' | 'M' | 'd' | 'H' | 'm' | 's' | 'f', _) => parts.push(Part::Field(c, 1)),
            ('-' | '/' | ':' | '.' | ',' | ' ' | '_' | 'T' | 'Z', _) => parts.push(Part::Text(c)),
            _ => return failed("a format has the fields y M d H m s f, and - / : . , _ T Z and blanks"),
        }
    }
    let is_known = |part: &Part| match part {
        Part::Text(_) => true,
        Part::Field('y', width) => matches!(width, 2 | 4),
        Part::Field('f', width) => *width <= 9,
        Part::Field(_, width) => *width <= 2,
    };
    if !parts.iter().all(is_known) {
        return failed("a format has yyyy or yy, one or two of M d H m s, and up to nine f");
    }
    Ok(parts)
}

fn formatted(moment: OffsetDateTime, format: Option<&str>) -> Output {
    let Some(format) = format.filter(|format| *format != "o") else {
        return moment.format(&Rfc3339).map_err(|error| VerbError::Failed(error.to_string()));
    };
    let mut text = String::new();
    for part in parts(format)? {
        match part {
            Part::Text(c) => text.push(c),
            Part::Field('y', 2) => text.push_str(&format!("{:02}", moment.year().rem_euclid(100))),
            Part::Field('f', digits) => {
                let nanoseconds = format!("{:09}", moment.nanosecond());
                text.push_str(nanoseconds.get(..digits.min(9)).unwrap_or_default());
            }
            Part::Field(field, width) => {
                let number = match field {
                    'y' => moment.year().unsigned_abs(),
                    'M' => u32::from(u8::from(moment.month())),
                    'd' => u32::from(moment.day()),
                    'H' => u32::from(moment.hour()),
                    'm' => u32::from(moment.minute()),
                    _ => u32::from(moment.second()),
                };
                text.push_str(&format!("{number:0width$}"));
            }
        }
    }
    Ok(text)
}

/// Parses a date: by a format, or RFC 3339, or `yyyy-MM-dd` with an optional `HH:mm:ss`.
fn parsed(text: &str, format: Option<&str>) -> Result<OffsetDateTime, VerbError> {
    let text = text.trim();
    if let Some(format) = format {
        return by_format(text, format);
    }
    if let Ok(moment) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(moment);
    }
    let usual = ["yyyy-MM-dd", "yyyy-MM-dd HH:mm", "yyyy-MM-dd HH:mm:ss", "yyyy-MM-ddTHH:mm:ss"];
    let found = usual.iter().find_map(|format| by_format(text, format).ok());
    found
        .map_or_else(|| failed("not a date, such as 2026-01-31 or 2026-01-31T12:00:00Z; give its format otherwise"), Ok)
}

fn by_format(text: &str, format: &str) -> Result<OffsetDateTime, VerbError> {
    let wrong = || VerbError::Failed("the date is not of this format".to_owned());
    let (mut year, mut month, mut day, mut hour, mut minute, mut second) = (1970_i32, 1_u8, 1_u8, 0_u8, 0_u8, 0_u8);
    let mut nanoseconds = 0_u32;
    let mut rest = text;
    for part in parts(format)? {
        match part {
            Part::Text(c) => rest = rest.strip_prefix(c).ok_or_else(wrong)?,
            Part::Field(field, width) => {
                let digits = rest.bytes().take(width).take_while(u8::is_ascii_digit).count();
                // A field of one letter may have two digits.
                let more =
                    digits == 1 && rest.as_bytes().get(1).is_some_and(u8::is_ascii_digit) && width == 1 && field != 'f';
                let (number, after) = rest.split_at(if more { 2 } else { digits });
                if number.len() < width {
                    return Err(wrong());
                }
                rest = after;
                if field == 'f' {
                    let padded = format!("{number:0<9}");
                    nanoseconds = padded.get(..9).and_then(|digits| digits.parse().ok()).ok_or_else(wrong)?;
                    continue;
                }
                let value: i32 = number.parse().map_err(|_| wrong())?;
                let small = u8::try_from(value).map_err(|_| wrong());
                match field {
                    'y' => year = if width == 2 { value.saturating_add(2000) } else { value },
                    'M' => month = small?,
                    'd' => day = small?,
                    'H' => hour = small?,
                    'm' => minute = small?,
                    _ => second = small?,
                }
            }
        }
    }
    if !rest.is_empty() {
        return Err(wrong());
    }
    let month = Month::try_from(month).map_err(|_| wrong())?;
    let date = Date::from_calendar_date(year, month, day).map_err(|_| wrong())?;
    let time = Time::from_hms(hour, minute, second).map_err(|_| wrong())?;
    let moment = date.with_time(time).assume_utc().checked_add(Duration::nanoseconds(nanoseconds.into()));
    moment.filter(|moment| SECONDS.contains(&moment.unix_timestamp())).ok_or_else(wrong)
}
