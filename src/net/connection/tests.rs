use super::super::{DIAL_TIMEOUT, Endpoint, Listener, dial};
use super::*;
use bytes::Bytes;
use std::sync::mpsc;

/// A listener with `here` and a dialler with `there`: the connection's two ends, and the listener's report.
fn meet(here: Security, there: &Security) -> (Result<(Connection, Connection), NetError>, Option<String>) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (tell, report) = mpsc::channel();
    let at = Endpoint::loopback(0);
    // The listener lives until its report has arrived.
    let mut listener = runtime.block_on(Listener::bind(&at, here, move |r| drop(tell.send(r)))).unwrap();
    let at = listener.address().to_string().parse().unwrap();
    let outcome = runtime.block_on(async {
        let near = dial(&at, there, DIAL_TIMEOUT).await?;
        Ok((near, listener.accept().await?))
    });
    if let Ok((near, far)) = outcome {
        let talks = [near, far].map(|c| runtime.spawn(talk(c)));
        talks.into_iter().for_each(|t| runtime.block_on(t).unwrap());
        return (Err(NetError::Closed { peer: String::new(), cause: "all was said".into() }), None);
    }
    let report = report.recv_timeout(std::time::Duration::from_secs(2)).ok();
    (outcome, report.map(|r| r.reason.to_string()))
}

async fn talk(connection: Connection) {
    let (mut reader, mut writer) = connection.split(1 << 20);
    let sizes = [0usize, 1, 3, 4096, 16_384, 1 << 20, 7, 100_000];
    let body = |n: usize| Bytes::from((0..n).map(|i| (i * 7 + n) as u8).collect::<Vec<u8>>());
    let sent = tokio::spawn(async move {
        for n in sizes {
            writer.feed(body(n)).await.unwrap();
        }
        writer.flush().await.unwrap();
        writer.close().await.unwrap();
    });
    for n in sizes {
        assert_eq!(reader.next().await.unwrap(), body(n));
    }
    assert!(matches!(reader.next().await, Err(NetError::Closed { .. })));
    sent.await.unwrap();
}

/// Checks the final messages of the dialler and of the listener.
#[track_caller]
fn check(here: Security, there: &Security, dialler: &str, listener: &str) {
    let (outcome, report) = meet(here, there);
    let line = outcome.map(|_| String::new()).unwrap_or_else(|e| e.to_string());
    assert!(line.contains(dialler), "the dialler: {line}");
    let report = report.unwrap_or_default();
    assert!(report.contains(listener), "the listener: {report}");
}

fn with(party: Party, token: &Token) -> Security {
    Security::with_token(party, token).unwrap()
}

#[test]
fn frames_of_many_sizes_pass_in_both_directions() {
    let token = Token::random().unwrap();
    check(with(Party::Coordinator, &token), &with(Party::Worker, &token), "all was said", "");
    check(with(Party::Worker, &token), &with(Party::Coordinator, &token), "all was said", "");
    check(Security::plain(Party::Coordinator), &Security::plain(Party::Worker), "all was said", "");
}

/// Fingerprints are public: a peer that shows the right one and holds another token fails in TLS on either side, and
/// the honest side does not accept it.
#[test]
fn fingerprint_alone_does_not_authenticate() {
    let (token, other) = (Token::random().unwrap(), Token::random().unwrap());
    let forger = |party| Security { means: Means::Token(token.fingerprint()), ..with(party, &other) };
    let line = "does not prove that it holds the token";
    check(with(Party::Coordinator, &token), &forger(Party::Worker), line, line);
    check(forger(Party::Coordinator), &with(Party::Worker, &token), line, line);
}

/// A change of the protocol's number in a greeting in transit has no effect: TLS negotiates it again.
#[test]
fn tls_binds_the_protocol_version() {
    let token = Token::random().unwrap();
    let other = |party| Security {
        identity: Some(Identity::new(&token, PROTOCOL + 1).unwrap()),
        ..with(party, &token)
    };
    let line = "does not prove that it holds the token";
    check(with(Party::Coordinator, &token), &other(Party::Worker), line, line);
    check(other(Party::Coordinator), &with(Party::Worker, &token), line, line);
}

/// A dialler that shows no key is refused.
#[test]
fn dialler_without_a_key_is_refused() {
    let token = Token::random().unwrap();
    let there = with(Party::Worker, &token);
    let identity = there.identity.clone().unwrap();
    let mut bare = (*identity.client).clone();
    bare.client_auth_cert_resolver = std::sync::Arc::new(NoKey);
    let identity = Identity { client: std::sync::Arc::new(bare), ..identity };
    let there = Security { identity: Some(identity), ..there };
    check(with(Party::Coordinator, &token), &there, "does not prove", "does not prove");
}

#[derive(Debug)]
struct NoKey;

impl rustls::client::ResolvesClientCert for NoKey {
    fn resolve(
        &self,
        _: &[&[u8]],
        _: &[rustls::SignatureScheme],
    ) -> Option<std::sync::Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn only_raw_public_keys(&self) -> bool {
        true
    }

    fn has_certs(&self) -> bool {
        false
    }
}
