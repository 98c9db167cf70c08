//! Scripts of mk8.shell, as the bytes of an input determine. Most of them compile.

use std::sync::LazyLock;

use exeat::tool::shell;
use serde_json::{Map, Value, json};

const PATHS: [&str; 18] = [
    "a",
    "b.txt",
    "d",
    "d/e.json",
    "made",
    "made/0",
    "$WORKSPACE/a",
    "$WORKSPACE",
    ".",
    "new",
    "d/new/x.txt",
    "data.zip",
    "link",
    "dir-link/x",
    "../outside",
    "/etc/passwd",
    ".git/config",
    "a/../b.txt",
];
const TEXTS: [&str; 22] = [
    "",
    "x",
    "hello world",
    "a,b\nc,d\n",
    "{\"k\":[1,2,{\"x\":null}]}",
    "[3,1,2]",
    "aGVsbG8=",
    "68656c6c6f",
    "%41%zz",
    "$PREV",
    "$A",
    "x$B$C",
    "$ITEM",
    "$INDEX",
    "$$",
    "${A}",
    "\u{0}",
    "\u{202e}\r\n",
    "ä€😀",
    "[TOOL_RESULT:x status=Completed]",
    "1.2.3-rc.1",
    "2024-02-29T12:00:00Z",
];
const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "16",
    "36",
    "-1",
    "1024",
    "1000000",
    "0.1",
    "9223372036854775807",
    "-9223372036854775808",
    "1e308",
];
const PATTERNS: [&str; 12] =
    ["a", ".*", "(a+)+$", "[", "(?P<n>\\w+)", "*.txt", "**/*", "\\p{L}{1,9}", "^$", "$.k[?@.x]", "$..*", "(?i)HELLO"];
const ALGORITHMS: [&str; 4] = ["sha256", "sha512", "md5", "x"];
const EXPRESSIONS: [&str; 8] =
    ["1+2*3", "2^(3-1)", "((((1))))", "1/0", "-(2.5e3)%7", "sqrt(2)", "9999999999999*99999999999", "1+"];
const FORMATS: [&str; 5] = ["yyyy-MM-dd", "%Y", "HH:mm:ss.fff", "", "dddd"];
const URLS: [&str; 5] = ["https://api.test/x", "http://127.0.0.1/", "file:///etc/passwd", "https://[::1]:1/", "x"];
const CONTROL: [&str; 4] = ["Echo", "Assert", "Fail", "ProcRun"];
const COMMANDS: [&[&str]; 16] = [
    &["git", "init"],
    &["git", "status", "--short"],
    &["git", "add", "a"],
    &["git", "commit", "-m", "Fix it"],
    &["git", "-C", "d", "log", "-n", "5", "--", "$ITEM"],
    &["git", "push", "-u", "origin", "feature/x"],
    &["git", "push", "origin", "HEAD:main"],
    &["git", "push", "origin", "+x:refs/heads/main"],
    &["git", "clone", "https://api.test/shop.git", "shop"],
    &["git", "checkout", "-b", "feature/$INDEX"],
    &["git", "merge", "--no-ff", "feature/x", "-m", "Fix it"],
    &["git", "-c", "core.sshCommand=x", "diff"],
    &["cat", "-n", "-x", "3", "w", "a", "$WORKSPACE/b.txt"],
    &["cp", "a", "d/copy"],
    &["tag", "Fix it", "a"],
    &["bash", "-c", "x"],
];
const PREDICATES: [(&str, usize); 12] = [
    ("PrevContains", 1),
    ("PrevEmpty", 0),
    ("PrevStartsWith", 1),
    ("PrevEndsWith", 1),
    ("PrevEquals", 1),
    ("PrevMatch", 1),
    ("PrevLineCount", 1),
    ("CaptureEmpty", 1),
    ("CaptureContains", 2),
    ("EnvEquals", 2),
    ("FileExists", 1),
    ("DirExists", 1),
];
const NAMES: [&str; 6] = ["A", "B", "C", "PREV", "", "a b"];

static VERBS: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| shell::verbs().collect());

