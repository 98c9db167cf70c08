//! The verbs of mk8.shell in a workspace: each row of `docs/shell.md` is run. `EXEAT_UPDATE_DOCS=1` writes the table.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::lab::page::Page;
use crate::lab::{Lab, LabBuilder};
use crate::tools::front_end::tools;
use crate::tools::turn::GUID;

/// The result of an example: a text, its beginning, or an error that contains a text.
enum Want {
    Is(&'static str),
    Begins(&'static str),
    Fails(&'static str),
}
use Want::{Begins, Fails, Is};

struct Row {
    verb: &'static str,
    takes: &'static str,
    returns: &'static str,
    args: &'static [&'static str],
    want: Want,
}

const fn row(
    verb: &'static str,
    takes: &'static str,
    returns: &'static str,
    args: &'static [&'static str],
    want: Want,
) -> Row {
    Row { verb, takes, returns, args, want }
}

/// The rows, in the order in which they run: a later one sees what an earlier one has written. A row without a second column is another
/// example of the verb before it.
const ROWS: &[Row] = &[
    row(
        "FileWrite",
        "path, content",
        "what was written; the directory must exist",
        &["n.txt", "one\ntwo\nthree"],
        Begins("wrote 13"),
    ),
    row("", "", "", &["no/such/dir.txt", "x"], Fails("create it first")),
    row("FileRead", "path", "the text, if it is UTF-8 and has at most 1 MiB", &["n.txt"], Is("one\ntwo\nthree")),
    row("", "", "", &["missing.txt"], Fails("does not exist")),
    row("", "", "", &["."], Fails("is a directory")),
    row(
        "FileAppend",
        "path, content",
        "what was written; the file may be new",
        &["n.txt", "\nfour"],
        Begins("wrote 5 bytes"),
    ),
    row("FileExists", "path", "`True` or `False`", &["n.txt"], Is("True")),
    row("", "", "", &["missing.txt"], Is("False")),
    row(
        "FileList",
        "path, pattern?",
        "the names of the files in a directory, at most 1000",
        &[".", "n.*"],
        Is("n.txt"),
    ),
    row(
        "FileCopy",
        "src, dst",
        "what was copied; a file of this name is replaced",
        &["n.txt", "copy.txt"],
        Begins("copied 18 bytes"),
    ),
    row(
        "FileMove",
        "src, dst",
        "what was moved; a file of this name is replaced",
        &["copy.txt", "moved.txt"],
        Begins("moved copy.txt"),
    ),
    row("FileInfo", "path", "kind, size, modification time and mode", &["n.txt"], Begins("kind: a file\nsize: 18")),
    row(
        "FileHash",
        "path, algorithm?",
        "the hash in hexadecimal: sha256, sha512 or md5",
        &["n.txt", "md5"],
        Is("d1bb296c1467215052010803c1799597"),
    ),
    row("FileLineCount", "path", "the number of lines", &["n.txt"], Is("4")),
    row("FileHead", "path, n?", "the first lines: 10, or 1 to 1000", &["n.txt", "2"], Is("one\ntwo")),
    row("", "", "", &["n.txt", "0"], Fails("from 1 to 1000")),
    row("FileTail", "path, n?", "the last lines: 10, or 1 to 1000", &["n.txt", "1"], Is("four")),
    row(
        "FileSearch",
        "path, substring",
        "the lines with the text, with their numbers, at most 500",
        &["n.txt", "o"],
        Is("1: one\n2: two\n4: four"),
    ),
    row(
        "FileSearchRegex",
        "path, pattern",
        "the lines that match, with their numbers, at most 500",
        &["n.txt", "^t"],
        Is("2: two\n3: three"),
    ),
    row("", "", "", &["n.txt", "("], Fails("not a regular expression")),
    row(
        "FileGlob",
        "path, pattern",
        "the files beneath it whose name matches, or whose path does if the pattern has a `/`; 10 deep, at most 1000",
        &[".", "*.txt"],
        Is("moved.txt\nn.txt"),
    ),
    row(
        "FileDiff",
        "file1, file2",
        "the lines that are removed and added, at most 500",
        &["n.txt", "moved.txt"],
        Is(""),
    ),
    row("FileMimeType", "path", "the type, by the first bytes", &["n.txt"], Is("text/plain")),
    row("FileEncoding", "path", "the encoding, by the first bytes", &["n.txt"], Is("ascii")),
    row("FileEqual", "file1, file2", "`True` or `False`", &["n.txt", "moved.txt"], Is("True")),
    row("FileChecksum", "path, expected, algo?", "`True` or `False`", &["n.txt", "00"], Is("False")),
    row("", "", "", &["n.txt", "D1BB296C1467215052010803C1799597", "md5"], Is("True")),
    row("FileAge", "path", "seconds since the last change", &["n.txt"], Begins("")),
    row("FileNewerThan", "path, seconds", "`True` or `False`", &["n.txt", "3600"], Is("True")),
    row("FileDelete", "path", "what was deleted", &["moved.txt"], Is("deleted moved.txt")),
    row(
        "FileWriteMany",
        "p1, c1, ...",
        "what was written; at most 64 files",
        &["m1", "x", "m2", "y"],
        Is("wrote 1 bytes to m1\nwrote 1 bytes to m2"),
    ),
    row(
        "FileCopyMany",
        "s1, d1, ...",
        "what was copied; at most 64 files",
        &["m1", "m3"],
        Is("copied 1 bytes from m1 to m3"),
    ),
    row(
        "FileDeleteMany",
        "p1, ...",
        "what was deleted; at most 64 files",
        &["m1", "m2", "m3"],
        Is("deleted m1\ndeleted m2\ndeleted m3"),
    ),
    row("DirCreate", "path", "what was created, with the directories that it is in", &["d/e"], Is("created d/e")),
    row("DirList", "path", "the entries, at most 1000", &["."], Is("d/\nn.txt")),
    row("DirExists", "path", "`True` or `False`", &["d"], Is("True")),
    row(
        "DirTree",
        "path, depth?",
        "the entries beneath it, indented: 3 deep, or 1 to 5",
        &[".", "2"],
        Is("d/\n  e/\nn.txt"),
    ),
    row("DirFileCount", "path, pattern?", "the number of files beneath it", &["."], Is("1")),
    row("DirEmpty", "path", "`True` or `False`", &["d/e"], Is("True")),
    row(
        "DirCompare",
        "dir1, dir2",
        "the names of files that only one has, and those of both",
        &["d", "d/e"],
        Is("only in d: 0\nonly in d/e: 0\nin both: 0"),
    ),
    row("DirHash", "path, algo?", "the hash of each file beneath it, at most 500", &["d"], Is("")),
    row("SysDirSize", "path", "the size of the files beneath it", &["."], Is("18 bytes (18 B)")),
    row("DirDelete", "path", "what was deleted, with everything in it", &["d"], Is("deleted d")),
    row("TextRegex", "input, pattern", "the matches, one a line", &["a1b22", "[0-9]+"], Is("1\n22")),
    row("TextReplace", "input, old, new", "the text with each occurrence replaced", &["aba", "a", "c"], Is("cbc")),
    row("", "", "", &["aba", "", "c"], Fails("not empty")),
    row("TextSplit", "input, delimiter", "the parts, one a line", &["a,b", ","], Is("a\nb")),
    row(
        "TextJoin",
        "delimiter, parts...",
        "1 to 32 parts with the delimiter between them",
        &["-", "a", "b"],
        Is("a-b"),
    ),
    row("TextTrim", "input", "the text without blanks at its ends", &["  a "], Is("a")),
    row("TextLength", "input", "the number of characters", &["aß"], Is("2")),
    row(
        "TextSubstring",
        "input, start, len?",
        "the characters from `start`, which counts from 0",
        &["abcd", "1", "2"],
        Is("bc"),
    ),
    row("", "", "", &["abcd", "9"], Fails("beyond the end")),
    row("TextLines", "input", "the number of lines, and the text", &["a\nb"], Is("2\na\nb")),
    row("TextToUpper", "input", "the text in upper case", &["aß"], Is("ASS")),
    row("TextToLower", "input", "the text in lower case", &["AÄ"], Is("aä")),
    row("TextBase64Encode", "input", "the Base64 of the text", &["a?"], Is("YT8=")),
    row("TextBase64Decode", "input", "the text", &["YT8="], Is("a?")),
    row("", "", "", &["!"], Fails("not the Base64")),
    row("TextUrlEncode", "input", "the percent-encoding of the text (RFC 3986)", &["a b/ä"], Is("a%20b%2F%C3%A4")),
    row("TextUrlDecode", "input", "the text", &["a%20b"], Is("a b")),
    row("", "", "", &["%ff"], Fails("UTF-8")),
    row("TextHtmlEncode", "input", "the text for HTML", &["<a b='1'>&"], Is("&lt;a b=&#39;1&#39;&gt;&amp;")),
    row("TextContains", "input, substr", "`True` or `False`", &["abc", "b"], Is("True")),
    row("TextStartsWith", "input, prefix", "`True` or `False`", &["abc", "b"], Is("False")),
    row("TextEndsWith", "input, suffix", "`True` or `False`", &["abc", "c"], Is("True")),
    row("TextMatch", "input, pattern", "`True` or `False`", &["abc", "^a.c$"], Is("True")),
    row(
        "TextHash",
        "input, algo?",
        "the hash in hexadecimal: sha256, sha512 or md5",
        &["abc", "md5"],
        Is("900150983cd24fb0d6963f7d28e17f72"),
    ),
    row("", "", "", &["abc", "crc32"], Fails("sha256, sha512 or md5")),
    row(
        "TextSort",
        "input, direction?",
        "the lines, sorted: `asc`, `desc` or `numeric`",
        &["10\n9", "numeric"],
        Is("9\n10"),
    ),
    row("TextUniq", "input", "the lines without repetitions of the one before", &["a\na\nb\na"], Is("a\nb\na")),
    row(
        "TextCount",
        "input, pattern?",
        "the number of occurrences of a text, or of lines, words and characters",
        &["aXbX", "X"],
        Is("2"),
    ),
    row("", "", "", &["a b\nc"], Is("lines: 2\nwords: 3\ncharacters: 5")),
    row("TextIndexOf", "input, substr", "the position from 0, or -1", &["äbc", "c"], Is("2")),
    row("TextLastIndexOf", "input, substr", "the position from 0, or -1", &["abab", "b"], Is("3")),
    row("TextRemove", "input, substr", "the text without it", &["abab", "b"], Is("aa")),
    row("TextWordCount", "input", "the number of words", &["a b  c"], Is("3")),
    row("TextReverse", "input", "the characters from the last to the first", &["abc"], Is("cba")),
    row(
        "TextPadLeft",
        "input, width, char?",
        "the text, filled up at its beginning; width to 10000",
        &["7", "3", "0"],
        Is("007"),
    ),
    row("", "", "", &["7", "3", "ab"], Fails("one character")),
    row(
        "TextPadRight",
        "input, width, char?",
        "the text, filled up at its end; width to 10000",
        &["7", "3", "."],
        Is("7.."),
    ),
    row("TextRepeat", "input, count", "the text, repeated to 256 times, and to 1 MiB", &["ab", "3"], Is("ababab")),
    row("", "", "", &["ab", "1000000000"], Fails("from 0 to 256")),
    row(
        "TextRegexGroups",
        "input, pattern",
        "the groups of the first match, as JSON",
        &["k=v", "(?<key>\\w)=(\\w)"],
        Is("{\"0\":\"k=v\",\"2\":\"v\",\"key\":\"k\"}"),
    ),
    row(
        "TextColumn",
        "input, colIndex, delimiter?",
        "a column of each line, from 0; columns end at blanks without a delimiter",
        &["a b\nc d", "1"],
        Is("b\nd"),
    ),
    row(
        "TextTable",
        "input, delimiter?",
        "the columns, aligned; they end at tabs without a delimiter",
        &["a,bb\nccc,d", ","],
        Is("a    bb\nccc  d"),
    ),
    row("JsonParse", "input", "the document, indented", &["{\"a\":1}"], Is("{\n  \"a\": 1\n}")),
    row("", "", "", &["{"], Fails("not JSON")),
    row(
        "JsonQuery",
        "input, jsonpath",
        "the value at a JSONPath (RFC 9535), or an array of several",
        &["{\"a\":[{\"b\":1},{\"b\":2}]}", "$.a[?@.b>1].b"],
        Is("2"),
    ),
    row("", "", "", &["{}", "$.x"], Fails("no value")),
    row("", "", "", &["{}", "x["], Fails("not a JSONPath")),
    row(
        "JsonMerge",
        "json1, json2",
        "an object with the members of both; the second decides",
        &["{\"a\":1,\"b\":1}", "{\"b\":2}"],
        Is("{\"a\":1,\"b\":2}"),
    ),
    row("JsonKeys", "json", "the names of the members, one a line", &["{\"a\":1,\"b\":1}"], Is("a\nb")),
    row("JsonCount", "json", "the number of items or members", &["[1,2]"], Is("2")),
    row("JsonType", "json", "`object`, `array`, `string`, `number`, `boolean` or `null`", &["[]"], Is("array")),
    row(
        "JsonFromPairs",
        "k1, v1, ...",
        "an object of strings; at most 64 pairs",
        &["a", "1", "b", "2"],
        Is("{\"a\":\"1\",\"b\":\"2\"}"),
    ),
    row("", "", "", &["a", "1", "b"], Fails("each key needs a value")),
    row(
        "JsonSet",
        "json, key, value",
        "the object with the member; a value that is no JSON is a string",
        &["{}", "a", "[1]"],
        Is("{\"a\":[1]}"),
    ),
    row("JsonRemoveKey", "json, key", "the object without the member", &["{\"a\":1}", "a"], Is("{}")),
    row("JsonGet", "json, indexOrKey", "a member or an item", &["[\"a\",\"b\"]", "1"], Is("b")),
    row("", "", "", &["[1,2]", "+1"], Fails("no value")),
    row("JsonCompact", "json", "the document without blanks", &["{ \"a\" : 1 }"], Is("{\"a\":1}")),
    row("JsonStringify", "value", "the text as a JSON string", &["a\"b"], Is("\"a\\\"b\"")),
    row("JsonArrayFrom", "items...", "an array of strings; at most 64", &["a", "b"], Is("[\"a\",\"b\"]")),
    row(
        "EnvGet",
        "name",
        "a variable of the sandbox; none with KEY, SECRET, TOKEN or PASSWORD in its name",
        &["HOME"],
        Is("/workspace"),
    ),
    row("", "", "", &["API_KEY"], Fails("no variable of this name")),
    row("EnvList", "", "the variables, one a line", &[], Begins("HOME=/workspace\nHOSTNAME=work")),
    row("SysWhoAmI", "", "the user that runs the script", &[], Begins("")),
    row("SysPwd", "", "the workspace", &[], Is("/workspace")),
    row("SysHostname", "", "the name of the machine", &[], Begins("")),
    row("SysUptime", "", "seconds since the machine started", &[], Begins("")),
    row("SysDate", "", "the time in UTC (RFC 3339)", &[], Begins("20")),
    row("SysDateFormat", "format?", "the time in UTC; fields `y M d H m s f`", &["yyyy"], Begins("20")),
    row("SysTimestamp", "", "seconds since 1970", &[], Begins("1")),
    row("SysOsInfo", "", "the kernel and the architecture", &[], Begins("Linux ")),
    row("SysCpuCount", "", "the number of processors", &[], Begins("")),
    row("SysTempDir", "", "a directory of the workspace: there is no other", &[], Begins("/workspace/tmp")),
    row("SysDiskUsage", "path?", "total, available and used bytes of the file system", &[], Begins("total: ")),
    row("SysMemory", "", "the limit of the sandbox", &[], Begins("limit of this sandbox")),
    row("SysProcessList", "", "that a sandbox sees none", &[], Begins("a sandbox sees no processes")),
    row("ProcessFind", "nameSubstring", "that a sandbox sees none", &["ssh"], Begins("no process")),
    row("SysDriveList", "", "the workspace, with the use of its file system", &[], Begins("/workspace: total: ")),
    row("SysNetInfo", "", "that a sandbox has none", &[], Begins("no interface")),
    row("SysLogRead", "...", "fails: a sandbox sees no logs", &["syslog"], Fails("no logs")),
    row("SysLogSources", "", "that a sandbox sees none", &[], Begins("no source")),
    row("SysServiceList", "", "that a sandbox sees none", &[], Begins("no service")),
    row("SysServiceStatus", "name", "fails: a sandbox sees no services", &["ssh"], Fails("no services")),
    row(
        "PathJoin",
        "parts...",
        "the parts with one `/` between them; at most 16",
        &["a/", "/b", "c.txt"],
        Is("a/b/c.txt"),
    ),
    row("PathDir", "path", "the directory", &["a/b.txt"], Is("a")),
    row("PathFile", "path", "the file name", &["a/b.txt"], Is("b.txt")),
    row("PathExt", "path", "the extension with its dot", &["a/b.tar.gz"], Is(".gz")),
    row("PathStem", "path", "the file name without its extension", &["a/b.tar.gz"], Is("b.tar")),
    row("PathChangeExt", "path, ext", "the path with another extension", &["a/b.txt", "md"], Is("a/b.md")),
    row("GuidNew", "", "a random UUID", &[], Begins("")),
    row("GuidNewShort", "", "eight random hexadecimal digits", &[], Begins("")),
    row("RandomInt", "min, max", "a random number; both are from 0 to 1000000", &["5", "5"], Is("5")),
    row("", "", "", &["5", "4"], Fails("min is not above max")),
    row(
        "TimeFormat",
        "unixSec, format?",
        "the time in UTC; fields `y M d H m s f`",
        &["86400", "yyyy-MM-dd HH:mm"],
        Is("1970-01-02 00:00"),
    ),
    row("", "", "", &["0", "MMM"], Fails("one or two of M")),
    row("TimeParse", "dateStr, format?", "seconds since 1970", &["02.01.1970", "dd.MM.yyyy"], Is("86400")),
    row("", "", "", &["2026-+1-01", "yyyy-M-dd"], Fails("not of this format")),
    row("", "", "", &["2026-01-31T12:00:00Z"], Is("1769860800")),
    row("", "", "", &["tomorrow"], Fails("not a date")),
    row("TimeAdd", "unixSec, secondsToAdd", "the sum", &["86400", "-400"], Is("86000")),
    row("TimeDiff", "unixSec1, unixSec2", "the difference, without a sign", &["1", "3"], Is("2")),
    row("VersionCompare", "ver1, ver2", "`-1`, `0` or `1`", &["v1.9", "1.10.0"], Is("-1")),
    row("VersionParse", "string", "the first version in the text", &["rustc 1.95.0 (x)"], Is("1.95.0")),
    row("", "", "", &["1.2.3.4.5"], Fails("2 to 4 numbers")),
    row("HexEncode", "input", "the bytes of the text in hexadecimal", &["aä"], Is("61c3a4")),
    row("HexDecode", "input", "the text", &["61c3a4"], Is("aä")),
    row("", "", "", &["6"], Fails("hexadecimal")),
    row(
        "BaseConvert",
        "value, from, to",
        "the number to the base 2, 8, 10 or 16; to 2⁶⁴-1",
        &["0xff", "16", "2"],
        Is("11111111"),
    ),
    row("FormatBytes", "byteCount", "the size with a unit", &["1048576"], Is("1.00 MB")),
    row("", "", "", &["1048575"], Is("1.00 MB")),
    row("FormatDuration", "seconds", "the time with units", &["3661"], Is("1h 1m 1s")),
    row("", "", "", &["59.96"], Is("1m 0s")),
    row("", "", "", &["0.15"], Is("150ms")),
    row(
        "MathEval",
        "expression",
        "the value of numbers, `+ - * / %` and parentheses; 256 bytes",
        &["(1 + 2) * -3 / 4 % 2"],
        Is("-0.25"),
    ),
    row("", "", "", &["1 / 10000000000000"], Is("0.0000000000001")),
    row("", "", "", &["0.1 + 0.2"], Is("0.3")),
    row("", "", "", &["99999999 * 99999999 * 9"], Fails("beyond 2^53")),
    row("", "", "", &["2 ** x"], Fails("not an arithmetic expression")),
    row("", "", "", &["1 / 0"], Fails("division by zero")),
    row("ClipboardSet", "text", "the text; no clipboard is changed", &["a"], Is("a")),
    row("Echo", "message", "the text", &["a $5 ${x}"], Is("a $5 ${x}")),
    row("Sleep", "seconds", "nothing but time passes: 0.1 to 30 seconds", &["0.1"], Is("slept 0.1 s")),
    row("", "", "", &["31"], Fails("from 0.1 to 30")),
    row("Assert", "actual, expected, msg?", "`True`, or fails with the message", &["a", "a"], Is("True")),
    row("", "", "", &["a", "b", "not the same"], Fails("not the same")),
    row("Fail", "message", "fails with the message", &["stop"], Fails("stop")),
    row("Mk8Blacklist", "", "the patterns that no argument contains", &[], Begins("rm -rf /")),
    row("Mk8Vocab", "listName", "the words of a list; there are none yet", &["CommitWords"], Fails("no vocabulary")),
    row("Mk8VocabList", "", "the lists", &[], Begins("none")),
    row("Mk8FreeText", "cmd?", "whether free text is permitted", &[], Begins("off")),
    row("Mk8Env", "", "the variables of scripts", &[], Begins("WORKSPACE=/workspace\nCWD=/workspace")),
    row("Mk8Info", "", "the sandbox and the version", &[], Begins("sandbox: work\nworkspace: /workspace")),
    row("Mk8Templates", "", "the command templates", &[], Begins("none")),
    row("Mk8Verbs", "", "the verbs that are served", &[], Begins("FileRead\n")),
    row("Mk8Skills", "", "the verbs with their arguments, and the rules", &[], Begins("Verbs and their arguments")),
    row("Mk8Docs", "", "the same", &[], Begins("Verbs and their arguments")),
];

/// Starts a lab whose task needs no integration.
pub(super) async fn lab() -> Lab {
    LabBuilder::new().await.proxy("[tasks.t]\ntools = [\"http_request\"]\n").await
}

/// Runs a script in the sandbox `work`, and returns its line without the beginning.
pub(super) fn run(lab: &Lab, workspace: &Path, script: &Value) -> String {
    let sandbox = format!("work={}", workspace.display());
    let call = json!({ "resourceId": GUID, "sandboxId": "work", "script": script });
    let message = format!("[TOOL_CALL:1] {call}\n");
    let output = tokio::task::block_in_place(|| tools(lab, &["turn", "--sandbox", &sandbox], &message));
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.strip_prefix("[TOOL_RESULT:1] status=").unwrap_or_else(|| panic!("{text}{:?}", output.stderr));
    line.trim_end_matches('\n').to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_row_of_the_manual_is_true() {
    let lab = lab().await;
    let dir = tempfile::tempdir().unwrap();
    let mut verb = "";
    let mut operations = Vec::new();
    for row in ROWS {
        verb = if row.verb.is_empty() { verb } else { row.verb };
        operations.push(json!({ "verb": verb, "args": row.args }));
    }
    let script = json!({ "operations": operations, "options": { "failureMode": "ContinueOnError" } });
    let line = run(&lab, dir.path(), &script);
    let result = line.strip_prefix("Completed result=").unwrap_or_else(|| panic!("{line}"));
    let all: Vec<Value> = serde_json::from_str(result).unwrap();
    assert_eq!(all.len(), ROWS.len());
    for (row, one) in ROWS.iter().zip(&all) {
        let output = one["output"].as_str();
        let is_right = match row.want {
            Is(want) => output == Some(want),
            Begins(want) => output.is_some_and(|output| output.starts_with(want)),
            Fails(want) => one["error"].as_str().is_some_and(|error| error.contains(want)),
        };
        assert!(is_right, "{} {:?}: {one}", row.verb, row.args);
    }
    Page { path: "docs/shell.md", by: "tests/it/tools/shell_verbs.rs" }.check("verbs", &table());
}

fn table() -> String {
    let mut text = String::from("| verb | arguments | returns |\n| --- | --- | --- |\n");
    for row in ROWS.iter().filter(|row| !row.verb.is_empty()) {
        text.push_str(&format!("| `{}` | {} | {} |\n", row.verb, row.takes, row.returns));
    }
    text
}

/// The rows and the table of the front-end name the same arguments.
#[tokio::test(flavor = "multi_thread")]
async fn the_manual_and_the_front_end_name_the_same_verbs() {
    let lab = lab().await;
    let dir = tempfile::tempdir().unwrap();
    let skills = run(&lab, dir.path(), &json!({ "operations": [{ "verb": "Mk8Skills", "args": [] }] }));
    let known: Vec<&str> = skills.split("\\n").filter(|line| line.contains(" [") && line.ends_with(']')).collect();
    let not_here = [
        "If [",
        "ForEach [",
        "Include [",
        "FileTemplate [",
        "FilePatch [",
        "ArchiveExtract [",
        "Http",
        "Net",
        "OpenUrl",
    ];
    let known = known.into_iter().filter(|line| !not_here.iter().any(|not| line.starts_with(not)));
    let mut known: Vec<String> = known.map(str::to_owned).collect();
    let rows = ROWS.iter().filter(|row| !row.verb.is_empty());
    let mut rows: Vec<String> = rows.map(|row| format!("{} [{}]", row.verb, row.takes)).collect();
    known.sort();
    rows.sort();
    assert_eq!(known, rows);
    let files: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert!(files.is_empty(), "{files:?}");
}
