//! The tables in `docs/clients.md`. Each test compares its row with its results, or writes the row if
//! `EXEAT_UPDATE_DOCS=1`, so each of them can run alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A table: the line before it, and its head.
struct Table {
    begin: &'static str,
    head: &'static str,
}

const CLIENTS: Table = Table {
    begin: "<!-- The tests write from here: EXEAT_UPDATE_DOCS=1 cargo test --test it clients:: -- --include-ignored -->\n",
    head: "| client | speaks inside | needs besides | a host that is not allowed |\n|---|---|---|---|\n",
};
const MODEL_APIS: Table = Table {
    begin: "<!-- The same tests write from here -->\n",
    head: "| client | with | the key arrives in | `run` | `env` | `--isolate` |\n|---|---|---|---|---|---|\n",
};
const END: &str = "<!-- to here -->\n";

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
    CLIENTS.row(row.client, line);
}

/// The row of a client of a model API, after it has passed in each way.
#[track_caller]
pub fn model_row(client: &str, credential: &str, places: &str) {
    MODEL_APIS.row(client, format!("| {client} | {credential} | {places} | yes | yes | yes |"));
}

impl Table {
    #[track_caller]
    fn row(&self, of: &str, line: String) {
        let _one_at_a_time = document();
        let (before, mut rows, after) = self.read();
        if !updating() {
            assert!(rows.contains(&line), "docs/clients.md is stale: EXEAT_UPDATE_DOCS=1 writes\n{line}");
            return;
        }
        rows.retain(|other| client(other) != of);
        rows.push(line);
        self.write(&before, rows, &after);
    }

    /// Returns the text before the table, its rows, and the text after it.
    fn read(&self) -> (String, Vec<String>, String) {
        let text = fs::read_to_string(path()).unwrap();
        let (before, rest) = text.split_once(self.begin).expect("the start of the table is marked");
        let (table, after) = rest.split_once(END).expect("the table's end is marked");
        let rows = table.strip_prefix(self.head).expect("the table has its head");
        (before.to_owned(), rows.lines().map(str::to_owned).collect(), after.to_owned())
    }

    fn write(&self, before: &str, mut rows: Vec<String>, after: &str) {
        rows.sort_by_key(|line| client(line).to_lowercase());
        let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
        fs::write(path(), format!("{before}{}{}{rows}{END}{after}", self.begin, self.head)).unwrap();
    }
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
    let (before, mut rows, after) = CLIENTS.read();
    if updating() {
        // The other rows are written by their own tests; rows without a test are removed.
        rows.retain(|row| tested.iter().any(|name| name == client(row)));
        return CLIENTS.write(&before, rows, &after);
    }
    assert_eq!(rows.iter().map(|row| client(row)).collect::<Vec<_>>(), tested);
}
