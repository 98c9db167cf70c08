//! The tables of `docs/leak-scanning.md`; `EXEAT_UPDATE_DOCS=1` writes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What a form comes to on a surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// It cannot stand there.
    Cannot,
    Caught,
    NotYet,
}

/// Rows of names and cells under a head.
pub fn table(first: &str, columns: &[&str], rows: &[(&str, Vec<Cell>)]) -> String {
    let mut text = format!("| {first} |");
    columns.iter().for_each(|column| text.push_str(&format!(" {column} |")));
    text.push_str(&format!("\n|---|{}\n", ":-:|".repeat(columns.len())));
    for (name, cells) in rows {
        text.push_str(&format!("| {name} |"));
        for cell in cells {
            text.push_str(match cell {
                Cell::Cannot => " – |",
                Cell::Caught => " yes |",
                Cell::NotYet => " no |",
            });
        }
        text.push('\n');
    }
    text
}

/// Holds a table of the page to what was seen, or writes it.
pub fn hold(name: &str, table: &str) {
    static PAGE: Mutex<()> = Mutex::new(());
    let _one_at_a_time = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/leak-scanning.md");
    let (begin, end) = (format!("<!-- {name}: tests/it/leaks writes from here -->\n"), "<!-- to here -->\n");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(&begin).expect("the table's begin is marked");
    let (held, after) = rest.split_once(end).expect("the table's end is marked");
    if std::env::var_os("EXEAT_UPDATE_DOCS").is_some_and(|value| value == "1") {
        fs::write(path, format!("{before}{begin}{table}{end}{after}")).unwrap();
    } else {
        assert_eq!(held, table, "docs/leak-scanning.md is stale: EXEAT_UPDATE_DOCS=1 writes it");
    }
}
