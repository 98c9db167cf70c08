//! Package managers: pip, npm, cargo, apt. The origin serves their registries as files.

use super::*;
use base64::Engine;
use sha2::{Digest, Sha256, Sha512};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with pip"]
async fn pip() {
    let place = place().await;
    serve_wheel(&place);
    let out = place.passed(&place.sh(&pip_install(&place.url("/files/simple/"))).await);
    assert!(out.ends_with("installed\n"), "{out}");
    let again = pip_install("https://evil.test/simple/").replace(" -q ", " --ignore-installed ");
    let why = "Could not fetch URL https://evil.test/simple/exeat-probe/: 403 Client Error: Forbidden";
    place.refused(&place.sh(&again.replace(" --ignore", " -vv --ignore")).await, why);
    let refusal = "ERROR: No matching distribution found for exeat-probe";
    place.refused(&place.sh(&again).await, refusal);
    row(&Row { client: "pip", inside: "HTTP/1.1", needs: NOTHING, refusal });
}

/// Serves a package and a simple index (PEP 503).
pub(super) fn serve_wheel(place: &Place) {
    let wheel = "exeat_probe-1.0-py3-none-any.whl";
    let info = "exeat_probe-1.0.dist-info";
    let archive = zip(&[
        ("exeat_probe.py", "print('installed')\n"),
        (&format!("{info}/METADATA"), "Metadata-Version: 2.1\nName: exeat-probe\nVersion: 1.0\n"),
        (&format!("{info}/WHEEL"), "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
        (&format!("{info}/RECORD"), &format!("exeat_probe.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")),
    ]);
    let page = format!(
        "<!DOCTYPE html><a href=\"../../wheels/{wheel}#sha256={}\">{wheel}</a>",
        hex(&Sha256::digest(&archive))
    );
    place.origin.serve_file("simple/exeat-probe/", "text/html", page);
    place.origin.serve_file(&format!("wheels/{wheel}"), "application/zip", archive);
}

pub(super) fn pip_install(index: &str) -> String {
    format!(
        "PIP_CONFIG_FILE=/dev/null PYTHONPATH=. python3 -m pip install -q --retries=0 --no-cache-dir \
         --disable-pip-version-check --target=. --index-url={index} exeat-probe && python3 -m exeat_probe"
    )
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs npm"]
async fn npm() {
    let place = place().await;
    serve_npm_package(&place);
    let out = place.passed(&place.sh(&npm_install(&place.url("/files/npm/"), "app")).await);
    assert!(out.ends_with("installed\n"), "{out}");
    let refusal = "npm error code E403";
    place.refused(&place.sh(&npm_install("https://evil.test/", "other")).await, refusal);
    row(&Row { client: "npm", inside: "HTTP/1.1", needs: NOTHING, refusal });
}

/// Serves a package and its document.
pub(super) fn serve_npm_package(place: &Place) {
    let package = tar(
        place.dir(),
        "package",
        &[
            ("package.json", r#"{"name":"exeat-probe","version":"1.0.0","main":"index.js"}"#),
            ("index.js", "console.log('installed');\n"),
        ],
    );
    let integrity = base64::engine::general_purpose::STANDARD.encode(Sha512::digest(&package));
    let document = serde_json::json!({
        "name": "exeat-probe",
        "dist-tags": { "latest": "1.0.0" },
        "versions": { "1.0.0": {
            "name": "exeat-probe",
            "version": "1.0.0",
            "dist": {
                "tarball": place.url("/files/npm/exeat-probe/-/exeat-probe-1.0.0.tgz"),
                "integrity": format!("sha512-{integrity}"),
            },
        } },
    });
    place.origin.serve_file("npm/exeat-probe", "application/json", document.to_string());
    place.origin.serve_file("npm/exeat-probe/-/exeat-probe-1.0.0.tgz", "application/octet-stream", package);
}

/// Installs the package into a folder, with a cache of its own.
pub(super) fn npm_install(registry: &str, folder: &str) -> String {
    format!(
        "mkdir -p {folder} && cd {folder} && npm install --no-audit --no-fund --no-update-notifier --fetch-retries=0 \
         --cache=./cache --registry={registry} exeat-probe && node -e 'require(\"exeat-probe\")'"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn cargo() {
    let place = place().await;
    let manifest = "[package]\nname = \"exeat-probe\"\nversion = \"1.0.0\"\nedition = \"2021\"\n";
    let code = "pub fn say() { println!(\"installed\"); }\n";
    let package = tar(place.dir(), "exeat-probe-1.0.0", &[("Cargo.toml", manifest), ("src/lib.rs", code)]);
    let entry = serde_json::json!({
        "name": "exeat-probe", "vers": "1.0.0", "deps": [], "features": {}, "yanked": false,
        "cksum": hex(&Sha256::digest(&package)),
    });
    let download = place.url("/files/crates/{crate}-{version}.crate");
    place.origin.serve_file("index/config.json", "application/json", format!("{{\"dl\": \"{download}\"}}"));
    place.origin.serve_file("index/ex/ea/exeat-probe", "text/plain", format!("{entry}\n"));
    place.origin.serve_file("crates/exeat-probe-1.0.0.crate", "application/gzip", package);
    write(
        &place.dir().join("app"),
        &[
            (
                "Cargo.toml",
                "[package]\nname = \"app\"\nversion = \"0.1.0\"\nedition = \"2021\"\n\
                 [dependencies]\nexeat-probe = { version = \"1\", registry = \"probe\" }\n",
            ),
            ("src/main.rs", "fn main() { exeat_probe::say(); }\n"),
        ],
    );
    // The cargo that builds this test: a cargo found by PATH may be a wrapper that needs its own HOME.
    let cargo = Path::new(env!("CARGO"));
    let run = |index: &str| {
        format!(
            "cd app && export PATH='{}':$PATH CARGO_HOME=\"$PWD/../home\" CARGO_NET_RETRY=0 CARGO_TERM_COLOR=never \
             CARGO_REGISTRIES_PROBE_INDEX=sparse+{index} CARGO_HTTP_DEBUG=true CARGO_LOG=network=debug; cargo run -q",
            cargo.parent().unwrap().display()
        )
    };
    let output = place.sh(&run(&place.url("/files/index/"))).await;
    assert_eq!(place.passed(&output), "installed\n");
    assert!(text(&output.stderr).contains("HTTP/2 200"), "{}", text(&output.stderr));
    fs::remove_file(place.dir().join("app/Cargo.lock")).unwrap();
    let refusal = "failed to get successful HTTP response from `https://evil.test/config.json` (127.0.0.1), got 403";
    place.refused(&place.sh(&run("https://evil.test/")).await, refusal);
    row(&Row { client: "cargo", inside: "HTTP/2", needs: NOTHING, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs apt-get and dpkg-deb"]
async fn apt() {
    let place = place().await;
    let control = "Package: exeat-probe\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@a.test>\nDescription: x\n";
    write(&place.dir().join("deb"), &[("DEBIAN/control", control), ("usr/share/exeat-probe", "installed\n")]);
    prepare(place.dir(), "dpkg-deb", &["--build", "--root-owner-group", "deb", "probe.deb"]);
    let deb = fs::read(place.dir().join("probe.deb")).unwrap();
    let sum = |bytes: &[u8]| hex(&Sha256::digest(bytes));
    let packages = format!("{control}Filename: ./probe.deb\nSize: {}\nSHA256: {}\n\n", deb.len(), sum(&deb));
    let release = format!(
        "Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {} {} Packages\n",
        sum(packages.as_bytes()),
        packages.len()
    );
    for origin in [&place.origin, &place.plain] {
        // The path of a repository without distributions is `./`, without normalization.
        origin.serve_file("apt/./Release", "text/plain", release.clone());
        origin.serve_file("apt/./Packages", "text/plain", packages.clone());
        origin.serve_file("apt/./probe.deb", "application/octet-stream", deb.clone());
    }
    // This file is read before the machine's settings and disables them.
    let folder = place.dir().join("apt");
    let config = format!(
        "Dir \"{0}/\"; Dir::Etc \"etc/\"; Dir::State \"state/\"; Dir::Cache \"cache/\"; Dir::Log \"log/\";\n\
         Dir::State::status \"{0}/status\"; Acquire::Retries 0; APT::Update::Error-Mode \"any\";\n",
        folder.display()
    );
    let apt = |url: &str| {
        let sources = format!("deb [trusted=yes] {url} ./\n");
        let _ = fs::remove_dir_all(&folder);
        let partial = [("state/lists/partial/x", ""), ("cache/archives/partial/x", "")];
        write(
            &folder,
            &[
                ("etc/sources.list", &*sources),
                ("etc/apt.conf.d/x", ""),
                ("status", ""),
                ("apt.conf", &config),
                partial[0],
                partial[1],
            ],
        );
        let set = "-o APT::Sandbox::User=root -o Acquire::https::CAInfo=\"$SSL_CERT_FILE\"";
        format!(
            "export APT_CONFIG=\"$PWD/apt/apt.conf\"; rm -f exeat-probe*.deb; apt-get -q {set} update && \
             apt-get -q {set} download exeat-probe && dpkg-deb -x exeat-probe*.deb out && \
             cat out/usr/share/exeat-probe"
        )
    };
    for url in [place.url("/files/apt/"), place.plain_url("/files/apt/")] {
        let out = place.passed(&place.sh(&apt(&url)).await);
        assert!(out.ends_with("installed\n"), "{out}");
    }
    let distrusted = apt(&place.url("/files/apt/")).replace("$SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt");
    assert_broke_off(&place.sh(&distrusted).await);
    let refusal = "Failed to fetch https://evil.test/./Packages  403  Forbidden";
    place.refused(&place.sh(&apt("https://evil.test/")).await, refusal);
    let needs = "`-o Acquire::https::CAInfo=\"$SSL_CERT_FILE\" -o APT::Sandbox::User=root`; nothing for `http://`";
    row(&Row { client: "apt", inside: "HTTP/1.1; plain HTTP without CONNECT", needs, refusal });
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn write(folder: &Path, files: &[(&str, &str)]) {
    for (name, content) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

/// A compressed tar archive with one folder.
fn tar(dir: &Path, folder: &str, files: &[(&str, &str)]) -> Vec<u8> {
    write(&dir.join(folder), files);
    prepare(dir, "tar", &["-czf", "archive.tgz", folder]);
    fs::read(dir.join("archive.tgz")).unwrap()
}

/// A zip archive with its files uncompressed (APPNOTE.TXT 4.3).
fn zip(files: &[(&str, &str)]) -> Vec<u8> {
    let (mut archive, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in files {
        let at = (archive.len() as u32).to_le_bytes();
        let (size, length) = ((content.len() as u32).to_le_bytes(), (name.len() as u16).to_le_bytes());
        // Version 2.0, no flags, stored, midnight of 1 January 1980.
        let time = [20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0];
        let common = [&time[..], &crc32(content.as_bytes()).to_le_bytes(), &size, &size, &length, &[0, 0]].concat();
        archive.extend([b"PK\x03\x04", &common[..], name.as_bytes(), content.as_bytes()].concat());
        directory.extend([b"PK\x01\x02\x14\0", &common[..], &[0; 10], &at, name.as_bytes()].concat());
    }
    let count = (files.len() as u16).to_le_bytes();
    let (size, at) = ((directory.len() as u32).to_le_bytes(), (archive.len() as u32).to_le_bytes());
    [archive, directory, [b"PK\x05\x06", &[0; 4][..], &count, &count, &size, &at, &[0, 0]].concat()].concat()
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 })
    })
}
