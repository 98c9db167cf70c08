//! The summary that `exeat run` prints at its end, from the lines of its audit log.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::advice::{self, allow_flag};
use super::terminal::{COLUMNS, clean, indented};
use crate::audit::line::{Event, Line, LineVerdict, Misplaced, PlaceholderPlace};
use crate::model::host::Host;
use crate::policy::pattern::HostPattern;

/// The number of refusals of a host from which a client is assumed to repeat its requests.
const MANY_REFUSALS: usize = 3;
/// The only reason in the network of an isolated command for which it is not known.
const WRONG_PASSWORD: &str = "a program sent a password of its own; the proxy asks for none here";
/// The most rows of refusals, and the most names that were only looked up.
const MAX_ROWS: usize = 100;
const MAX_NAMES: usize = 10;
/// The columns before the host of a row.
const INDENT: usize = 9;

/// The flags of the command line that the summary depends on.
pub(super) struct Flags<'a> {
    pub(super) learned: bool,
    pub(super) isolated: bool,
    /// The names of the keys given by `--credential`.
    pub(super) keys: &'a [String],
    /// The hosts given by `--deny`, whose refusals are not listed.
    pub(super) denied: &'a [HostPattern],
}

/// Returns the lines of the summary: the numbers of allowed and refused requests, and for each refusal its reason and what
/// would help.
pub(super) fn summary(log: &str, flags: &Flags<'_>) -> Vec<String> {
    let all: Vec<Line> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let (quiet, lines): (Vec<Line>, Vec<Line>) = all.into_iter().partition(|line| is_quiet(line, flags.denied));
    let failed: HashSet<&str> = lines.iter().filter(|line| line.code.is_some()).map(|line| line.id.as_str()).collect();
    let is_passed = |line: &&Line| line.event == Event::Decided && !failed.contains(line.id.as_str());
    let passed = lines.iter().filter(is_passed).count();
    let refused = refusals(&lines, flags.isolated);
    let count: usize = refused.values().sum();
    let silenced = if quiet.is_empty() { String::new() } else { format!("; {} to hosts of --deny", quiet.len()) };
    let mut out = vec![format!("exeat: {passed} allowed, {count} refused or failed{silenced}")];
    let used = used_keys(&lines);
    out.extend(used.iter().map(|((name, host), count)| format!("  {count:>4} × {name} sent to {}", clean(host))));
    out.extend(refused.iter().take(MAX_ROWS).map(|(refusal, count)| {
        let Refusal { place, code, advice } = refusal;
        beside_or_below(&format!("  {count:>4} × {place:<32} {code:<20}"), advice, INDENT)
    }));
    if let Some(more) = refused.len().checked_sub(MAX_ROWS).filter(|more| *more > 0) {
        out.push(format!("       … and {more} more kinds; --audit-log FILE keeps all"));
    }
    out.extend(misplaced(&lines).into_iter().chain(leaks(&lines)).map(|advice| indented(&advice, 2)));
    out.extend(aborted_handshakes(&lines));
    let is_sent = |key: &&String| used.keys().any(|(name, _)| name == *key);
    let is_empty = passed == 0 && count == 0 && quiet.is_empty() && !lines.iter().any(is_client_tls_abort);
    let looked_up = if flags.isolated { only_looked_up(&lines) } else { BTreeSet::new() };
    if !looked_up.is_empty() {
        out.push(indented(
            &format!(
                "exeat: looked up, but nothing was sent at a port that is captured: {}; --allow HOST:PORT captures others",
                looked_up.iter().map(|name| clean(name)).collect::<Vec<_>>().join(", ")
            ),
            0,
        ));
    }
    if is_empty && looked_up.is_empty() {
        out.push(nothing_came(flags.isolated).to_owned());
    } else if !is_empty {
        out.extend(
            flags.keys.iter().filter(|key| !is_sent(key)).map(|key| format!("  {key} was not sent to any host")),
        );
    }
    out.extend(often_refused(&refused));
    out.extend(advice::without_network(&lines).filter(|_| passed == 0).map(str::to_owned));
    out.extend(needed_flags(&lines).filter(|_| flags.learned));
    out
}

fn is_quiet(line: &Line, denied: &[HostPattern]) -> bool {
    let host = || Host::parse(line.host.as_deref()?).ok();
    line.code.as_deref() == Some("host_not_allowed")
        && host().is_some_and(|host| denied.iter().any(|pattern| pattern.matches(&host)))
}

