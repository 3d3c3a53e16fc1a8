//! Several hosts on one machine: network namespaces, joined by a switch in this process (the kernels that run the tests
//! have no netem) with a rate, a delay, random loss, unplugged hosts, and directions that drop all frames silently.
//!
//! A reader per port takes the frames that a host sends and decides when a frame is due or whether it is lost; the
//! port's other thread waits until then and delivers the frame.

use crate::tap;
use finetune::numeric::rng::Stream;
use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The buffer of a port, as time at its rate.
const BUFFER: Duration = Duration::from_millis(100);

/// The properties of a link.
#[derive(Debug, Clone, Copy)]
pub struct Path {
    /// Of each port, in each direction.
    pub megabits: f64,
    /// One way.
    pub delay: Duration,
    /// The fraction of frames that is lost.
    pub loss: f32,
}

/// Frame type of ARP: a firewall lets it pass, an unplugged host does not.
const ARP: [u8; 2] = [0x08, 0x06];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    Firewall,
    Cable,
}

/// From host, to host, kind.
type Cuts = Arc<Mutex<Vec<(usize, usize, Cut)>>>;

/// Hosts 1 to n, at 10.77.0.1 and so on, removed on drop.
pub struct Hosts {
    prefix: String,
    count: usize,
    /// (from, to) pairs without traffic in that direction.
    cuts: Cuts,
}

impl Hosts {
    /// `None`, with a line that says why, if this machine does not permit network namespaces.
    pub fn new(count: usize, path: Path) -> Option<Self> {
        Hosts::with(&vec![path; count])
    }

    /// Hosts with these links to the switch.
    pub fn with(paths: &[Path]) -> Option<Self> {
        let count = paths.len();
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let prefix = format!("ft{}-{number}", std::process::id());
        let hosts = Hosts { prefix, count, cuts: Arc::default() };
        match hosts.open(paths) {
            Ok(()) => Some(hosts),
            Err(reason) => {
                // Not by a macro: the harness captures macro output of tests that pass.
                let _ = writeln!(
                    std::io::stderr(),
                    "SKIPPED: no network of several hosts here: {reason} (needs root, `ip` and /dev/net/tun)"
                );
                None
            }
        }
    }

    pub fn namespace(&self, host: usize) -> String {
        format!("{}-h{host}", self.prefix)
    }

    pub fn address(host: usize) -> String {
        format!("10.77.0.{host}")
    }

    /// Drops every frame from `from` to `to`, without an error to either.
    pub fn drop_silently(&self, from: usize, to: usize) {
        self.cuts.lock().unwrap().push((from, to, Cut::Firewall));
    }

    /// Disconnects a host.
    pub fn unplug(&self, host: usize) {
        for other in (1..=self.count).filter(|other| *other != host) {
            self.cuts.lock().unwrap().extend([(host, other, Cut::Cable), (other, host, Cut::Cable)]);
        }
    }

    pub fn heal(&self) {
        self.cuts.lock().unwrap().clear();
    }

    fn open(&self, paths: &[Path]) -> Result<(), String> {
        let mut cards = Vec::new();
        for host in 1..=self.count {
            let name = self.namespace(host);
            ip(&format!("netns add {name}"))?;
            cards.push(Arc::new(tap::open(&name).map_err(|e| format!("a card in {name}: {e}"))?));
            ip(&format!("-n {name} addr add {}/24 dev eth0", Self::address(host)))?;
            ip(&format!("-n {name} link set eth0 address 02:00:00:00:00:{host:02x}"))?;
            ip(&format!("-n {name} link set eth0 txqueuelen 2000 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        for (port, card) in cards.iter().enumerate() {
            let (send, due) = channel();
            let (from, all, cuts, path) = (card.clone(), cards.clone(), self.cuts.clone(), paths[port]);
            std::thread::spawn(move || take(port, &from, path, &send));
            std::thread::spawn(move || deliver(port, &all, &cuts, &due));
        }
        Ok(())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 1..=self.count {
            let _ = ip(&format!("netns del {}", self.namespace(host)));
        }
    }
}

fn ip(args: &str) -> Result<(), String> {
    let out = Command::new("ip").args(args.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    let said = String::from_utf8_lossy(&out.stderr);
    if out.status.success() { Ok(()) } else { Err(format!("ip {args}: {}", said.trim())) }
}

type Frame = (Instant, Vec<u8>);

/// Reads the frames that a host sends until its card is removed.
fn take(port: usize, mut card: &File, path: Path, send: &Sender<Frame>) {
    let mut draws = Stream::new(&[port as u64, 77]);
    let (mut busy, mut frame) = (Instant::now(), vec![0; 2048]);
    while let Ok(length) = card.read(&mut frame) {
        let now = Instant::now();
        let begins = busy.max(now);
        if draws.unit() < path.loss || begins - now > BUFFER {
            continue;
        }
        // 24 bytes on the wire that the card does not show: preamble, checksum, gap.
        busy = begins + Duration::from_secs_f64((length + 24) as f64 * 8e-6 / path.megabits);
        if send.send((busy + path.delay, frame[..length].to_vec())).is_err() {
            return;
        }
    }
}

/// Delivers frames by the last byte of the address, or to all hosts for any other address.
fn deliver(port: usize, cards: &[Arc<File>], cuts: &Cuts, due: &Receiver<Frame>) {
    for (at, frame) in due {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        let ours = frame[0] & 1 == 0 && (1..=cards.len()).contains(&usize::from(frame[5]));
        let to = if ours { usize::from(frame[5])..=usize::from(frame[5]) } else { 1..=cards.len() };
        for host in to.filter(|host| *host != port + 1) {
            let passes = |cut: Cut| cut == Cut::Firewall && frame.get(12..14) == Some(&ARP);
            let stopped =
                |(from, to, cut): &(usize, usize, Cut)| (*from, *to) == (port + 1, host) && !passes(*cut);
            if !cuts.lock().unwrap().iter().any(stopped) {
                // A removed host or a full buffer: the frame is lost, as on a real network.
                let _ = (&*cards[host - 1]).write(&frame);
            }
        }
    }
}
