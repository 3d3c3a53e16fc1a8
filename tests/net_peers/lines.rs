//! Each failure to connect: its line on the dialling side, its line on the listening side, and whether it is final, all
//! within five seconds.

use crate::{Open, dialled, runtime, with};
use finetune::net::{Endpoint, Listener, NetError, Party, Security, Token};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Dials `at` as a worker and compares the line, where AT stands for the address.
#[track_caller]
fn check(at: &Endpoint, security: &Security, is_final: bool, expected: &str) -> NetError {
    let begin = Instant::now();
    let e = dialled(at, security).expect_err("it was let in");
    assert!(begin.elapsed() < Duration::from_secs(8), "{e}: after {:?}", begin.elapsed());
    let expected = expected.replace("AT", &at.to_string());
    assert!(e.to_string().contains(&expected), "wanted {expected:?} in\n{e}");
    assert_eq!(e.is_final(), is_final, "{e}");
    assert!(!e.to_string().contains('\n'));
    e
}

/// A foreign server that does `then` with every connection.
fn stranger(then: impl Fn(std::net::TcpStream) + Send + 'static) -> Endpoint {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = socket.local_addr().unwrap().to_string().parse().unwrap();
    std::thread::spawn(move || socket.incoming().flatten().for_each(then));
    at
}

fn worker() -> Security {
    with(Party::Worker, &Token::random().unwrap())
}

#[test]
fn unknown_host_name_is_reported() {
    let at: Endpoint = "no-such-host.invalid:9000".parse().unwrap();
    let e = check(&at, &worker(), false, "no-such-host.invalid: unknown name (");
    assert!(e.to_string().ends_with("check its spelling, or give the address, as 10.0.0.5:9000"), "{e}");
}

#[test]
fn refused_connection_is_reported() {
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string().parse().unwrap();
    check(&at, &worker(), false, "nothing listens on AT: start finetune there first, or check the port");
}

/// A full queue drops further connections, as a firewall does.
#[test]
fn unanswered_connection_is_reported() {
    let runtime = runtime();
    let _in = runtime.enter();
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let full = socket.listen(1).unwrap();
    let address = full.local_addr().unwrap();
    let connect = |_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok();
    let _fill: Vec<_> = (0..4).map(connect).collect();
    let at: Endpoint = address.to_string().parse().unwrap();
    let line = "AT does not answer: a firewall drops it, or the machine is off: open port PORT there, or let it dial \
                you: --role worker --bind :9001 here, --nodes there";
    check(&at, &worker(), false, &line.replace("PORT", &at.port.to_string()));
    let coordinator = with(Party::Coordinator, &Token::random().unwrap());
    check(&at, &coordinator, false, "or let it dial you: --role worker --coordinator there");
}

