//! The CA of the proxies, the CA of the origin, and the TLS configurations made from them.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// Writes `NAME.pem` and `NAME-key.pem`.
pub(crate) fn create_ca(dir: &Path, name: &str) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, format!("bench {name}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let certificate = params.self_signed(&key).unwrap();
    fs::write(dir.join(format!("{name}.pem")), certificate.pem()).unwrap();
    fs::write(dir.join(format!("{name}-key.pem")), key.serialize_pem()).unwrap();
}

/// Writes `NAME.pem` and `NAME-key.pem` of a server's certificate for the host `localhost`.
pub(crate) fn create_leaf(dir: &Path, ca: &str, name: &str) {
    let Ca { issuer, leaf_key } = Ca::load(dir, ca);
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    fs::write(dir.join(format!("{name}.pem")), params.signed_by(&leaf_key, &issuer).unwrap().pem()).unwrap();
    fs::write(dir.join(format!("{name}-key.pem")), leaf_key.serialize_pem()).unwrap();
}

/// Issues leaf certificates.
pub(crate) struct Ca {
    issuer: Issuer<'static, KeyPair>,
    leaf_key: KeyPair,
}

impl Ca {
    pub(crate) fn load(dir: &Path, name: &str) -> Self {
        let pem = fs::read_to_string(dir.join(format!("{name}.pem"))).unwrap();
        let key = KeyPair::from_pem(&fs::read_to_string(dir.join(format!("{name}-key.pem"))).unwrap()).unwrap();
        Self { issuer: Issuer::from_ca_cert_pem(&pem, key).unwrap(), leaf_key: KeyPair::generate().unwrap() }
    }

    pub(crate) fn server_config(&self, hosts: &[&str], alpn: &[&str]) -> Arc<ServerConfig> {
        let params = CertificateParams::new(hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()).unwrap();
        let leaf = params.signed_by(&self.leaf_key, &self.issuer).unwrap();
        let key = PrivateKeyDer::try_from(self.leaf_key.serialize_der()).unwrap();
        let mut config =
            ServerConfig::builder().with_no_client_auth().with_single_cert(vec![leaf.der().clone()], key).unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

/// A client configuration that trusts one CA. Sessions are not resumed, so that every connection costs the same.
pub(crate) fn client_config(dir: &Path, ca: &str, alpn: &[&str], resumes: bool) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let pem = fs::read(dir.join(format!("{ca}.pem"))).unwrap();
    roots.add(CertificateDer::from_pem_slice(&pem).unwrap()).unwrap();
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    if !resumes {
        config.resumption = rustls::client::Resumption::disabled();
    }
    Arc::new(config)
}
