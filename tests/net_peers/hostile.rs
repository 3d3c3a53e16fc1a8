//! Hostile or broken peers: refused, counted, and reported with their address; peers with the token connect meanwhile,
//! and memory stays bounded.

use crate::{Open, dialled, with};
use bytes::Bytes;
use finetune::net::{DIAL_TIMEOUT, NetError, Party, Security, Token, dial};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn connect(open: &Open) -> TcpStream {
    TcpStream::connect(open.listener.address()).unwrap()
}

/// The correct first twenty bytes for that token: they are not secret.
fn greeting(token: &Token) -> Vec<u8> {
    [b"finetune\x01\0\x01\x01", &token.fingerprint().0[..]].concat()
}

/// True if the other side closes within a time.
fn closes(mut socket: TcpStream, within: Duration) -> bool {
    socket.set_read_timeout(Some(within)).unwrap();
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// Sends `bytes` and expects that refusal at once, and that a worker still connects.
#[track_caller]
fn check(open: &mut Open, token: &Token, bytes: &[u8], expected: &str) {
    let mut socket = connect(open);
    let _ = socket.write_all(bytes);
    let refusal = open.refusal(Duration::from_secs(2));
    assert!(refusal.to_string().contains(expected), "{refusal}");
    assert!(closes(socket, Duration::from_secs(2)), "{refusal}: still open");
    dialled(&open.at(), &with(Party::Worker, token)).unwrap();
    open.accept();
}

#[test]
fn garbage_is_refused_in_one_line() {
    let token = Token::random().unwrap();
    let mut open = Open::new(with(Party::Coordinator, &token));
    let hello = greeting(&token);
    let after = |bytes: &[u8]| [&hello, bytes].concat();
    let record = |kind: u8, length: u16| [&[kind, 3, 3][..], &length.to_be_bytes()].concat();
    let noise: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), "is not finetune (it says \"GET / HTTP/1.1\")"),
        (b"\x16\x03\x01\x02\x00\x01\x00".to_vec(), "is not finetune"),
        (noise.clone(), "is not finetune"),
        (vec![0; 1 << 20], "is not finetune"),
        (after(&noise), "does not prove that it holds the token"),
        (after(&[0xff; 64]), "does not prove that it holds the token"),
        (after(b"GET / HTTP/1.1\r\n\r\n"), "does not prove that it holds the token"),
        // A handshake record of the greatest length, and a message that announces sixteen megabytes.
        (after(&[record(22, 16_384), vec![1, 0xff, 0xff, 0xff], vec![0; 20_000]].concat()), "does not prove"),
        (after(&[record(22, 0xffff), vec![0; 70_000]].concat()), "does not prove"),
        // An alert instead of a greeting.
        (after(&[record(21, 2), vec![2, 40]].concat()), "127.0.0.1"),
    ];
    let n = cases.len() as u64;
    for (bytes, expected) in &cases {
        check(&mut open, &token, bytes, expected);
    }
    assert_eq!(open.listener.refused(), n);
}

