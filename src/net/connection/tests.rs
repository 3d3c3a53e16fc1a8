use super::super::{DIAL_TIMEOUT, Endpoint, Listener, dial};
use super::*;
use bytes::Bytes;
use std::sync::mpsc;

/// A listener with `here`, and what becomes of a dialler with `there`: its own end, and what the listener tells.
fn meet(here: Security, there: &Security) -> (Result<(Connection, Connection), NetError>, Option<String>) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (tell, told) = mpsc::channel();
    let at = Endpoint::loopback(0);
    // It lives until it has told what it has to tell.
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
    let told = told.recv_timeout(std::time::Duration::from_secs(2)).ok();
    (outcome, told.map(|r| r.reason.to_string()))
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

/// What the dialler and the listener say in the end.
#[track_caller]
fn check(here: Security, there: &Security, dialler: &str, listener: &str) {
    let (outcome, told) = meet(here, there);
    let line = outcome.map(|_| String::new()).unwrap_or_else(|e| e.to_string());
    assert!(line.contains(dialler), "the dialler: {line}");
    let told = told.unwrap_or_default();
    assert!(told.contains(listener), "the listener: {told}");
}

fn with(party: Party, token: &Token) -> Security {
    Security::with_token(party, token).unwrap()
}

#[test]
fn frames_of_many_sizes_go_both_ways_at_once() {
    let token = Token::random().unwrap();
    check(with(Party::Coordinator, &token), &with(Party::Worker, &token), "all was said", "");
    check(with(Party::Worker, &token), &with(Party::Coordinator, &token), "all was said", "");
    check(Security::plain(Party::Coordinator), &Security::plain(Party::Worker), "all was said", "");
}

/// Fingerprints are no secret: whoever shows the right one and holds another token does not get through TLS, from
/// either side, and neither does the honest end believe it.
#[test]
fn fingerprint_alone_does_not_authenticate() {
    let (token, other) = (Token::random().unwrap(), Token::random().unwrap());
    let liar = |party| Security { means: Means::Token(token.fingerprint()), ..with(party, &other) };
    let line = "does not prove that it holds the token";
    check(with(Party::Coordinator, &token), &liar(Party::Worker), line, line);
    check(liar(Party::Coordinator), &with(Party::Worker, &token), line, line);
}

/// Somebody between who changes the number of the protocol in a greeting gains nothing: TLS agrees on it again.
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

/// A dialler that shows no key at all is not let in, whatever the listener's key says to it.
#[test]
fn a_dialler_without_a_key_is_refused() {
    let token = Token::random().unwrap();
    let there = with(Party::Worker, &token);
    let identity = there.identity.clone().unwrap();
    let mut bare = (*identity.client).clone();
    bare.client_auth_cert_resolver = std::sync::Arc::new(Nobody);
    let identity = Identity { client: std::sync::Arc::new(bare), ..identity };
    let there = Security { identity: Some(identity), ..there };
    check(with(Party::Coordinator, &token), &there, "does not prove", "does not prove");
}

#[derive(Debug)]
struct Nobody;

impl rustls::client::ResolvesClientCert for Nobody {
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
