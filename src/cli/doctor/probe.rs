//! Checks one requirement after the other and reports the findings. Nothing is changed: the file that tests whether a
//! folder is writable has no name and is removed when closed, a port is closed at once, no token is created.

use super::requirement::{Check, Requirement};
use super::system::{self, Limit};
use crate::cluster::worker::{Visit, visit};
use crate::config::cache;
use crate::devices;
use crate::format::hub::Hub;
use crate::net::keyring::{KeepError, Keyring};
use crate::net::{Endpoint, NetError, Party, Wishes, secure};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The command that copies the token of another machine to this one.
const SET: &str =
    "finetune token --set                # paste what `finetune token` prints on the coordinator's machine";
/// Start of 2026, before this code was written: a clock with an earlier time is wrong.
const WRITTEN: u64 = 1_767_225_600;

/// Values from the command line.
pub struct Probe {
    /// HOST:PORT.
    pub coordinator: Option<String>,
    /// Path of the token.
    pub token_file: Option<PathBuf>,
    /// Folder of a worker's base models.
    pub model_cache: Option<PathBuf>,
    /// Folder of a run.
    pub output: PathBuf,
}

/// Result of a check.
pub enum Seen {
    /// The requirement is met.
    Good(String),
    /// The requirement is not met.
    Bad {
        /// The value found.
        found: String,
        /// A more specific fix than the one in the file, where known.
        fix: Option<String>,
    },
    /// The system does not provide the value.
    Unknown(String),
    /// There is nothing to check.
    Nothing(String),
}

fn bad(found: impl Into<String>) -> Seen {
    Seen::Bad { found: found.into(), fix: None }
}

impl Probe {
    /// Checks one requirement.
    pub fn look(&self, r: &Requirement) -> Seen {
        match r.check {
            Check::Driver => driver(),
            Check::Memory => enough(Some(devices::free_memory()), r.amount(), " of memory free"),
            Check::Disk => self.disk(r.amount()),
            Check::Cache => self.cache(),
            Check::Port => port(r.port.unwrap_or(9000)),
            Check::Coordinator => self.coordinator(),
            Check::Clock => clock(),
            Check::Files => match system::limit(Limit::Files) {
                Some(n) if n < r.amount() => bad(format!("{n} open files, {} needed", r.amount())),
                Some(u64::MAX) => Seen::Good("no limit of open files".into()),
                Some(n) => Seen::Good(format!("{n} open files")),
                None => Seen::Nothing("this system has no such limit".into()),
            },
            Check::Space => match system::limit(Limit::Space) {
                Some(u64::MAX) => Seen::Good("no limit of address space".into()),
                limit @ Some(_) => enough(limit, r.amount(), " of address space"),
                None => Seen::Nothing("this system has no such limit".into()),
            },
            Check::Token => self.token(),
        }
    }

    /// Folders for base models and the run.
    fn folders(&self) -> Vec<PathBuf> {
        let own = self.model_cache.clone().or_else(|| cache::folder().map(|dir| dir.join("models")));
        own.into_iter().chain([Hub::from_environment().cache]).collect()
    }

    fn disk(&self, needed: u64) -> Seen {
        let folders = self.folders().into_iter().chain([self.output.clone()]);
        let free = folders.filter_map(|dir| Some((system::free_disk(&dir)?, dir)));
        match free.min_by_key(|(free, _)| *free) {
            Some((free, dir)) => enough(Some(free), needed, &format!(" free for {}", dir.display())),
            None => enough(None, needed, ""),
        }
    }

    fn cache(&self) -> Seen {
        let folders = self.folders();
        for folder in &folders {
            let Ok(absolute) = std::path::absolute(folder) else { continue };
            let there = absolute.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
            if let Err(e) = tempfile::tempfile_in(there) {
                let at = there.display();
                let own = format!(
                    "sudo chown -R $USER {at}     # or another folder: --model-cache DIR, HF_HOME=DIR"
                );
                return Seen::Bad { found: format!("{at}: {e}"), fix: cfg!(unix).then_some(own) };
            }
        }
        let names: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        Seen::Good(format!("can be written: {}", names.join(", ")))
    }

