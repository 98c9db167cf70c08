//! The live page of the admin listener: one HTML document with its style and script, and nothing from elsewhere.
//!
//! The document itself is constant. Its script asks for the token, keeps it in memory, and fetches everything else from the
//! admin API with it. The content security policy names the script and the style by their hashes, so nothing that a
//! sandbox has put into the log can run.

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use http::{Response, StatusCode};
use http_body_util::Full;
use sha2::{Digest, Sha256};

use super::admin::reply;

const DOCUMENT: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

const MEDIA_TYPE: &str = "text/html; charset=utf-8";
const CROSS_ORIGIN_OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");

static PAGE: LazyLock<Bytes> = LazyLock::new(|| {
    let page = DOCUMENT.replace("/* style */", STYLE).replace("/* script */", SCRIPT);
    page.into()
});

static POLICY: LazyLock<Option<HeaderValue>> = LazyLock::new(|| {
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        hash(SCRIPT),
        hash(STYLE),
    );
    HeaderValue::from_str(&policy).ok()
});

/// Returns the page.
pub(super) fn response() -> Response<Full<Bytes>> {
    // Without the policy, the page is not shown.
    let Some(policy) = POLICY.clone() else {
        return reply(StatusCode::INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", Bytes::new());
    };
    let mut response = reply(StatusCode::OK, MEDIA_TYPE, PAGE.clone());
    let fields = [
        (CONTENT_SECURITY_POLICY, policy),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (CROSS_ORIGIN_OPENER_POLICY, HeaderValue::from_static("same-origin")),
    ];
    response.headers_mut().extend(fields);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts are put in unchanged, the page refers to nothing outside it, and no text becomes markup.
    #[test]
    fn the_page_stands_alone() {
        let page = String::from_utf8(PAGE.to_vec()).unwrap();
        assert!(page.contains(STYLE) && page.contains(SCRIPT));
        assert!(!STYLE.contains("</") && !SCRIPT.contains("</") && !STYLE.contains("url("));
        for outside in ["http:", "https:", " src=", "@import", "innerHTML", "outerHTML", "document.write", "eval("] {
            assert!(!page.contains(outside), "{outside}");
        }
        let policy = POLICY.clone().unwrap();
        assert!(policy.to_str().unwrap().starts_with("default-src 'none'; script-src 'sha256-"));
    }
}
