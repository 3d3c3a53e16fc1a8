//! Discovery of a coordinator in the local network (DNS-SD over multicast DNS). A coordinator announces its
//! addresses and the token's fingerprint, which reveals nothing of the token. Any machine may claim that
//! fingerprint, so found addresses are only dialled and TLS decides. Several are tried, so that a false claim cannot
//! block the real coordinator.

use super::address::Endpoint;
use super::connection::{Connection, Security};
use super::dial::dial;
use super::error::NetError;
use super::greeting::PROTOCOL;
use super::token::Fingerprint;
use mdns_sd::{ResolvedService, ServiceDaemon, ServiceEvent, ServiceInfo};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The service type.
const SERVICE: &str = "_finetune._tcp.local.";

/// Most addresses with a matching fingerprint that are tried.
const TRIED: usize = 16;

/// After the first match, the search waits this long for others.
const STRAGGLERS: Duration = Duration::from_millis(200);

/// An announcement; dropping it withdraws it.
pub struct Announced {
    daemon: ServiceDaemon,
    name: String,
}

impl Drop for Announced {
    fn drop(&mut self) {
        // Both return at once: the process may be about to end.
        let _ = self.daemon.unregister(&self.name);
        let _ = self.daemon.shutdown();
    }
}

fn failed(e: mdns_sd::Error) -> NetError {
    NetError::Local { what: "multicast DNS", cause: e.to_string() }
}

/// Announces this machine's coordinator, on `port` of all its addresses, to the local network.
pub fn announce(port: u16, fingerprint: Fingerprint) -> Result<Announced, NetError> {
    let daemon = ServiceDaemon::new().map_err(failed)?;
    // A host name of our own: the machine's own name may be announced by another service already.
    let instance = format!("{fingerprint}-{}-{port}", std::process::id());
    let host = format!("finetune-{instance}.local.");
    let shown = [("fingerprint", fingerprint.to_string()), ("protocol", PROTOCOL.to_string())];
    let info = ServiceInfo::new(SERVICE, &instance, &host, "", port, &shown[..]).map_err(failed)?;
    let info = info.enable_addr_auto();
    let name = info.get_fullname().to_string();
    daemon.register(info).map_err(failed)?;
    Ok(Announced { daemon, name })
}

/// The result of a search.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Search {
    /// Addresses that claim our fingerprint, IPv4 first.
    pub ours: Vec<Endpoint>,
    /// Fingerprints of other tokens that were seen.
    pub others: Vec<String>,
}

/// Searches for coordinators with this fingerprint, for at most `time`. Blocks the calling thread.
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
    /// Adds a service. Returns whether it claims our fingerprint.
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
        // The same order on every machine: IPv4, then IPv6, each sorted; loopback last.
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

/// Finds a coordinator and dials it, within `time`, for `--coordinator auto`.
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
            // An address with a false fingerprint, or one that is unreachable from here, is skipped.
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

    /// Uses the interfaces of this machine. Without multicast the test prints that it is skipped.
    #[test]
    fn worker_finds_the_coordinator_with_its_token() {
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
            // A second announcement claims the same fingerprint for a closed port.
            let _false = announce(1, token.fingerprint()).unwrap();
            let time = Duration::from_secs(8);
            let worker = with(Party::Worker, &token);
            let mut found = find_and_dial(&worker, time).await;
            // The false one may have been found first and alone. A worker retries an error that is not final.
            for _ in 0..5 {
                if found.as_ref().is_err_and(|e| !e.is_final()) {
                    found = find_and_dial(&worker, time).await;
                }
            }
            match found {
                Ok((at, _)) => assert_eq!(at.port, listener.address().port()),
                Err(NetError::NotFound { others, .. }) if others.is_empty() => {
                    // Not `println!`, whose output is captured in a passing test.
                    let line = "SKIPPED: multicast DNS goes nowhere on this machine";
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
                Err(e) => panic!("{e}"),
            }
        });
    }
}