/// Returns the names that the command has looked up, without a request to them.
fn only_looked_up(lines: &[Line]) -> BTreeSet<&str> {
    let is_query = |line: &&Line| line.tool.as_deref() == Some("dns");
    let names =
        lines.iter().filter(is_query).filter(|line| line.code.is_none()).filter_map(|line| line.host.as_deref());
    let reached: BTreeSet<&str> =
        lines.iter().filter(|line| !is_query(line)).filter_map(|line| line.host.as_deref()).collect();
    names.filter(|name| !reached.contains(name)).take(MAX_NAMES).collect()
}

fn nothing_came(isolated: bool) -> &'static str {
    if isolated {
        "exeat: nothing came through the proxy, which is the command's only way out"
    } else {
        "exeat: nothing came through the proxy. If the command uses the network, it ignores HTTPS_PROXY, as Node before 22.21 \
         does; --isolate leaves it no other way"
    }
}

/// Refusals of one kind.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Refusal {
    /// The host and port.
    place: String,
    code: String,
    /// The reason, and the flag that would have allowed them or would help, if there is one.
    advice: String,
}

fn refusals(lines: &[Line], isolated: bool) -> BTreeMap<Refusal, usize> {
    let mut refused: BTreeMap<Refusal, usize> = BTreeMap::new();
    let mut add = |refusal: Refusal, more: usize| {
        let count = refused.entry(refusal).or_default();
        *count = count.saturating_add(more);
    };
    for line in lines {
        let code = line.code.as_deref().unwrap_or_default();
        if !code.is_empty() && !is_auth_challenge(line, lines) {
            let advice = match code {
                "caller_unknown" if isolated => WRONG_PASSWORD.to_owned(),
                _ => advice::of(line, code),
            };
            add(Refusal { place: place(line), code: code.to_owned(), advice }, 1);
        }
    }
    for (code, more) in lines.iter().flat_map(|line| &line.codes) {
        let refusal = Refusal { place: "(too many to list)".to_owned(), code: code.to_string(), advice: String::new() };
        add(refusal, usize::try_from(*more).unwrap_or(usize::MAX));
    }
    refused
}

/// Counts the requests with each key, by host. A key is known to be sent only if an origin has responded.
fn used_keys(lines: &[Line]) -> BTreeMap<(&str, &str), usize> {
    let mut used: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for line in lines.iter().filter(|line| line.event == Event::Closed && line.response_status.is_some()) {
        let names = line.credential_used.iter().chain(&line.credentials_beside);
        for (name, host) in names.filter_map(|name| Some((name.as_str(), line.host.as_deref()?))) {
            let count = used.entry((name, host)).or_default();
            *count = count.saturating_add(1);
        }
    }
    used
}

/// Says where placeholders were that were not replaced, and what to write, once for each place.
fn misplaced(lines: &[Line]) -> BTreeSet<String> {
    let of = |line: &Line| {
        let PlaceholderPlace { credential, place, reason } = line.placeholder.as_ref()?;
        let (place, host) = (clean(place), line.host.as_deref().map(clean)?);
        let port = line.port.filter(|port| *port != 443).map(|port| format!(":{port}")).unwrap_or_default();
        let to_do = match reason {
            Misplaced::OtherPlace if ["header:", "query:", "cookie:"].iter().any(|known| place.starts_with(known)) => {
                format!(": write --credential {credential}@{host}{port}, or {credential}={place}@{host}{port}")
            }
            _ => String::new(),
        };
        Some(format!("the placeholder of {credential} was in {place}, {}, for {host}{port}{to_do}", reason.text()))
    };
    lines.iter().filter_map(of).collect()
}

/// Says where keys were that were stopped, once for each place.
fn leaks(lines: &[Line]) -> BTreeSet<String> {
    let leaks = lines.iter().filter(|line| line.code.as_deref() == Some("leak_detected"));
    leaks.filter_map(|line| Some(format!("{}, for {}", clean(line.rule.as_deref()?), place(line)))).collect()
}

fn aborted_handshakes(lines: &[Line]) -> impl Iterator<Item = String> {
    let mut aborted: BTreeMap<String, usize> = BTreeMap::new();
    for line in lines.iter().filter(|line| is_client_tls_abort(line)) {
        let count = aborted.entry(place(line)).or_default();
        *count = count.saturating_add(1);
    }
    let told = |(place, count): (String, usize)| {
        let why = "TLS aborted by the command: does it trust $SSL_CERT_FILE?";
        beside_or_below(&format!("  {count:>4} × {place:<32}"), why, INDENT)
    };
    aborted.into_iter().map(told)
}

