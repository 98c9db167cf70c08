//! The tables of `docs/leak-scanning.md`; `EXEAT_UPDATE_DOCS=1` writes them.

use crate::lab::page::Page;

pub const PAGE: Page = Page { path: "docs/leak-scanning.md", by: "tests/it/leaks" };

/// The result for a form on a surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// The form is not valid in this place.
    Cannot,
    Caught,
    NotYet,
}

/// Returns a table with a header row, and rows of names and cells.
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
