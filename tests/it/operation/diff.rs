//! `exeat diff`: what a new configuration opens and closes.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::operation::cli::{exeat, output, text};

const OLD: &str = "[integrations.github]\nallowed_domains = [\"api.github.test\", \"*.cdn.test\"]\nmethods = [\"GET\"]\n\
                   paths = [\"/repos/*\"]\n[plans.p.raw]\nrequests_per_second = 10\n\
                   [tasks.t]\nintegrations = [\"github\"]\nplan = \"p\"\n[tasks.u]\n";

async fn diff(dir: &Path, old: &str, new: &str, flags: &[&str]) -> (Option<i32>, String, String) {
    fs::write(dir.join("old.toml"), old).unwrap();
    fs::write(dir.join("new.toml"), new).unwrap();
    let result = output(exeat(dir, &[&["diff", "old.toml", "new.toml"], flags].concat())).await;
    (result.status.code(), text(&result.stdout), text(&result.stderr))
}

#[tokio::test]
async fn openings_are_told_as_patterns_and_have_a_status_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (code, out, _) = diff(dir, OLD, OLD, &[]).await;
    assert_eq!((code, out.as_str()), (Some(0), "both configurations allow the same\n"));

    let new = OLD
        .replace("[\"GET\"]", "[\"GET\", \"DELETE\"]")
        .replace("[\"/repos/*\"]", "[\"/repos/*\", \"/gists\"]")
        .replace("\"*.cdn.test\"", "\"img.cdn.test\"")
        .replace("requests_per_second = 10", "requests_per_second = 20");
    let (code, out, _) = diff(dir, OLD, &new, &[]).await;
    let want = "task t
  opens   allowed
          host     api.github.test, img.cdn.test
          port     443 (https)
          method   DELETE
          path     /gists, /repos/**
          by       raw requests
  opens   allowed
          host     api.github.test, img.cdn.test
          port     443 (https)
          method   GET
          path     /gists
          by       raw requests
  opens   raw requests: requests_per_second 20; was 10
  opens   raw requests: burst 20; was 10
  closes  refused; was allowed
          host     *.cdn.test except img.cdn.test
          port     443 (https)
          method   GET
          path     /repos/**
          by       raw requests

the new configuration allows more in some places and less in others
";
    assert_eq!((code, out.as_str()), (Some(3), want));
    let (code, ..) = diff(dir, OLD, &new, &["--allow-opening"]).await;
    assert_eq!(code, Some(0));
    let (code, out, _) = diff(dir, OLD, &new, &["--json"]).await;
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &document["opens"]), (Some(3), &true.into()));
    let row = &document["tasks"][0]["closes"][0];
    let parts = [&row["hosts"][0], &row["except_hosts"][0], &row["ports"]["only"][0], &row["paths"][0]];
    assert_eq!(parts, ["*.cdn.test", "img.cdn.test", "443", "/repos/**"], "{row:#}");

    let (code, out, _) = diff(dir, OLD, &new, &["--task", "u"]).await;
    assert_eq!((code, out.as_str()), (Some(0), "both configurations allow the same\n"));
    let (code, _, said) = diff(dir, OLD, &new, &["--task", "nobody"]).await;
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("no task \"nobody\""), "{said}");
    let (code, _, said) = diff(dir, OLD, "[tasks.t]\nplan = \"none\"\n", &[]).await;
    assert!(code == Some(2) && said.contains("new.toml"), "{said}");

    // A new task opens everything that it may do, and an old one closes it.
    let (code, out, _) = diff(dir, "", OLD, &[]).await;
    assert_eq!(code, Some(3));
    assert!(
        out.contains("task t (only in the new configuration)") && out.contains("api.github.test, *.cdn.test"),
        "{out}"
    );
    let (code, out, _) = diff(dir, OLD, "", &[]).await;
    assert_eq!(code, Some(0));
    assert!(out.ends_with("the new configuration allows less\n"), "{out}");
}

/// What the command says agrees with what `exeat explain` says of single requests.
#[tokio::test]
async fn explain_agrees() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let new = OLD.replace("\"/repos/*\"", "\"/repos/*/x\", \"/y\"");
    let (code, out, _) = diff(dir, OLD, &new, &["--json"]).await;
    assert_eq!(code, Some(3));
    let document: Value = serde_json::from_str(&out).unwrap();
    let (opens, closes) = (&document["tasks"][0]["opens"][0], &document["tasks"][0]["closes"][0]);
    assert_eq!(
        (&opens["paths"], &closes["paths"]),
        (&serde_json::json!(["/y"]), &serde_json::json!(["/repos/** except /repos/*/x"]))
    );
    for (path, before, after) in
        [("/y", 3, 0), ("/repos/a/x", 0, 0), ("/repos/a", 0, 3), ("/repos/a/x/", 0, 3), ("/z", 3, 3)]
    {
        for (config, want) in [("old.toml", before), ("new.toml", after)] {
            let url = format!("https://api.github.test{path}");
            let explained = output(exeat(dir, &["-c", config, "explain", "--task", "t", &url])).await;
            assert_eq!(explained.status.code(), Some(want), "{config} {path}: {}", text(&explained.stdout));
        }
    }
}