/// Returns the flags for all hosts that were refused often. Clients repeat such requests, and each costs them time.
fn often_refused(refused: &BTreeMap<Refusal, usize>) -> Option<String> {
    let often =
        refused.iter().filter(|(refusal, count)| refusal.code == "host_not_allowed" && **count >= MANY_REFUSALS);
    let allow: BTreeSet<&str> =
        often.map(|(refusal, _)| refusal.advice.as_str()).filter(|advice| advice.starts_with("--allow ")).collect();
    let hosts = allow.iter().filter_map(|flag| flag.rsplit([' ', '/']).next()?.split(':').next());
    let deny: BTreeSet<String> = hosts.map(|host| format!("--deny {host}")).collect();
    let joined = |flags: Vec<&str>| flags.join(" ");
    (!allow.is_empty()).then(|| {
        let (allow, deny) = (joined(allow.into_iter().collect()), joined(deny.iter().map(String::as_str).collect()));
        format!("exeat: refused often; to allow: {allow}; to refuse without a word: {deny}")
    })
}

/// Returns the flags that would have allowed what `--learn` let through.
fn needed_flags(lines: &[Line]) -> impl Iterator<Item = String> {
    let observed = |line: &Line| {
        let code = line.rule.as_deref()?.strip_prefix("observe:")?;
        (line.event == Event::Decided).then(|| allow_flag(line, code))?
    };
    let flags: BTreeSet<String> = lines.iter().filter_map(observed).collect();
    let all = flags.into_iter().collect::<Vec<_>>().join(" ");
    let told = [
        format!("exeat: without --learn, the command would need: {all}"),
        "exeat: for methods and paths too, add --audit-log FILE, then run exeat audit learn FILE".to_owned(),
    ];
    told.into_iter().filter(move |_| !all.is_empty())
}

/// Returns the host and port of a request, as far as they are known.
fn place(line: &Line) -> String {
    if line.code.as_deref() == Some("rate_limited") && line.tool.as_deref() == Some("dns") {
        return "(DNS queries)".to_owned();
    }
    let port = line.port.map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}{port}", line.host.as_deref().map_or("-".to_owned(), clean))
}

/// Whether a client first sent a request without the password and then repeated it with the password, on the same
/// connection. git does this, and it is not a failure.
fn is_auth_challenge(line: &Line, lines: &[Line]) -> bool {
    line.code.as_deref() == Some("caller_unknown")
        && lines.iter().any(|other| other.peer == line.peer && other.task.is_some())
}

/// Whether a client aborted the handshake. It probably does not trust the CA; nothing has been refused.
fn is_client_tls_abort(line: &Line) -> bool {
    line.verdict == Some(LineVerdict::Abandoned)
        && line.rule.as_deref().is_some_and(|rule| rule.starts_with("client handshake: "))
}

