//! Finding a coordinator in the local network (DNS-SD over multicast DNS). What is shown is the fingerprint of the
//! token, which tells nothing of it, and addresses. Anybody may claim to have that fingerprint, so what is found
//! is only dialled: TLS decides. Several are tried, so that a false one cannot stand in the way of the real one.

use super::address::Endpoint;
use super::connection::{Connection, Security};
use super::dial::dial;
use super::error::NetError;
use super::greeting::PROTOCOL;
use super::token::Fingerprint;
use mdns_sd::{ResolvedService, ServiceDaemon, ServiceEvent, ServiceInfo};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The kind of service.
const SERVICE: &str = "_finetune._tcp.local.";

/// Addresses that are tried of all that claim the fingerprint.
const TRIED: usize = 16;

/// Once one has been found, others may still answer for so long.
const STRAGGLERS: Duration = Duration::from_millis(200);

/// An announcement; it is taken back when this is dropped.
pub struct Announced {
    daemon: ServiceDaemon,
    name: String,
}

impl Drop for Announced {
    fn drop(&mut self) {
        // Both wait for nothing: the process may be about to end.
        let _ = self.daemon.unregister(&self.name);
        let _ = self.daemon.shutdown();
    }
}

fn failed(e: mdns_sd::Error) -> NetError {
    NetError::Local { what: "multicast DNS", cause: e.to_string() }
}

/// Shows this machine's coordinator, on `port` of all its addresses, to the local network.
pub fn announce(port: u16, fingerprint: Fingerprint) -> Result<Announced, NetError> {
    let daemon = ServiceDaemon::new().map_err(failed)?;
    // A name of our own: the machine's belongs to whoever answers for it already.
    let instance = format!("{fingerprint}-{}-{port}", std::process::id());
    let host = format!("finetune-{instance}.local.");
    let shown = [("fingerprint", fingerprint.to_string()), ("protocol", PROTOCOL.to_string())];
    let info = ServiceInfo::new(SERVICE, &instance, &host, "", port, &shown[..]).map_err(failed)?;
    let info = info.enable_addr_auto();
    let name = info.get_fullname().to_string();
    daemon.register(info).map_err(failed)?;
    Ok(Announced { daemon, name })
}

/// What a search has come to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Search {
    /// Addresses that claim our fingerprint, those of IPv4 first.
    pub ours: Vec<Endpoint>,
    /// Fingerprints of other tokens that were seen.
    pub others: Vec<String>,
}

/// Looks for coordinators with that fingerprint, for at most `time`. It waits; call it where that is allowed.
pub fn search(fingerprint: Fingerprint, time: Duration) -> Result<Search, NetError> {
    let daemon = ServiceDaemon::new().map_err(failed)?;
    let events = daemon.browse(SERVICE).map_err(failed)?;
    let mut end = Instant::now() + time;
    let mut found = Search::default();
    while let Ok(event) = events.recv_timeout(end.saturating_duration_since(Instant::now())) {
        let ServiceEvent::ServiceResolved(service) = event else { continue };
        if found.take(&service, fingerprint) {
            end = end.min(Instant::now() + STRAGGLERS);
        }
    }
    let _ = daemon.shutdown();
    Ok(found)
}

impl Search {
    /// True where the service claims our fingerprint.
    fn take(&mut self, service: &ResolvedService, fingerprint: Fingerprint) -> bool {
        let theirs = service.txt_properties.get_property_val_str("fingerprint").unwrap_or_default();
        if theirs != fingerprint.to_string() {
            let seen = self.others.iter().any(|o| o == theirs);
            let plain =
                !theirs.is_empty() && theirs.len() < 32 && theirs.chars().all(|c| c.is_ascii_graphic());
            if plain && !seen && self.others.len() < TRIED {
                self.others.push(theirs.to_string());
            }
            return false;
        }
        let mut addresses: Vec<(IpAddr, String)> =
            service.addresses.iter().map(|a| (a.to_ip_addr(), a.to_string())).collect();
        // One way for everybody: IPv4, then IPv6, each in order; this machine's own last.
        addresses.sort_by_key(|(ip, _)| (ip.is_loopback(), ip.is_ipv6(), *ip));
        for (_, host) in addresses {
            let endpoint = Endpoint { host, port: service.port };
            if self.ours.len() < TRIED && !self.ours.contains(&endpoint) {
                self.ours.push(endpoint);
            }
        }
        true
    }
}

/// Finds a coordinator and dials it, all within `time`: `--coordinator auto`.
pub async fn find_and_dial(security: &Security, time: Duration) -> Result<(Endpoint, Connection), NetError> {
    let Some(fingerprint) = security.fingerprint() else { return Err(NetError::NothingToFind) };
    let end = Instant::now() + time;
    let searching = tokio::task::spawn_blocking(move || search(fingerprint, time.mul_f64(0.6)));
    let lost = |e: tokio::task::JoinError| NetError::Local { what: "multicast DNS", cause: e.to_string() };
    let found = searching.await.map_err(lost)??;
    let mut failure = NetError::NotFound { ours: fingerprint, others: found.others.join(", ") };
    let many = found.ours.len() as u32;
    for (tried, at) in (0..).zip(found.ours) {
        let share = end.saturating_duration_since(Instant::now()) / (many - tried).max(1);
        match dial(&at, security, share).await {
            Ok(connection) => return Ok((at, connection)),
            // What lies about its fingerprint, or is unreachable from here, is passed over.
            Err(e) => failure = e,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::super::{Listener, Party, Token};
    use super::*;
    use std::io::Write;

    /// Over whatever interfaces this machine has; where multicast goes nowhere it says so and proves nothing.
    #[test]
    fn a_worker_finds_the_coordinator_with_its_token() {
        let (token, other) = (Token::random().unwrap(), Token::random().unwrap());
        let with = |party, token| Security::with_token(party, token).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let at = Endpoint::everywhere(0);
        let listen = |token| Listener::bind(&at, with(Party::Coordinator, token), |_| ());
        runtime.block_on(async {
            let mut listener = listen(&token).await.unwrap();
            let stranger = listen(&other).await.unwrap();
            listener.show().unwrap();
            let _also = announce(stranger.address().port(), other.fingerprint()).unwrap();
            // Somebody claims the same fingerprint for a port where nobody listens.
            let _false = announce(1, token.fingerprint()).unwrap();
            let time = Duration::from_secs(8);
            let worker = with(Party::Worker, &token);
            let mut found = find_and_dial(&worker, time).await;
            // Whoever lies may have been heard first, alone. A worker tries again what is not final.
            for _ in 0..5 {
                if found.as_ref().is_err_and(|e| !e.is_final()) {
                    found = find_and_dial(&worker, time).await;
                }
            }
            match found {
                Ok((at, _)) => assert_eq!(at.port, listener.address().port()),
                Err(NetError::NotFound { others, .. }) if others.is_empty() => {
                    // Not by a macro: what those say of a test that passes is kept back.
                    let line = "SKIPPED: multicast DNS goes nowhere on this machine";
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
                Err(e) => panic!("{e}"),
            }
        });
    }
}