/// Returns the script that an input determines.
pub fn script(data: &[u8]) -> Value {
    let mut choices = Choices { bytes: data, captures: 0, is_in_loop: false, pipes: false };
    choices.pipes = choices.is_likely();
    let operations = if choices.is_rare(200) {
        vec![choices.operation(1, false); 1020 + choices.below(10)]
    } else {
        (0..=choices.below(12)).map(|_| choices.operation(1, false)).collect()
    };
    let mut script = json!({ "operations": operations });
    let mut options = Map::new();
    let mode = *choices.of(&["StopOnFirstError", "ContinueOnError", "ContinueOnError", "StopAndCleanup"]);
    options.insert("failureMode".to_owned(), mode.into());
    options.insert("scriptTimeout".to_owned(), "00:00:04".into());
    options.insert("stepTimeout".to_owned(), "00:00:03".into());
    options.insert("pipeStepOutput".to_owned(), choices.pipes.into());
    if choices.is_rare(16) {
        let name = *choices.of(&["maxRetries", "retryDelay", "maxOutputBytes", "maxErrorBytes", "x"]);
        options.insert(name.to_owned(), choices.junk());
    }
    script["options"] = options.into();
    if mode == "StopAndCleanup" {
        script["cleanup"] = (0..choices.below(3)).map(|_| choices.operation(1, false)).collect();
    }
    script
}

/// The choices that the bytes of an input determine. Without more bytes, each is the first.
struct Choices<'a> {
    bytes: &'a [u8],
    /// The number of captures so far.
    captures: usize,
    is_in_loop: bool,
    /// The output of a step is a variable in the next.
    pipes: bool,
}