    fn coordinator(&self) -> Seen {
        let Some(at) = &self.coordinator else {
            return Seen::Nothing("none was named (--coordinator HOST:PORT)".into());
        };
        let at = match at.parse::<Endpoint>() {
            Ok(at) => at,
            Err(e) => return bad(format!("--coordinator {at}: {e}")),
        };
        let token_file = self.token_file.as_deref();
        let wishes = Wishes { token_file, insecure: false, at: Some(&at), listens: false };
        match secure(Party::Worker, &wishes) {
            Ok(secured) => answered(&at, visit(&at, &secured.security)),
            Err(e) => bad(e.to_string()),
        }
    }

    fn token(&self) -> Seen {
        match Keyring::of_user(self.token_file.as_deref()).find() {
            Ok(Some(found)) => {
                Seen::Good(format!("fingerprint {}, from {}", found.token.fingerprint(), found.source))
            }
            Ok(None) => bad("none on this machine"),
            Err(KeepError::Missing(path)) => Seen::Bad {
                found: format!("{}: no such file", path.display()),
                fix: Some(format!("finetune token --token-file {}", path.display())),
            },
            Err(KeepError::Open { path, mode }) => Seen::Bad {
                found: format!("{}: others may read it (mode {mode:03o})", path.display()),
                fix: Some(format!("chmod 600 {}", path.display())),
            },
            Err(e) => bad(e.to_string()),
        }
    }
}

/// Result of a connection attempt to a coordinator. A firewall is suspected only where there was no answer.
fn answered(at: &Endpoint, visited: Result<Visit, NetError>) -> Seen {
    let (found, fix) = match visited {
        Ok(Visit::Welcome { run, model }) => {
            return Seen::Good(format!("{at} takes this machine (run {run}, model {model})"));
        }
        Ok(Visit::Over) => return Seen::Good(format!("{at} knows the token; its run is over")),
        Ok(Visit::Rejected(reason)) => return bad(format!("{at}: {reason}")),
        Err(NetError::Refused { target }) => (
            format!("nothing listens on {target}"),
            "start the coordinator there, or correct the port".into(),
        ),
        Err(NetError::TimedOut { target, .. }) => {
            let port = target.port;
            let fix = format!(
                "sudo ufw allow {port}/tcp             # on that machine; or firewall-cmd --add-port={port}/tcp"
            );
            (format!("{target} does not answer: a firewall drops it, or the machine is off"), fix)
        }
        Err(NetError::Unresolved { target, cause }) => {
            let fix = "use its address instead of its name     # `ip addr` there shows it";
            (format!("{}: unknown name ({cause})", target.host), fix.into())
        }
        Err(NetError::WrongToken { peer, theirs, ours }) => {
            (format!("{peer} has another token (fingerprint {theirs} there, {ours} here)"), SET.into())
        }
        Err(NetError::NoTokenHere { peer, theirs }) => {
            (format!("{peer} needs a token (fingerprint {theirs}) and there is none here"), SET.into())
        }
        Err(e) => return bad(e.to_string()),
    };
    Seen::Bad { found, fix: Some(fix) }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

fn enough(found: Option<u64>, needed: u64, what: &str) -> Seen {
    match found {
        None => Seen::Unknown(format!("this system does not say how much there is{what}")),
        Some(n) if n < needed => bad(format!("{}{what}, {} needed", gigabytes(n), gigabytes(needed))),
        // A system that does not report its memory is assumed to have enough.
        Some(u64::MAX) => Seen::Unknown(format!("this system does not say how much there is{what}")),
        Some(n) => Seen::Good(format!("{}{what}", gigabytes(n))),
    }
}

fn driver() -> Seen {
    let found = devices::list();
    match devices::no_gpu(&found) {
        Some(why) => Seen::Bad { found: why.what(), fix: Some(why.fix()) },
        None => {
            let cards = found.iter().filter(|d| d.backend != "cpu" && d.kind != "software");
            let broken = cards.clone().find_map(|d| Some((d, d.error.as_ref()?)));
            if let Some((device, error)) = broken {
                return bad(format!("{} ({}): {error}", device.name, device.model));
            }
            let names =
                cards.map(|d| format!("{} ({})", d.model, d.driver.as_deref().unwrap_or("driver unknown")));
            Seen::Good(names.collect::<Vec<_>>().join(", "))
        }
    }
}

fn port(port: u16) -> Seen {
    // Like a coordinator, on all interfaces of both address families.
    match TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))) {
        Ok(_) => Seen::Good(format!("{port} is free")),
        Err(e) if e.kind() == ErrorKind::AddrInUse => bad(format!("{port} is in use on this machine")),
        Err(e) => bad(format!("{port}: {e}")),
    }
}

