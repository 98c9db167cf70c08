//! `exeat init`: the first steps of an operator, as its output says.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::operation::cli::{Served, exeat, text};

fn init(dir: &Path, more: &[&str]) -> (Option<i32>, String, String) {
    let output = exeat(dir, &[&["init"], more].concat()).output().unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The commands that are printed work, one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn the_commands_that_follow_work() {
    let dir = tempfile::tempdir().unwrap();
    let (code, commands, said) = init(dir.path(), &["--preset", "github,openai", "--preset", "pypi"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("created exeat.toml and agent.token; the CA is ") && said.contains("OPENAI_API_KEY"),
        "{said}"
    );
    let want = "exeat check -c exeat.toml\nexeat serve -c exeat.toml\n\
                eval \"$(exeat env -c exeat.toml --task agent)\"\n";
    assert_eq!(commands, want);
    let mode = fs::metadata(dir.path().join("agent.token")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // The ports of the defaults may be in use.
    let file = dir.path().join("exeat.toml");
    let config = fs::read_to_string(&file).unwrap();
    let config = format!("{config}\n[proxy]\nlisten = [\"127.0.0.1:0\"]\n[admin]\nlisten = \"127.0.0.1:0\"\n");
    fs::write(&file, config).unwrap();
    let check = exeat(dir.path(), &["check", "-c", "exeat.toml"]).output().unwrap();
    let said = text(&check.stderr);
    assert_eq!(check.status.code(), Some(0), "{said}");
    assert!(said.contains("the variable GITHUB_TOKEN is not set") && !said.contains("ca.pem"), "{said}");
    let served = Served::start(exeat(dir.path(), &["serve", "-c", "exeat.toml"]));
    assert!(served.ready.contains("ready"), "{}", served.stderr());
    let explained = exeat(dir.path(), &["explain", "-c", "exeat.toml", "--task", "agent", "https://api.openai.com/"]);
    let explained = text(&{ explained }.output().unwrap().stdout);
    assert!(
        explained.contains("OPENAI_API_KEY would be sent as `Authorization: Bearer …`, by name or placeholder"),
        "{explained}"
    );
    // Instead of a free port, `env` needs the one that clients use.
    let config = fs::read_to_string(&file).unwrap().replace("127.0.0.1:0\"]", "127.0.0.1:3128\"]");
    fs::write(&file, config).unwrap();
    let variables = text(&exeat(dir.path(), &["env", "-c", "exeat.toml", "--task", "agent"]).output().unwrap().stdout);
    let token = fs::read_to_string(dir.path().join("agent.token")).unwrap();
    assert!(variables.contains(&format!("http://agent:{}@127.0.0.1:3128", token.trim_end())), "{variables}");
}

#[test]
fn existing_files_are_not_changed() {
    for existing in ["exeat.toml", "agent.token"] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(existing), "mine").unwrap();
        let (code, out, said) = init(dir.path(), &[]);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{said}");
        assert_eq!(said, format!("exeat: {existing} exists and is not overwritten\n"));
        assert_eq!(fs::read_to_string(dir.path().join(existing)).unwrap(), "mine");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is created");
    }
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(init(dir.path(), &["--preset", "nonsense"]).0, Some(2));
    let (code, _, said) = init(dir.path(), &["-c", "missing/e.toml"]);
    assert!(code == Some(1) && said.contains("missing"), "{said}");
    let (code, commands, _) = init(dir.path(), &["-c", "my file.toml"]);
    assert!(code == Some(0) && commands.contains("exeat check -c 'my file.toml'\n"), "{commands}");
}
