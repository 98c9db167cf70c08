//! The operations manual names every code and every alert.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Returns the texts in back quotes of the first cells of the tables in a part of a page.
fn first_cells(text: &str) -> BTreeSet<String> {
    let cells = text.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    cells.flat_map(|cell| cell.split("`, `")).map(|name| name.trim_matches('`').to_owned()).collect()
}

/// Returns the part of a page below a heading, up to the next heading of this level.
fn section<'t>(page: &'t str, heading: &str) -> &'t str {
    let rest = page.split(&format!("\n## {heading}\n")).nth(1).unwrap_or_else(|| panic!("{heading} is missing"));
    rest.split("\n## ").next().unwrap()
}

#[test]
fn the_operations_manual_names_every_code_and_every_alert() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
    let (manual, refusals) = (read("docs/operations.md"), read("docs/refusals.md"));
    let codes = first_cells(section(&refusals, "Codes"));
    assert!(codes.len() > 40, "{codes:?}");
    assert_eq!(first_cells(section(&manual, "What each code means, and what to do")), codes);
    let alerts = read("examples/monitoring/alerts.yaml");
    let alerts: BTreeSet<String> =
        alerts.lines().filter_map(|line| Some(line.split("- alert: ").nth(1)?.trim().to_owned())).collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    assert_eq!(first_cells(section(&manual, "Alerts")), alerts);
}