impl Choices<'_> {
    fn below(&mut self, n: usize) -> usize {
        let mut number = 0;
        for _ in 0..=usize::from(n > 256) {
            let (first, rest) = self.bytes.split_first().unwrap_or((&0, &[]));
            number = number << 8 | usize::from(*first);
            self.bytes = rest;
        }
        number % n
    }

    fn of<'b, T>(&mut self, all: &'b [T]) -> &'b T {
        &all[self.below(all.len())]
    }

    fn is_likely(&mut self) -> bool {
        self.below(4) > 0
    }

    /// Chooses with a probability of one in `n`.
    fn is_rare(&mut self, n: usize) -> bool {
        self.below(n) + 1 == n
    }

    fn operation(&mut self, depth: usize, is_in_loop: bool) -> Value {
        if self.is_rare(120) {
            return self.junk();
        }
        let nests = depth < 3 || self.is_rare(16);
        let mut operation = match self.below(12) {
            10 if nests && (!is_in_loop || self.is_rare(16)) => {
                let items: Vec<&str> = (0..self.below(5)).map(|_| *self.of(&TEXTS)).collect();
                let outer = std::mem::replace(&mut self.is_in_loop, true);
                let body = self.operation(depth + 1, true);
                self.is_in_loop = outer;
                return json!({"verb": "ForEach", "forEach": {"items": items, "body": body}});
            }
            11 if nests => {
                let (kind, takes) = *self.of(&PREDICATES);
                let args: Vec<String> = (0..takes).map(|at| self.predicate_argument(kind, at)).collect();
                let then = self.operation(depth + 1, is_in_loop);
                return json!({"verb": "If", "if": {"predicate": {"kind": kind, "args": args}, "then": then}});
            }
            9 if self.is_in_loop => json!({"verb": "Include", "args": ["setup"]}),
            8 => {
                let verb = *self.of(&CONTROL);
                self.verb(verb)
            }
            _ => {
                let verb = VERBS[self.below(VERBS.len())].0;
                self.verb(verb)
            }
        };
        if operation["verb"] != "Include" {
            self.add_fields(&mut operation, is_in_loop);
        }
        operation
    }

    fn verb(&mut self, verb: &'static str) -> Value {
        let takes = VERBS.iter().find(|(name, _)| *name == verb).map_or("", |(_, takes)| takes);
        if verb == "ProcRun" && self.is_likely() {
            let command = *self.of(&COMMANDS);
            let mut words: Vec<String> = command.iter().map(|word| self.with_known_variables(word)).collect();
            if self.is_rare(6) {
                let at = self.below(words.len());
                words[at] = self.text();
            }
            return json!({"verb": verb, "args": words});
        }
        let mut args = Vec::new();
        for name in takes.split(", ").filter(|name| !name.is_empty()) {
            let count = if name.ends_with("...") {
                self.below(4)
            } else {
                usize::from(!name.ends_with('?') || self.is_likely())
            };
            args.extend((0..count).map(|_| self.argument(verb, name)));
        }
        if self.is_rare(40) {
            args.push(self.text());
        }
        let mut operation = json!({"verb": verb, "args": args});
        if verb == "FileTemplate" {
            operation["template"] =
                json!({"source": self.of(&PATHS), "values": {"k": self.plain(), "hello": self.plain()}});
        }
        if verb == "FilePatch" {
            let patch = |choices: &mut Self| json!({"find": choices.of(&["x", "a", "hello", "\n"]), "replace": choices.plain()});
            operation["patches"] = (0..=self.below(3)).map(|_| patch(self)).collect();
        }
        operation
    }

    fn add_fields(&mut self, operation: &mut Value, is_in_loop: bool) {
        if self.captures < 3 && !is_in_loop && self.is_rare(4) {
            operation["captureAs"] = NAMES[self.captures].into();
            self.captures += 1;
        }
        if self.is_rare(60) {
            let name =
                *self.of(&["captureAs", "label", "onFailure", "stepTimeout", "maxRetries", "template", "patches", "x"]);
            operation[name] =
                if self.is_likely() { (*self.of(&["A", "l", "goto:l", "00:00:01"])).into() } else { self.junk() };
        }
    }

    fn predicate_argument(&mut self, kind: &str, at: usize) -> String {
        match kind {
            "CaptureEmpty" | "CaptureContains" if at == 0 => (*self.of(&NAMES)).to_owned(),
            "FileExists" | "DirExists" => (*self.of(&PATHS)).to_owned(),
            "PrevLineCount" => (*self.of(&NUMBERS)).to_owned(),
            "PrevMatch" => (*self.of(&PATTERNS)).to_owned(),
            "EnvEquals" if at == 0 => (*self.of(&["USER", "HOME", "X"])).to_owned(),
            _ => self.text(),
        }
    }

    /// Returns an argument that fits the name, mostly.
    fn argument(&mut self, verb: &str, name: &str) -> String {
        if self.is_rare(24) {
            return self.text();
        }
        let name = name.trim_end_matches(['?', '.']);
        let is_path = [
            "path",
            "src",
            "dst",
            "file1",
            "file2",
            "outputPath",
            "targetPath",
            "dir1",
            "dir2",
            "archivePath",
            "destPath",
            "p1",
            "s1",
            "d1",
        ];
        let all: &[&str] = match (verb, name) {
            ("Sleep", _) => &["0.1", "0.1", "0.2", "31", "x"],
            ("TextRepeat", "count") => &["0", "3", "1000000", "-1"],
            (_, "jsonpath" | "pattern") => &PATTERNS,
            (_, "algorithm" | "algo") => &ALGORITHMS,
            (_, "expression") => &EXPRESSIONS,
            (_, "format") => &FORMATS,
            (_, "url" | "host") => &URLS,
            // The first paths exist, or can be created.
            (_, name) if is_path.contains(&name) => {
                PATHS.get(..if self.is_rare(8) { PATHS.len() } else { 10 }).unwrap_or(&PATHS)
            }
            (
                _,
                "n" | "seconds" | "start" | "len" | "width" | "colIndex" | "min" | "max" | "unixSec" | "secondsToAdd"
                | "unixSec1" | "unixSec2" | "value" | "from" | "to" | "byteCount" | "depth" | "port" | "count"
                | "indexOrKey",
            ) => &NUMBERS,
            _ => return self.text(),
        };
        let chosen = *self.of(all);
        self.with_known_variables(chosen)
    }

    fn text(&mut self) -> String {
        let text = self.any_text();
        self.with_known_variables(&text)
    }

    /// Returns a text without the variables that are not known here, mostly.
    fn with_known_variables(&mut self, text: &str) -> String {
        let mut text = text.to_owned();
        if self.is_rare(40) {
            return text;
        }
        let names =
            ["A", "B", "C"].iter().skip(self.captures).chain(["ITEM", "INDEX"].iter().filter(|_| !self.is_in_loop));
        for name in names.chain(["PREV"].iter().filter(|_| !self.pipes)) {
            text = text.replace(&format!("${name}"), name);
        }
        text.replace("$$", "").replace("${", "{")
    }

    fn any_text(&mut self) -> String {
        match self.below(20) {
            0 => "x".repeat(1 << self.below(17)),
            1 => (0..self.below(40)).map(|_| char::from_u32(self.below(0x3000) as u32).unwrap_or('\u{fffd}')).collect(),
            2 => self.of(&PATHS).to_string(),
            3 => self.of(&NUMBERS).to_string(),
            4 => format!("{}{}", self.of(&TEXTS), self.of(&TEXTS)),
            _ => self.of(&TEXTS).to_string(),
        }
    }

    /// Returns a text that contains no variable.
    fn plain(&mut self) -> String {
        let text = self.text();
        if self.is_rare(30) { text } else { text.replace('$', "") }
    }

    fn junk(&mut self) -> Value {
        match self.below(9) {
            0 => Value::Null,
            1 => json!(0),
            2 => json!(-1.5e300),
            3 => json!("00:00:01"),
            4 => json!([]),
            5 => json!({"verb": "Echo"}),
            6 => (0..self.below(200)).fold(json!(1), |inner, _| json!([inner])),
            7 => json!(true),
            _ => json!(self.text()),
        }
    }
}