#[test]
fn foreign_server_is_reported() {
    let http = stranger(|mut s| {
        let _ = s.read(&mut [0; 1000]);
        let _ = s.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
    });
    check(
        &http,
        &worker(),
        true,
        "AT is not finetune (it says \"HTTP/1.1 400 Bad Req\"): check host and port",
    );
    let ssh = stranger(|mut s| drop(s.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")));
    check(&ssh, &worker(), true, "AT is not finetune (it says \"SSH-2.0-");
    let short = stranger(|mut s| drop(s.write_all(b"finet")));
    check(&short, &worker(), true, "AT is not finetune (it says \"finet\")");
    check(
        &stranger(drop),
        &worker(),
        false,
        "AT took the connection and closed it without a word: it is not finetune",
    );
    // The server keeps the received bytes and sends nothing.
    let silent = stranger(std::mem::forget);
    check(
        &silent,
        &worker(),
        false,
        "AT took the connection and says nothing: it is not finetune, or it hangs",
    );
    let half = stranger(|mut s| {
        let _ = s.write_all(b"finetune\x01\0");
        std::mem::forget(s);
    });
    check(&half, &worker(), false, "AT took the connection and says nothing");
}

/// Checks the line of the listening side about the peer that was just refused.
#[track_caller]
fn listener_says(open: &Open, expected: &str) {
    let refusal = open.refusal(Duration::from_secs(1));
    let expected = expected.replace("PEER", &refusal.peer.to_string());
    assert!(refusal.to_string().contains(&expected), "wanted {expected:?} in\n{refusal}");
    assert!(refusal.peer.ip().is_loopback() && refusal.total == open.listener.refused());
}

#[test]
fn different_or_missing_tokens_are_reported() {
    let (one, two) = (Token::random().unwrap(), Token::random().unwrap());
    let (a, b) = (one.fingerprint().to_string(), two.fingerprint().to_string());
    let open = Open::new(with(Party::Coordinator, &one));
    let at = open.at();
    let line =
        format!("AT has another token (fingerprint {a} there, {b} here): `finetune token` there prints it");
    check(&at, &with(Party::Worker, &two), true, &line);
    listener_says(&open, &format!("PEER has another token (fingerprint {b} there, {a} here)"));
    let none = Security::without_token(Party::Worker);
    check(&at, &none, true, &format!("AT wants a token (fingerprint {a}) and there is none here"));
    listener_says(&open, &format!("PEER has no token (fingerprint {a} here): `finetune token --set` there"));
    check(&at, &Security::plain(Party::Worker), true, "AT has a token and this side speaks plain TCP");
    listener_says(&open, "PEER speaks plain TCP (--insecure) and this side does not");
    check(&at, &with(Party::Coordinator, &one), true, "AT is a coordinator too: a run has one");
    listener_says(&open, "PEER is a coordinator too");
    dialled(&at, &with(Party::Worker, &one)).unwrap();
    assert_eq!(open.listener.refused(), 4);
}

#[test]
fn plain_tcp_refuses_tokens_and_remote_addresses() {
    let open = Open::new(Security::plain(Party::Coordinator));
    check(&open.at(), &worker(), true, "AT speaks plain TCP (--insecure) and this side does not");
    listener_says(&open, "PEER has a token and this side speaks plain TCP");
    let far: Endpoint = "203.0.113.1:9000".parse().unwrap();
    let plain = Security::plain(Party::Worker);
    check(&far, &plain, true, "AT is not this machine alone, and plain TCP (--insecure) stays on it");
    let all = Endpoint::everywhere(0);
    let bound = runtime().block_on(Listener::bind(&all, plain, |_| ()));
    assert!(matches!(bound, Err(NetError::PlainFar { .. })));
}

#[test]
fn other_protocol_version_is_reported() {
    for (theirs, side) in [(2u8, "here"), (0, "there")] {
        let at = stranger(move |mut s| {
            let _ = s.write_all(&[b"finetune", &[theirs, 0][..], &[7; 10][..]].concat());
        });
        let line = format!("AT speaks protocol {theirs}, this finetune 1: update finetune {side}");
        check(&at, &worker(), true, &line);
        let open = Open::new(worker());
        let mut socket = std::net::TcpStream::connect(open.listener.address()).unwrap();
        socket.write_all(&[b"finetune", &[theirs, 0][..], &[7; 10][..]].concat()).unwrap();
        let mut heard = [0; 20];
        socket.read_exact(&mut heard).unwrap();
        assert_eq!(&heard[..10], b"finetune\x01\0", "the other side learns our number");
        listener_says(
            &open,
            &format!("PEER speaks protocol {theirs}, this finetune 1: update finetune {side}"),
        );
    }
}

#[test]
fn port_in_use_is_reported() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at: Endpoint = taken.local_addr().unwrap().to_string().parse().unwrap();
    let bind = |at: &Endpoint| runtime().block_on(Listener::bind(at, worker(), |_| ())).map(|_| ());
    let e = bind(&at).unwrap_err();
    let (port, next) = (at.port, at.port.checked_add(1).unwrap_or(9000));
    let line = format!(
        "port {port} is in use here: stop what uses it (another finetune?), or take another: \
                        --bind 127.0.0.1:{next}"
    );
    assert_eq!(e.to_string(), line);
    assert!(matches!(bind(&Endpoint::everywhere(port)), Err(NetError::PortInUse { .. })), "all interfaces");
    let elsewhere: Endpoint = "203.0.113.1:0".parse().unwrap();
    let e = bind(&elsewhere).unwrap_err();
    assert!(e.to_string().starts_with("cannot listen on 203.0.113.1:0 ("), "{e}");
    assert!(e.is_final());
}

/// Reversed directions for networks where only the other one is open: a worker listens, the coordinator dials.
#[test]
fn worker_may_listen_for_the_coordinator() {
    let token = Token::random().unwrap();
    let mut open = Open::new(with(Party::Worker, &token));
    let near = dialled(&open.at(), &with(Party::Coordinator, &token)).unwrap();
    assert_eq!(open.accept().peer().ip(), near.peer().ip());
    let line = "AT is a worker too: a worker needs a coordinator";
    check(&open.at(), &with(Party::Worker, &token), true, line);
}

/// A handshake takes little time compared with the work after it.
#[test]
fn handshake_takes_under_250_ms() {
    let token = Token::random().unwrap();
    let mut open = Open::new(with(Party::Coordinator, &token));
    let (at, security) = (open.at(), with(Party::Worker, &token));
    let runtime = runtime();
    let begin = Instant::now();
    for _ in 0..20 {
        let _near = runtime.block_on(finetune::net::dial(&at, &security, Duration::from_secs(4))).unwrap();
        let _far = open.accept();
    }
    let each = begin.elapsed() / 20;
    println!("handshake: {each:?}");
    assert!(each < Duration::from_millis(250), "{each:?}");
}