fn clock() -> Seen {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    if now < WRITTEN {
        let fix = "sudo date -s 'YYYY-MM-DD HH:MM'     # then: sudo timedatectl set-ntp true";
        let fix = cfg!(unix).then(|| fix.to_owned());
        return Seen::Bad { found: "it shows a time before 2026".into(), fix };
    }
    match system::clock_is_kept() {
        Some(true) => Seen::Good("synchronised over the network".into()),
        Some(false) => bad("not synchronised"),
        None => Seen::Unknown("plausible; this system does not say whether it is synchronised".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Fingerprint;

    fn text(seen: Seen) -> String {
        match seen {
            Seen::Good(t) => format!("good {t}"),
            Seen::Bad { found, fix } => format!("bad {found} | {}", fix.unwrap_or_default()),
            Seen::Unknown(t) => format!("unknown {t}"),
            Seen::Nothing(t) => format!("nothing {t}"),
        }
    }

    #[test]
    fn amounts_are_compared_with_the_minimum() {
        assert_eq!(text(enough(Some(3_000_000_000), 2_000_000_000, " free")), "good 3.0 GB free");
        assert_eq!(
            text(enough(Some(1_000_000_000), 2_000_000_000, " free")),
            "bad 1.0 GB free, 2.0 GB needed | "
        );
        assert!(text(enough(None, 1, "")).starts_with("unknown"));
    }

    #[test]
    fn port_in_use_is_not_reported_free() {
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let number = taken.local_addr().unwrap().port();
        assert_eq!(text(port(number)), format!("bad {number} is in use on this machine | "));
        drop(taken);
        assert_eq!(text(port(number)), format!("good {number} is free"));
    }

    #[test]
    fn coordinator_that_refuses_gives_advice() {
        let at: Endpoint = "gpu7:9555".parse().unwrap();
        let (theirs, ours) = (Fingerprint([1; 8]), Fingerprint([2; 8]));
        for (e, want) in [
            (
                NetError::Refused { target: at.clone() },
                "bad nothing listens on gpu7:9555 | start the coordinator there",
            ),
            (
                NetError::TimedOut { target: at.clone(), seeks: Party::Coordinator },
                "| sudo ufw allow 9555/tcp ",
            ),
            (
                NetError::WrongToken { peer: at.to_string(), theirs, ours },
                "(fingerprint 0101-0101-0101-0101 there, 0202-0202-0202-0202 here) | finetune token --set",
            ),
            (
                NetError::Protocol { peer: at.to_string(), theirs: 2, ours: 1 },
                "gpu7:9555 speaks protocol 2, this finetune 1: update",
            ),
        ] {
            let got = text(answered(&at, Err(e)));
            assert!(got.contains(want), "{got}, not {want}");
        }
        let dir = tempfile::tempdir().unwrap();
        let mut probe =
            Probe { coordinator: None, token_file: None, model_cache: None, output: dir.path().into() };
        assert!(text(probe.coordinator()).starts_with("nothing"));
        probe.coordinator = Some("gpu7:0x".into());
        assert!(text(probe.coordinator()).starts_with("bad --coordinator gpu7:0x: "));
        probe.token_file = Some(dir.path().join("token"));
        let missing = text(probe.token());
        assert!(missing.contains("/token: no such file | finetune token --token-file /"), "{missing}");
    }
}
