//! Sandboxes that a command starts within `exeat run --isolate`, as root and as another user.

use std::os::unix::fs::PermissionsExt;

use super::model_apis::{Api, OPENAI, Script};
use super::*;
use crate::operation::isolate::{NOBODY, Place, users};

const UNIX_SOCKETS: &str = "--unix-sockets";

/// Runs a script that copies a client into the folder of the test. Another user may have no access to our user's folders.
#[track_caller]
fn copy_client(place: &Place, script: &str) {
    let mut copying = Command::new("sh");
    copying.args(["-c", script]).current_dir(place.dir());
    with_clients(&mut copying);
    assert!(copying.status().unwrap().success(), "{script}");
}

/// Each set of flags is used by a known sandbox. The second network is that of bubblewrap, which leads nowhere.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and bubblewrap"]
async fn bubblewrap() {
    for user in users() {
        let place = Place::new().await;
        let bwrap = "bwrap --ro-bind / / --dev /dev";
        let proxy = "</dev/tcp/127.0.0.1/3128";
        let script = format!(
            "{bwrap} --proc /proc bash -c 'echo with the network of the command; {proxy} && echo reached'\n\
             {bwrap} --proc /proc --unshare-user --unshare-net bash -c 'echo without network; {proxy} && echo reached'\n\
             {bwrap} --unshare-all --die-with-parent --new-session echo without anything\n\
             {bwrap} --proc /proc --unshare-all --unshare-user --disable-userns echo without further namespaces\n\
             echo end"
        );
        let refused = output(place.shell(user, &["-q", UNIX_SOCKETS], &format!("{bwrap} echo started"))).await;
        assert!(!refused.status.success() && text(&refused.stdout).is_empty(), "{user:?}");
        let output = output(place.shell(user, &["-q"], &script)).await;
        let want = "with the network of the command\nreached\nwithout network\nwithout anything\n\
                    without further namespaces\nend\n";
        assert_eq!(text(&output.stdout), want, "{user:?} {}", text(&output.stderr));
    }
}

/// Codex runs the commands of the model in a sandbox, in which they reach no network.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and codex"]
async fn codex_with_a_shell_command() {
    const KEY: &str = "sk-Zs7vQe2LrW9kTn4HbXc1MyUd8GpJf3Ra";
    for user in users() {
        let place = Place::new().await;
        let vendor = "\"$(dirname \"$(readlink -f \"$(command -v codex)\")\")\"/../../codex-linux-*/vendor/*/.";
        copy_client(&place, &format!("cp -rL {vendor} codex"));
        for folder in ["home", "home/project", "tmp"] {
            fs::create_dir(place.path(folder)).unwrap();
            fs::set_permissions(place.path(folder), fs::Permissions::from_mode(0o777)).unwrap();
        }
        let shell =
            "echo sum $((40 + 2)); echo x > within; echo x > ../beyond; </dev/tcp/127.0.0.1/3128 && echo reached";
        let script = Script { shell: Some(shell), ..Script::default() };
        let (api, port) = Api::start(&place.builder, OPENAI.host, KEY, script).await;
        let dir = place.dir().display();
        let script = format!(
            "export HOME={dir}/home TMPDIR={dir}/tmp; cd home/project && {dir}/codex/bin/codex exec --skip-git-repo-check \
             -s workspace-write -c sandbox_workspace_write.exclude_slash_tmp=true \
             -c openai_base_url=https://{}:{port}/v1 x </dev/null",
            OPENAI.host
        );
        let mut command =
            place.shell(user, &["--credential", &format!("CODEX_API_KEY@{}:{port}", OPENAI.host)], &script);
        command.env("CODEX_API_KEY", KEY);
        let output = output(command).await;
        let said = text(&output.stderr);
        assert_eq!(text(&output.stdout), "hello\n", "{user:?} {said}");
        let ran = api.ran.lock().unwrap().concat();
        assert!(ran.contains("sum 42") && ran.contains("Read-only file system"), "{user:?} {ran}");
        assert!(ran.contains("/3128: Operation not permitted") && !ran.contains("reached"), "{user:?} {ran}");
        assert!(place.path("home/project/within").exists() && !place.path("home/beyond").exists(), "{user:?} {ran}");
        assert!(!ran.contains(KEY) && !said.contains(KEY), "{user:?}");
    }
}

/// Chromium's own sandbox does not work as root, inside or outside. Chromium creates Unix sockets.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces, chromium, certutil and node"]
async fn chromium_with_its_own_sandbox() {
    let place = Place::new().await;
    fs::create_dir(place.path("home")).unwrap();
    fs::write(place.path("chromium.js"), include_str!("chromium.js")).unwrap();
    copy_client(&place, "cp \"$(node -p process.execPath)\" node");
    for (path, mode) in [("home", 0o777), ("chromium.js", 0o644)] {
        fs::set_permissions(place.path(path), fs::Permissions::from_mode(mode)).unwrap();
    }
    let script = format!(
        "export HOME={0}/home; cd \"$HOME\" && mkdir -p .pki/nssdb && certutil -d sql:.pki/nssdb -N --empty-password && \
         certutil -d sql:.pki/nssdb -A -t C,, -n exeat -i \"$NODE_EXTRA_CA_CERTS\" && \
         timeout 60 ../node ../chromium.js {1} {2} sandboxed",
        place.dir().display(),
        place.url("/"),
        place.url("/sink"),
    );
    let user = rustix::process::geteuid().is_root().then_some(NOBODY);
    let output = output(place.shell(user, &[UNIX_SOCKETS], &script)).await;
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    let networks = out.strip_prefix("hello h2 100000 ").and_then(|rest| rest.trim_end().parse::<u32>().ok());
    assert!(networks.is_some_and(|networks| networks > 0), "{out} {said}");
}

/// The helper keeps the password in a process that listens on a Unix socket in the user's folder.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and git"]
async fn git_with_a_credential_helper_on_a_unix_socket() {
    for user in users() {
        let place = Place::new().await;
        let script = "export HOME=$PWD/home; mkdir home; cd home\n\
                      git config --global credential.helper cache\n\
                      printf 'protocol=https\\nhost=a.test\\nusername=u\\npassword=of-a\\n\\n' | git credential approve\n\
                      printf 'protocol=https\\nhost=a.test\\n\\n' | GIT_TERMINAL_PROMPT=0 git credential fill | grep password\n\
                      git credential-cache exit";
        let with = output(place.shell(user, &[UNIX_SOCKETS], script)).await;
        assert_eq!(text(&with.stdout), "password=of-a\n", "{user:?} {}", text(&with.stderr));
        let without = output(place.shell(user, &[], &script.replace("mkdir home; ", ""))).await;
        assert_eq!(text(&without.stdout), "", "{user:?}");
        let said = text(&without.stderr);
        assert!(said.contains("cache daemon: Address family not supported"), "{said}");
        assert!(said.contains("add --unix-sockets\n") && !text(&with.stderr).contains("--unix-sockets"), "{said}");
    }
}
