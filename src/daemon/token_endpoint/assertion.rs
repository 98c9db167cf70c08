//! Signed assertions: JSON Web Tokens for token endpoints (RFC 7523 §3, RFC 7515 §3.1).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm,
    Ed25519KeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject;
use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use crate::files;
use crate::policy::token_request::Assertion;

/// How much earlier than now an assertion is valid, because clocks differ a little.
const EARLIER: Duration = Duration::from_secs(30);
/// The life of an assertion. GitHub allows 10 minutes at most.
const LIFE: Duration = Duration::from_secs(300);

/// A private key, and the name of its algorithm (RFC 7518 §3.1, RFC 8037 §3.1).
enum SigningKey {
    Rsa(RsaKeyPair),
    Ecdsa(EcdsaKeyPair, &'static str),
    Ed25519(Ed25519KeyPair),
}

impl SigningKey {
    /// Reads a key in PEM: PKCS #8, PKCS #1 or SEC 1.
    fn of(pem: &[u8]) -> Option<Self> {
        let mut key = PrivateKeyDer::from_pem_slice(pem).ok()?;
        let read = Self::of_der(&key);
        // The library does not wipe it.
        key.zeroize();
        read
    }

    fn of_der(key: &PrivateKeyDer<'_>) -> Option<Self> {
        let der = key.secret_der();
        let rsa = match key {
            PrivateKeyDer::Pkcs1(_) => RsaKeyPair::from_der(der).ok(),
            _ => RsaKeyPair::from_pkcs8(der).ok(),
        };
        let ecdsa = |algorithm: &'static EcdsaSigningAlgorithm, name| {
            let pair = EcdsaKeyPair::from_private_key_der(algorithm, der).ok()?;
            Some(Self::Ecdsa(pair, name))
        };
        rsa.map(Self::Rsa)
            .or_else(|| ecdsa(&ECDSA_P256_SHA256_FIXED_SIGNING, "ES256"))
            .or_else(|| ecdsa(&ECDSA_P384_SHA384_FIXED_SIGNING, "ES384"))
            .or_else(|| Ed25519KeyPair::from_pkcs8_maybe_unchecked(der).ok().map(Self::Ed25519))
    }

    fn algorithm(&self) -> &'static str {
        match self {
            Self::Rsa(_) => "RS256",
            Self::Ecdsa(_, name) => name,
            Self::Ed25519(_) => "EdDSA",
        }
    }

    fn sign(&self, text: &[u8]) -> Option<Vec<u8>> {
        let random = SystemRandom::new();
        match self {
            Self::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, text, &mut signature).ok()?;
                Some(signature)
            }
            Self::Ecdsa(key, _) => Some(key.sign(&random, text).ok()?.as_ref().to_vec()),
            Self::Ed25519(key) => Some(key.sign(text).as_ref().to_vec()),
        }
    }
}

/// Signs an assertion that is valid from `now` on, by the server's clock.
///
/// # Errors
/// The reason, if the key cannot be used.
pub(super) fn sign(assertion: &Assertion, now: SystemTime) -> Result<Zeroizing<String>, &'static str> {
    let Assertion { issuer, subject, audience, scope, key_id, key } = assertion;
    let key =
        SigningKey::of(key.secret().expose()).ok_or("the private key is not an RSA, P-256, P-384 or Ed25519 key")?;
    let seconds = |time: Option<SystemTime>| {
        time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs())
    };
    let mut header = json!({ "alg": key.algorithm(), "typ": "JWT" });
    let mut claims = json!({
        "iss": issuer,
        "iat": seconds(now.checked_sub(EARLIER)),
        "exp": seconds(now.checked_add(LIFE)),
        "jti": files::hex(files::random::<16>().map_err(|_| "there are no random numbers")?.as_slice()),
    });
    let mut set = |name: &str, value: &Option<String>| {
        if let (Some(value), Some(claims)) = (value, claims.as_object_mut()) {
            claims.insert(name.to_owned(), json!(value));
        }
    };
    set("sub", subject);
    set("aud", audience);
    set("scope", scope);
    if let (Some(key_id), Some(header)) = (key_id, header.as_object_mut()) {
        header.insert("kid".to_owned(), json!(key_id));
    }
    let signed =
        format!("{}.{}", URL_SAFE_NO_PAD.encode(header.to_string()), URL_SAFE_NO_PAD.encode(claims.to_string()));
    let signature = key.sign(signed.as_bytes()).ok_or("the private key could not sign")?;
    Ok(Zeroizing::new(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))))
}
