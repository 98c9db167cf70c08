//! Pages whose tables are written by the tests that show them.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A page, and the test that writes its tables.
pub struct Page {
    pub path: &'static str,
    pub by: &'static str,
}

impl Page {
    /// Holds a table of the page to what was seen, or writes it.
    pub fn hold(&self, name: &str, table: &str) {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(self.path);
        let (begin, end) = (format!("<!-- {name}: {} writes from here -->\n", self.by), "<!-- to here -->\n");
        let text = fs::read_to_string(&path).unwrap();
        let (before, rest) = text.split_once(&begin).expect("the table's begin is marked");
        let (held, after) = rest.split_once(end).expect("the table's end is marked");
        if std::env::var_os("EXEAT_UPDATE_DOCS").is_some_and(|value| value == "1") {
            fs::write(path, format!("{before}{begin}{table}{end}{after}")).unwrap();
        } else {
            assert_eq!(held, table, "{} is stale: EXEAT_UPDATE_DOCS=1 writes it", self.path);
        }
    }
}
