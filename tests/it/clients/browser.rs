//! Chromium, which reads neither the proxy's password nor its CA from environment variables.

use super::*;

/// The script uses the DevTools protocol, as Puppeteer and Playwright do for `page.authenticate` and `proxy.password`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium, certutil and node"]
async fn chromium() {
    let place = place().await;
    fs::write(place.dir().join("chromium.js"), include_str!("chromium.js")).unwrap();
    let trust = "rm -rf \"$HOME/.pki\" && mkdir -p \"$HOME/.pki/nssdb\" && certutil -d \"sql:$HOME/.pki/nssdb\" -N --empty-password && \
                 certutil -d \"sql:$HOME/.pki/nssdb\" -A -t C,, -n exeat -i \"$NODE_EXTRA_CA_CERTS\"";
    let post = place.url("/sink");
    let open = |url: &str| format!("timeout 60 node chromium.js {url} {post}");
    let untrusted = place.sh(&open(&place.url("/"))).await;
    assert!(text(&untrusted.stderr).contains("net::ERR_CERT_AUTHORITY_INVALID"), "{}", text(&untrusted.stderr));
    assert_broke_off(&untrusted);
    let output = place.sh(&format!("{trust} && {}", open(&place.url("/")))).await;
    assert_eq!(assert_ok(&output), "hello h2 100000\n");
    // Chromium also sends background requests without a password.
    let summary = text(&output.stderr);
    assert!(!summary.contains("exeat: 0 allowed") && !summary.contains("× api.test"), "{summary}");
    // The proxy of one's own command asks for none.
    let without =
        ["timeout", "60", "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"];
    let profile = format!("--user-data-dir={}", place.dir().join("plain").display());
    let script = format!(
        "{trust} && exec {} {profile} --proxy-server=$HTTPS_PROXY --dump-dom {}",
        without.join(" "),
        place.url("/")
    );
    let output = place.run_with(&[], &["sh", "-c", &script]).await;
    assert!(assert_ok(&output).contains("hello"), "{}", text(&output.stdout));
    assert!(!text(&output.stderr).contains("caller_unknown"), "{}", text(&output.stderr));
    let refusal = PROBLEM;
    let evil = format!("{trust} && timeout 60 node chromium.js https://evil.test/ https://evil.test/");
    place.refused(&place.sh(&evil).await, refusal);
    let needs = "`--proxy-server`, our CA in its NSS database, and for a daemon the password through the DevTools protocol; see below";
    row(&Row { client: "Chromium", inside: "HTTP/2", needs, refusal });
}
