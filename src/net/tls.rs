//! Mutual TLS 1.3 with raw public keys (RFC 7250) and no weaker alternative: one key, one signature scheme, no older
//! version, no certificates, no tickets, no resumption, no early data. Both ends derive the same Ed25519 key from
//! the token; only a peer that proves to hold the token is admitted.
//!
//! Sharing one key is safe because TLS 1.3 signs the role of the side and the whole transcript: a listener's
//! signature is not valid for a dialler, and one of another connection is not valid here.

use super::token::Token;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring as provider, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    PeerIncompatible, ServerConfig, SignatureScheme,
};
use std::sync::Arc;

/// PKCS #8 encoding of an Ed25519 key, without its 32 bytes (RFC 8410).
const PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// Both sides of TLS for the holder of a token.
#[derive(Clone)]
pub struct Identity {
    /// For the dialling side.
    pub client: Arc<ClientConfig>,
    /// For the listening side.
    pub server: Arc<ServerConfig>,
}

impl Identity {
    /// Derives the key. `protocol` is part of the TLS negotiation, so it cannot be changed in transit.
    pub fn new(token: &Token, protocol: u16) -> Result<Self, Error> {
        let seed: [u8; 32] = token.derive(b"finetune ed25519 1");
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from([&PKCS8[..], &seed].concat()))?;
        let public =
            key.public_key().ok_or(Error::General("an Ed25519 key without its public half".into()))?;
        let public = public.to_vec();
        let certified = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public.clone())], key));
        let mut provider = provider::default_provider();
        // AES-128 has four rounds fewer than AES-256 for every block; 128 bits are secure enough.
        provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
        let provider = Arc::new(provider);
        let algorithms = provider.signature_verification_algorithms;
        let same = Arc::new(SameKey { public, algorithms });
        Ok(Identity {
            client: Arc::new(client(provider.clone(), same.clone(), certified.clone(), protocol)?),
            server: Arc::new(server(provider, same, certified, protocol)?),
        })
    }
}

fn client(
    provider: Arc<CryptoProvider>,
    same: Arc<SameKey>,
    key: Arc<CertifiedKey>,
    protocol: u16,
) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous() // rustls's name for every verifier but its own
        .with_custom_certificate_verifier(same)
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(key)));
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config.alpn_protocols = vec![alpn(protocol)];
    Ok(config)
}

fn server(
    provider: Arc<CryptoProvider>,
    same: Arc<SameKey>,
    key: Arc<CertifiedKey>,
    protocol: u16,
) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(same)
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key)));
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![alpn(protocol)];
    Ok(config)
}

fn alpn(protocol: u16) -> Vec<u8> {
    format!("finetune/{protocol}").into_bytes()
}

/// The server name of every connection; it is neither sent nor checked.
pub fn placeholder_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from(std::net::Ipv4Addr::LOCALHOST).into())
}

/// Accepts a peer with our own public key, once it has signed the handshake with the private key.
#[derive(Debug)]
struct SameKey {
    public: Vec<u8>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl SameKey {
    fn check(&self, theirs: &CertificateDer, more: &[CertificateDer]) -> Result<(), Error> {
        // Both keys are public, so the comparison need not take constant time.
        match more.is_empty() && theirs.as_ref() == self.public {
            true => Ok(()),
            false => Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn signed(
        &self,
        message: &[u8],
        key: &CertificateDer,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check(key, &[])?;
        if signature.scheme != SignatureScheme::ED25519 {
            return Err(PeerIncompatible::NoSignatureSchemesInCommon.into());
        }
        let key = SubjectPublicKeyInfoDer::from(self.public.as_slice());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

/// The methods that both traits share: TLS 1.3 only, one scheme, keys without certificates.
macro_rules! both_sides_verify {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _key: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("only TLS 1.3 is spoken".into()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            key: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.signed(message, key, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for SameKey {
    fn verify_server_cert(
        &self,
        theirs: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(theirs, more).map(|()| ServerCertVerified::assertion())
    }

    both_sides_verify!();
}

impl ClientCertVerifier for SameKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        theirs: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(theirs, more).map(|()| ClientCertVerified::assertion())
    }

    both_sides_verify!();
}
