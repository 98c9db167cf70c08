//! The table in `docs/clients.md`. Each test compares its row with its results, or writes the row if
//! `EXEAT_UPDATE_DOCS=1`, so each of them can run alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const BEGIN: &str =
    "<!-- The tests write from here: EXEAT_UPDATE_DOCS=1 cargo test --test it clients:: -- --include-ignored -->\n";
const END: &str = "<!-- to here -->\n";
const HEAD: &str = "| client | speaks inside | needs besides | a host that is not allowed |\n|---|---|---|---|\n";

/// The results of a test with one client, as Markdown. They contain no versions, because those differ between machines.
pub struct Row<'r> {
    pub client: &'r str,
    /// The protocols of its requests, inside CONNECT or without it.
    pub inside: &'r str,
    /// The settings that the client needs beyond those of `exeat run` and `exeat env`.
    pub needs: &'r str,
    /// The client's message for a refusal.
    pub refusal: &'r str,
}

#[track_caller]
pub fn row(row: &Row<'_>) {
    let refusal =
        if row.refusal.contains('`') { format!("`` {} ``", row.refusal) } else { format!("`{}`", row.refusal) };
    let line = format!("| {} | {} | {} | {refusal} |", row.client, row.inside, row.needs);
    let _one_at_a_time = document();
    let (before, mut rows, after) = read();
    if !updating() {
        assert!(rows.contains(&line), "docs/clients.md is stale: EXEAT_UPDATE_DOCS=1 writes\n{line}");
        return;
    }
    rows.retain(|other| client(other) != row.client);
    rows.push(line);
    write(&before, rows, &after);
}

fn updating() -> bool {
    std::env::var_os("EXEAT_UPDATE_DOCS").is_some_and(|value| value == "1")
}

/// Guards the file, which all tests of this process share. A test that fails leaves it complete.
fn document() -> MutexGuard<'static, ()> {
    static DOCUMENT: Mutex<()> = Mutex::new(());
    DOCUMENT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/clients.md")
}

/// Returns the text before the table, its rows, and the text after it.
fn read() -> (String, Vec<String>, String) {
    let text = fs::read_to_string(path()).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the start of the table is marked");
    let (table, after) = rest.split_once(END).expect("the table's end is marked");
    let rows = table.strip_prefix(HEAD).expect("the table has its head");
    (before.to_owned(), rows.lines().map(str::to_owned).collect(), after.to_owned())
}

fn write(before: &str, mut rows: Vec<String>, after: &str) {
    rows.sort_by_key(|line| client(line).to_lowercase());
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(path(), format!("{before}{BEGIN}{HEAD}{rows}{END}{after}")).unwrap();
}

fn client(row: &str) -> &str {
    row.split('|').nth(1).unwrap_or_default().trim()
}

#[test]
fn every_row_has_a_test_and_every_test_its_row() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/clients");
    let sources = fs::read_dir(here).unwrap().map(|entry| entry.unwrap().path());
    let sources = sources.filter(|path| path.extension().is_some_and(|end| end == "rs"));
    let text: String = sources.map(|path| fs::read_to_string(path).unwrap()).collect();
    let start = concat!("client", ": \"");
    let mut tested: Vec<_> = text.split(start).skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect();
    tested.sort_by_key(|name| name.to_lowercase());
    let _one_at_a_time = document();
    let (before, mut rows, after) = read();
    if updating() {
        // The other rows are written by their own tests; rows without a test are removed.
        rows.retain(|row| tested.iter().any(|name| name == client(row)));
        return write(&before, rows, &after);
    }
    assert_eq!(rows.iter().map(|row| client(row)).collect::<Vec<_>>(), tested);
}