#[test]
fn slow_or_silent_peer_is_disconnected_after_five_seconds() {
    let token = Token::random().unwrap();
    let open = Open::new(with(Party::Coordinator, &token));
    let hello = greeting(&token);
    let begin = Instant::now();
    let silent = connect(&open);
    let mut half = connect(&open);
    half.write_all(&hello).unwrap();
    let mut drips = connect(&open);
    let dripping = std::thread::spawn(move || {
        for byte in hello.iter().cycle() {
            if drips.write_all(&[*byte]).is_err() || begin.elapsed() > Duration::from_secs(9) {
                return begin.elapsed();
            }
            std::thread::sleep(Duration::from_millis(300));
        }
        begin.elapsed()
    });
    for _ in 0..3 {
        let refusal = open.refusal(Duration::from_secs(7));
        assert!(refusal.to_string().contains("did not say who it is for 5 s"), "{refusal}");
        let took = begin.elapsed().as_secs_f64();
        assert!((4.5..15.0).contains(&took), "{took}");
    }
    assert!(closes(silent, Duration::from_secs(1)) && closes(half, Duration::from_secs(1)));
    assert!(dripping.join().unwrap() < Duration::from_secs(9), "the drip was not cut off");
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap_or("VmRSS: 0 kB");
    line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[test]
fn thousand_half_open_connections_block_no_worker() {
    let token = Token::random().unwrap();
    let mut open = Open::new(with(Party::Coordinator, &token));
    let before = resident();
    let hello = greeting(&token);
    let mut flood = Vec::new();
    for i in 0..1000 {
        let mut socket = connect(&open);
        // Every third sends nothing; the others stop in the middle of TLS, after all bytes that they may send.
        if i % 3 != 0 {
            let _ =
                socket.write_all(&[&hello[..], &[22, 3, 3, 0x40, 0, 1, 0, 0x3f, 0xf0], &[0; 3500]].concat());
        }
        flood.push(socket);
    }
    let begin = Instant::now();
    let near = dialled(&open.at(), &with(Party::Worker, &token)).unwrap();
    let far = open.accept();
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    let grown = resident().saturating_sub(before);
    println!(
        "a thousand half-open connections: {} KiB, a worker in after {:?}",
        grown >> 10,
        begin.elapsed()
    );
    assert!(grown < 32 << 20, "{grown} bytes");
    assert!(open.listener.refused() >= 1000 - 256, "{}", open.listener.refused());
    let reported: Vec<_> = open.refusals.try_iter().collect();
    assert!(reported.len() <= 20, "a flood fills the log: {} lines", reported.len());
    drop((near, far, flood));
}

/// A flood that continues while workers connect.
#[test]
fn workers_connect_during_a_flood() {
    let token = Token::random().unwrap();
    let mut open = Open::new(with(Party::Coordinator, &token));
    let address = open.listener.address();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let flood = std::thread::spawn(move || {
        let mut held = std::collections::VecDeque::new();
        let mut n = 0u32;
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            held.extend(TcpStream::connect(address).ok());
            n += 1;
            if held.len() > 800 {
                held.pop_front();
            }
        }
        n
    });
    let begin = Instant::now();
    let (at, worker) = (open.at(), with(Party::Worker, &token));
    let mut again = 0;
    for _ in 0..10 {
        // As a worker does: errors that are not final are retried. Scheduling decides how often.
        while let Err(e) = dialled(&at, &worker) {
            let patient = begin.elapsed() < Duration::from_secs(60);
            assert!(!e.is_final() && patient, "{e}, after {again} more attempts");
            again += 1;
        }
        open.accept();
    }
    let took = begin.elapsed();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    println!(
        "10 workers came in within {took:?} with {again} more attempts, while {} strangers knocked",
        flood.join().unwrap()
    );
}

/// A member whose frames are longer than agreed is disconnected before memory is allocated for them.
#[test]
fn frame_beyond_the_limit_ends_the_connection() {
    let token = Token::random().unwrap();
    let mut open = Open::new(with(Party::Coordinator, &token));
    let runtime = crate::runtime();
    let security = with(Party::Worker, &token);
    let near = runtime.block_on(dial(&open.at(), &security, DIAL_TIMEOUT)).unwrap();
    let (_keep, mut writer) = near.split(1 << 20);
    let (mut reader, _also) = open.accept().split(4096);
    runtime.block_on(writer.send(Bytes::from(vec![7; 4096]))).unwrap();
    runtime.block_on(writer.send(Bytes::from(vec![7; 4097]))).unwrap();
    assert_eq!(runtime.block_on(reader.next()).unwrap().len(), 4096);
    let e = runtime.block_on(reader.next()).unwrap_err();
    assert!(e.to_string().ends_with("announces a frame of 4097 bytes, 4096 are allowed"), "{e}");
    let e = runtime.block_on(writer.send(Bytes::from(vec![0; (1 << 20) + 1]))).unwrap_err();
    assert!(matches!(e, NetError::FrameTooLong { .. }), "we send none either");
}

/// Over plain TCP, arbitrary bytes after the greeting: an invalid frame ends that connection alone.
#[test]
fn huge_lengths_over_plain_tcp_are_refused() {
    let mut open = Open::new(Security::plain(Party::Coordinator));
    let runtime = crate::runtime();
    let mut socket = connect(&open);
    socket.write_all(b"finetune\x01\0\0\x01\0\0\0\0\0\0\0\0").unwrap();
    socket.write_all(&u32::MAX.to_le_bytes()).unwrap();
    let (mut reader, _writer) = open.accept().split(1 << 20);
    let before = resident();
    let e = runtime.block_on(reader.next()).unwrap_err();
    assert!(matches!(e, NetError::FrameTooLong { length: 0xffff_ffff, .. }), "{e}");
    assert!(resident().saturating_sub(before) < 64 << 20);
}
