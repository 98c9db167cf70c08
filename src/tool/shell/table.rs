//! The table of all verbs of mk8.shell: their arguments, the part of the program that runs them, and their access to paths.

use super::path::Access;
use crate::tool::verbs::Network;

/// A verb and its arguments. `?` marks an optional one, `...` any number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verb {
    pub(super) name: &'static str,
    /// Its arguments, as documented.
    pub(super) takes: &'static str,
}

impl Verb {
    pub(super) fn named(name: &str) -> Option<Self> {
        let (name, takes) = *ALL.iter().find(|(known, _)| *known == name)?;
        Some(Self { name, takes })
    }

    /// Returns whether it accepts this number of arguments.
    pub(super) fn takes(self, count: usize) -> bool {
        let all: Vec<&str> = self.takes.split(", ").filter(|one| !one.is_empty()).collect();
        let least = all.iter().filter(|one| !one.ends_with(['?', '.'])).count();
        let has_no_end = all.iter().any(|one| one.ends_with("..."));
        count >= least && (has_no_end || count <= all.len())
    }
}

/// The part of the program that runs a verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The compiler: it expands the operation to others.
    Compiler,
    /// The front-end, which knows the sandbox and the time.
    FrontEnd,
    /// The proxy, as a tool call.
    Proxy,
    /// The confined process.
    Sandbox,
    /// A program of the machine, isolated.
    Program,
}

/// Returns the part that runs a verb.
pub(super) fn runs_in(verb: &str) -> Place {
    match verb {
        "ForEach" | "If" | "Include" => Place::Compiler,
        "ProcRun" => Place::Program,
        "Echo" | "Sleep" | "Assert" | "Fail" | "EnvGet" | "EnvList" | "ClipboardSet" | "SysWhoAmI" => Place::FrontEnd,
        _ if verb.starts_with("Mk8") => Place::FrontEnd,
        _ if Network::named(verb).is_some() => Place::Proxy,
        _ => Place::Sandbox,
    }
}

/// Returns the access of a verb, or of a primitive of packs, to the path in this argument, if it is one.
pub(super) fn access(verb: &str, index: usize) -> Option<Access> {
    let is_even = index.is_multiple_of(2);
    match (verb, index) {
        (
            "FileRead" | "FileExists" | "FileInfo" | "FileHash" | "FileLineCount" | "FileHead" | "FileTail"
            | "FileSearch" | "FileSearchRegex" | "FileGlob" | "FileMimeType" | "FileEncoding" | "FileChecksum"
            | "FileAge" | "FileNewerThan" | "FileList" | "DirList" | "DirExists" | "DirTree" | "DirFileCount"
            | "DirEmpty" | "DirHash" | "SysDiskUsage" | "SysDirSize" | "FileCopy" | "ArchiveExtract" | "list_files"
            | "query_json" | "query_sql" | "read_file" | "search_files" | "search_text",
            0,
        )
        | ("FileEqual" | "FileDiff" | "DirCompare", _) => Some(Access::Read),
        ("FileDelete" | "DirCreate" | "DirDelete" | "FileMove", 0) | ("FileDeleteMany", _) => Some(Access::Change),
        ("FileWrite" | "FileAppend" | "FileTemplate" | "FilePatch" | "write_file", 0)
        | ("FileCopy" | "FileMove", 1) => Some(Access::Write),
        // The directory may be the workspace itself; its entries are checked when they are known.
        ("ArchiveExtract", 1) => Some(Access::Read),
        ("FileWriteMany", _) if is_even => Some(Access::Write),
        ("FileCopyMany", _) => Some(if is_even { Access::Read } else { Access::Write }),
        _ => None,
    }
}

/// Returns whether a verb reads or writes files of the workspace.
pub(super) fn is_about_files(verb: &str) -> bool {
    access(verb, 0).is_some()
}

/// Returns all verbs with their arguments.
pub(super) fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    ALL.into_iter()
}

