//! The outputs in the README are those of the program, and fit a terminal of 80 columns.

use crate::lab::page::Page;
use crate::operation::cli::{exeat, output, text};

const README: Page = Page { path: "README.md", by: "cargo test --test it readme" };

/// The scenes of the demo that the README shows.
const SHOWN: [&str; 7] = [
    "GET through CONNECT",
    "a credential by name",
    "a host that is not allowed",
    "/public/%2e%2e/admin",
    "fronting: another name",
    "the key itself in a URL",
    "an allowed address and the metadata",
];

#[track_caller]
fn assert_fits(output: &str) {
    for line in output.lines() {
        assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_in_the_readme_is_a_part_of_its_output() {
    let dir = tempfile::tempdir().unwrap();
    let demo = output(exeat(dir.path(), &["demo"])).await;
    assert!(demo.status.success(), "{}", text(&demo.stderr));
    let out = text(&demo.stdout);
    assert_fits(&out);
    let mut block = format!("```text\n{}\n", out.lines().next().unwrap());
    let mut is_shown = false;
    let mut shown = 0;
    for line in out.lines().skip(1).take_while(|line| !line.is_empty()) {
        // A line below a scene is indented.
        if !line.starts_with(' ') {
            is_shown = SHOWN.iter().any(|title| line.starts_with(title));
            shown += usize::from(is_shown);
        }
        if is_shown {
            block.push_str(&format!("{line}\n"));
        }
    }
    assert_eq!(shown, SHOWN.len(), "{out}");
    README.check("demo", &format!("{block}…\n```\n"));
}

/// Nothing of it needs a network: the request is refused before its name is looked up.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl"]
async fn the_summary_in_the_readme_is_that_of_run() {
    let dir = tempfile::tempdir().unwrap();
    let script = "curl -s https://telemetry.example.net/";
    let run =
        output(exeat(dir.path(), &["run", "--allow", "example.org", "--", "sh", "-c", &format!("{script}; true")]))
            .await;
    let summary = text(&run.stderr);
    assert!(run.status.success() && text(&run.stdout).contains("host_not_allowed"), "{summary}");
    assert_fits(&summary);
    README.check("run", &format!("```text\n$ exeat run --allow example.org -- {script}\n…\n{summary}```\n"));
}