/// Puts a text behind the beginning of a line, or below it, indented by so many columns, if there is no room for it.
fn beside_or_below(beginning: &str, text: &str, indent: usize) -> String {
    let beginning = beginning.trim_end();
    if text.is_empty() {
        return beginning.to_owned();
    }
    if beginning.chars().count().saturating_add(text.chars().count()) < COLUMNS {
        return format!("{beginning} {text}");
    }
    format!("{beginning}\n{}", indented(text, indent))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: &str = "127.0.0.1:1";

    fn told(lines: &[Line], flags: &Flags<'_>) -> String {
        let log: Vec<String> = lines.iter().map(|line| serde_json::to_string(line).unwrap()).collect();
        summary(&log.join("\n"), flags).join("\n")
    }

    fn flags<'a>(keys: &'a [String], denied: &'a [HostPattern]) -> Flags<'a> {
        Flags { learned: false, isolated: false, keys, denied }
    }

    fn refused(host: &str, code: &'static str) -> Line {
        Line {
            event: Event::Refused,
            host: Some(host.to_owned()),
            port: Some(443),
            peer: Some(PEER.to_owned()),
            code: Some(code.into()),
            ..Line::default()
        }
    }

    #[test]
    fn nothing_came_through_the_proxy() {
        let keys = ["KEY".to_owned()];
        let said = told(&[], &flags(&keys, &[]));
        assert!(
            said.starts_with("exeat: 0 allowed, 0 refused or failed\nexeat: nothing came through the proxy."),
            "{said}"
        );
        let isolated = Flags { isolated: true, ..flags(&keys, &[]) };
        assert!(told(&[], &isolated).ends_with("the command's only way out"));
        let aborted =
            Line { verdict: Some(LineVerdict::Abandoned), rule: Some("client handshake: x".into()), ..Line::default() };
        assert!(!told(&[aborted], &flags(&[], &[])).contains("nothing came"));
    }

    #[test]
    fn names_that_were_only_looked_up_are_named() {
        let keys = ["KEY".to_owned()];
        let isolated = || Flags { isolated: true, ..flags(&keys, &[]) };
        let query = |host: &str| Line {
            event: Event::Closed,
            tool: Some("dns".into()),
            host: Some(host.to_owned()),
            ..Line::default()
        };
        let only = told(&[query("api.test")], &isolated());
        assert!(only.contains("at a port that is captured: api.test;") && !only.contains("only way out"), "{only}");
        // With other requests, keys are reported beside it.
        let both = told(&[query("api.test"), refused("b.test", "path_not_allowed")], &isolated());
        assert!(both.contains("captured: api.test;") && both.contains("KEY was not sent to any host"), "{both}");
        let sent = told(&[query("api.test"), refused("api.test", "path_not_allowed")], &isolated());
        assert!(!sent.contains("looked up"), "{sent}");
    }

    #[test]
    fn many_kinds_of_refusals_are_cut_off_and_a_password_is_explained() {
        let lines: Vec<Line> = (0..130).map(|n| refused(&format!("h{n}.test"), "path_not_allowed")).collect();
        let said = told(&lines, &flags(&[], &[]));
        assert!(said.contains("… and 30 more kinds") && said.matches(" × ").count() == MAX_ROWS, "{said}");
        let queries =
            ["a.test", "b.test"].map(|host| Line { tool: Some("dns".into()), ..refused(host, "rate_limited") });
        assert!(told(&queries, &flags(&[], &[])).contains("2 × (DNS queries)"));
        let unknown = [refused("a.test", "caller_unknown")];
        let isolated = Flags { isolated: true, ..flags(&[], &[]) };
        assert!(told(&unknown, &isolated).contains(WRONG_PASSWORD));
        assert!(!told(&unknown, &flags(&[], &[])).contains(WRONG_PASSWORD));
    }

    #[test]
    fn keys_that_were_not_sent_are_named() {
        let keys = ["KEY".to_owned(), "OTHER".to_owned()];
        let closed = Line {
            event: Event::Closed,
            host: Some("api.test".to_owned()),
            credential_used: Some("KEY".to_owned()),
            response_status: Some(200),
            ..Line::default()
        };
        let decided = Line { event: Event::Decided, ..Line::default() };
        let said = told(&[decided, closed], &flags(&keys, &[]));
        assert_eq!(
            said,
            "exeat: 1 allowed, 0 refused or failed\n     1 × KEY sent to api.test\n  OTHER was not sent to any host"
        );
    }

    #[test]
    fn hosts_that_are_refused_often_are_grouped_and_can_be_silenced() {
        let often = |host: &str, count: usize| vec![refused(host, "host_not_allowed"); count];
        let lines =
            [often("b.test", 3), often("a.b.test", 4), often("once.test", 1), vec![refused("b.test", "rate_limited")]]
                .concat();
        let said = told(&lines, &flags(&[], &[]));
        assert!(said.starts_with("exeat: 0 allowed, 9 refused or failed\n"), "{said}");
        let grouped = "exeat: refused often; to allow: --allow a.b.test --allow b.test; to refuse without a word: --deny a.b.test --deny b.test";
        assert!(said.ends_with(grouped), "{said}");
        let denied = [HostPattern::parse_wide("*.b.test").unwrap(), HostPattern::parse_wide("b.test").unwrap()];
        let said = told(&lines, &flags(&[], &denied));
        assert!(said.starts_with("exeat: 0 allowed, 2 refused or failed; 7 to hosts of --deny\n"), "{said}");
        assert!(!said.contains("refused often") && said.contains("rate_limited"), "{said}");
    }

    #[test]
    fn auth_challenges_are_not_failures() {
        let line = |peer: &str, code: Option<&'static str>, task: Option<&str>| Line {
            peer: Some(peer.to_owned()),
            code: code.map(Into::into),
            task: task.map(str::to_owned),
            ..Line::default()
        };
        let lines = [
            line("127.0.0.1:1", Some("caller_unknown"), None),
            line("127.0.0.1:1", None, Some("run")),
            line("127.0.0.1:2", Some("caller_unknown"), None),
            line("127.0.0.1:3", Some("host_not_allowed"), Some("run")),
        ];
        assert_eq!(lines.each_ref().map(|line| is_auth_challenge(line, &lines)), [true, false, false, false]);
    }

    #[test]
    fn only_aborted_client_handshakes_count() {
        let rows = [
            (LineVerdict::Abandoned, "client handshake: received fatal alert: UnknownCA", true),
            (LineVerdict::Abandoned, "client: connection reset", false),
            (LineVerdict::Deny, "client handshake: x", false),
        ];
        for (verdict, rule, want) in rows {
            let line = Line { verdict: Some(verdict), rule: Some(rule.to_owned()), ..Line::default() };
            assert_eq!(is_client_tls_abort(&line), want, "{verdict:?} {rule}");
        }
    }
}