const ALL: [(&str, &str); 159] = [
    // Filesystem
    ("FileRead", "path"),
    ("FileWrite", "path, content"),
    ("FileAppend", "path, content"),
    ("FileDelete", "path"),
    ("FileExists", "path"),
    ("FileList", "path, pattern?"),
    ("FileCopy", "src, dst"),
    ("FileMove", "src, dst"),
    ("FileInfo", "path"),
    ("FileHash", "path, algorithm?"),
    ("FileLineCount", "path"),
    ("FileHead", "path, n?"),
    ("FileTail", "path, n?"),
    ("FileSearch", "path, substring"),
    ("FileSearchRegex", "path, pattern"),
    ("FileGlob", "path, pattern"),
    ("FileDiff", "file1, file2"),
    ("FileMimeType", "path"),
    ("FileEncoding", "path"),
    ("FileEqual", "file1, file2"),
    ("FileChecksum", "path, expected, algo?"),
    ("FileAge", "path"),
    ("FileNewerThan", "path, seconds"),
    ("FileTemplate", "outputPath"),
    ("FilePatch", "targetPath"),
    ("FileWriteMany", "p1, c1, ..."),
    ("FileCopyMany", "s1, d1, ..."),
    ("FileDeleteMany", "p1, ..."),
    // Directories
    ("DirCreate", "path"),
    ("DirDelete", "path"),
    ("DirList", "path"),
    ("DirExists", "path"),
    ("DirTree", "path, depth?"),
    ("DirFileCount", "path, pattern?"),
    ("DirEmpty", "path"),
    ("DirCompare", "dir1, dir2"),
    ("DirHash", "path, algo?"),
    // Process
    ("ProcRun", "binary, ..."),
    ("ProcessFind", "nameSubstring"),
    // HTTP
    ("HttpGet", "url"),
    ("HttpPost", "url, body?"),
    ("HttpPut", "url, body?"),
    ("HttpDelete", "url"),
    // Text
    ("TextRegex", "input, pattern"),
    ("TextReplace", "input, old, new"),
    ("TextSplit", "input, delimiter"),
    ("TextJoin", "delimiter, parts..."),
    ("TextTrim", "input"),
    ("TextLength", "input"),
    ("TextSubstring", "input, start, len?"),
    ("TextLines", "input"),
    ("TextToUpper", "input"),
    ("TextToLower", "input"),
    ("TextBase64Encode", "input"),
    ("TextBase64Decode", "input"),
    ("TextUrlEncode", "input"),
    ("TextUrlDecode", "input"),
    ("TextHtmlEncode", "input"),
    ("TextContains", "input, substr"),
    ("TextStartsWith", "input, prefix"),
    ("TextEndsWith", "input, suffix"),
    ("TextMatch", "input, pattern"),
    ("TextHash", "input, algo?"),
    ("TextSort", "input, direction?"),
    ("TextUniq", "input"),
    ("TextCount", "input, pattern?"),
    ("TextIndexOf", "input, substr"),
    ("TextLastIndexOf", "input, substr"),
    ("TextRemove", "input, substr"),
    ("TextWordCount", "input"),
    ("TextReverse", "input"),
    ("TextPadLeft", "input, width, char?"),
    ("TextPadRight", "input, width, char?"),
    ("TextRepeat", "input, count"),
    ("TextRegexGroups", "input, pattern"),
    ("TextColumn", "input, colIndex, delimiter?"),
    ("TextTable", "input, delimiter?"),
    // JSON
    ("JsonParse", "input"),
    ("JsonQuery", "input, jsonpath"),
    ("JsonMerge", "json1, json2"),
    ("JsonKeys", "json"),
    ("JsonCount", "json"),
    ("JsonType", "json"),
    ("JsonFromPairs", "k1, v1, ..."),
    ("JsonSet", "json, key, value"),
    ("JsonRemoveKey", "json, key"),
    ("JsonGet", "json, indexOrKey"),
    ("JsonCompact", "json"),
    ("JsonStringify", "value"),
    ("JsonArrayFrom", "items..."),
    // Environment
    ("EnvGet", "name"),
    ("EnvList", ""),
    // System
    ("SysWhoAmI", ""),
    ("SysPwd", ""),
    ("SysHostname", ""),
    ("SysUptime", ""),
    ("SysDate", ""),
    ("SysDateFormat", "format?"),
    ("SysTimestamp", ""),
    ("SysOsInfo", ""),
    ("SysCpuCount", ""),
    ("SysTempDir", ""),
    ("SysDiskUsage", "path?"),
    ("SysDirSize", "path"),
    ("SysMemory", ""),
    ("SysProcessList", ""),
    ("SysDriveList", ""),
    ("SysNetInfo", ""),
    ("SysLogRead", "..."),
    ("SysLogSources", ""),
    ("SysServiceList", ""),
    ("SysServiceStatus", "name"),
    // Network
    ("NetPing", "host"),
    ("NetDns", "host"),
    ("NetTlsCert", "host, port?"),
    ("NetHttpStatus", "url"),
    ("NetTcpConnect", "host, port"),
    ("HttpLatency", "url, count?"),
    ("OpenUrl", "url"),
    // Paths
    ("PathJoin", "parts..."),
    ("PathDir", "path"),
    ("PathFile", "path"),
    ("PathExt", "path"),
    ("PathStem", "path"),
    ("PathChangeExt", "path, ext"),
    // Identities, numbers, time, versions
    ("GuidNew", ""),
    ("GuidNewShort", ""),
    ("RandomInt", "min, max"),
    ("TimeFormat", "unixSec, format?"),
    ("TimeParse", "dateStr, format?"),
    ("TimeAdd", "unixSec, secondsToAdd"),
    ("TimeDiff", "unixSec1, unixSec2"),
    ("VersionCompare", "ver1, ver2"),
    ("VersionParse", "string"),
    ("HexEncode", "input"),
    ("HexDecode", "input"),
    ("BaseConvert", "value, from, to"),
    ("FormatBytes", "byteCount"),
    ("FormatDuration", "seconds"),
    ("MathEval", "expression"),
    // Archive, clipboard
    ("ArchiveExtract", "archivePath, destPath"),
    ("ClipboardSet", "text"),
    // Control
    ("Echo", "message"),
    ("Sleep", "seconds"),
    ("Assert", "actual, expected, msg?"),
    ("Fail", "message"),
    ("ForEach", ""),
    ("If", ""),
    ("Include", "fragmentId"),
    // Introspection
    ("Mk8Blacklist", ""),
    ("Mk8Vocab", "listName"),
    ("Mk8VocabList", ""),
    ("Mk8FreeText", "cmd?"),
    ("Mk8Env", ""),
    ("Mk8Info", ""),
    ("Mk8Templates", ""),
    ("Mk8Verbs", ""),
    ("Mk8Skills", ""),
    ("Mk8Docs", ""),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::verbs::Network;

    #[test]
    fn each_verb_is_listed_once_including_the_network_verbs() {
        for (at, (name, _)) in ALL.iter().enumerate() {
            assert!(!ALL[..at].iter().any(|(other, _)| other == name), "{name}");
        }
        for verb in Network::ALL {
            assert!(Verb::named(verb.name()).is_some(), "{}", verb.name());
            assert_eq!(Network::named(verb.name()), Some(verb));
        }
        let served: Vec<&str> =
            ALL.iter().map(|(name, _)| *name).filter(|name| Network::named(name).is_some()).collect();
        assert_eq!(served.len(), Network::ALL.len());
        assert_eq!(Verb::named("httpget"), None);
    }

    /// A pack that closes the files closes all of these.
    #[test]
    fn verbs_about_files_are_known_as_such() {
        for (name, takes) in ALL {
            let is_of_group = ["File", "Dir", "Archive"].iter().any(|group| name.starts_with(group));
            let has_path = takes.contains("path") && !name.starts_with("Path") && name != "JsonQuery";
            let is_of_system = matches!(name, "SysDirSize" | "SysDiskUsage");
            assert_eq!(is_about_files(name), is_of_group || is_of_system, "{name}");
            assert!(!has_path || is_about_files(name), "{name}");
        }
    }

    #[test]
    fn a_verb_checks_its_number_of_arguments() {
        let rows: [(&str, &[usize], &[usize]); 7] = [
            ("HttpGet", &[1], &[0, 2]),
            ("HttpPost", &[1, 2], &[0, 3]),
            ("NetTcpConnect", &[2], &[1, 3]),
            ("EnvList", &[0], &[1]),
            ("ProcRun", &[1, 2, 100], &[0]),
            ("FileWriteMany", &[2, 4], &[1]),
            ("TextJoin", &[1, 2, 9], &[0]),
        ];
        for (name, right, wrong) in rows {
            let verb = Verb::named(name).unwrap();
            assert!(right.iter().all(|count| verb.takes(*count)), "{name}");
            assert!(!wrong.iter().any(|count| verb.takes(*count)), "{name}");
        }
    }
}
