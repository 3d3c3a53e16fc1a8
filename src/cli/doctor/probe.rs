//! Looks at one thing after the other and says what is there. Nothing is changed: a file that shows that a folder can
//! be written has no name and is gone when it is closed, a port is let go at once, no token is made.

use super::super::{demo, devices};
use super::requirement::{Check, Requirement};
use super::system::{self, Limit};
use crate::format::hub::Hub;
use crate::net::keyring::{KeepError, Keyring};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a coordinator is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// This was written after it (the start of 2026): a clock that says less is wrong.
const WRITTEN: u64 = 1_767_225_600;

/// What was named on the command line.
pub struct Probe {
    /// HOST:PORT.
    pub coordinator: Option<String>,
    /// Where the token is.
    pub token_file: Option<PathBuf>,
    /// Where a worker keeps base models.
    pub model_cache: Option<PathBuf>,
    /// Where a run would write.
    pub output: PathBuf,
}

/// What was seen.
pub enum Seen {
    /// It is there.
    Good(String),
    /// It is not, or not enough of it.
    Bad {
        /// What there is instead.
        found: String,
        /// What helps, where that is known better than the file knows it.
        mend: Option<String>,
    },
    /// The system does not say.
    Unknown(String),
    /// There is nothing to look at.
    Nothing(String),
}

fn bad(found: impl Into<String>) -> Seen {
    Seen::Bad { found: found.into(), mend: None }
}

impl Probe {
    /// Looks at one of them.
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
                Some(n) if n < r.amount() => bad(format!("{n} open files, {} wanted", r.amount())),
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

    /// Folders that base models and a run are written to.
    fn folders(&self) -> Vec<PathBuf> {
        let own = self.model_cache.clone().or_else(|| demo::cache().map(|dir| dir.join("models")));
        own.into_iter().chain([Hub::from_environment().cache]).collect()
    }

    fn disk(&self, wanted: u64) -> Seen {
        let folders = self.folders().into_iter().chain([self.output.clone()]);
        let free = folders.filter_map(|dir| Some((system::free_disk(&dir)?, dir)));
        match free.min_by_key(|(free, _)| *free) {
            Some((free, dir)) => enough(Some(free), wanted, &format!(" free for {}", dir.display())),
            None => enough(None, wanted, ""),
        }
    }

    fn cache(&self) -> Seen {
        let folders = self.folders();
        for folder in &folders {
            let Ok(absolute) = std::path::absolute(folder) else { continue };
            let there = absolute.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
            if let Err(e) = tempfile::tempfile_in(there) {
                let at = there.display();
                let mend = format!(
                    "sudo chown -R $USER {at}     # or another folder: --model-cache DIR, HF_HOME=DIR"
                );
                return Seen::Bad { found: format!("{at}: {e}"), mend: Some(mend) };
            }
        }
        let names: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        Seen::Good(format!("can be written: {}", names.join(", ")))
    }

    fn coordinator(&self) -> Seen {
        let Some(at) = &self.coordinator else {
            return Seen::Nothing("none was named (--coordinator HOST:PORT)".into());
        };
        let named = if at.contains(':') { at.clone() } else { format!("{at}:9000") };
        let addresses = match named.to_socket_addrs() {
            Ok(addresses) => addresses,
            Err(e) => {
                let mend = Some("use its address instead of its name     # `ip addr` there shows it".into());
                return Seen::Bad { found: format!("{named}: {e}"), mend };
            }
        };
        let mut last = format!("{named}: no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, PATIENCE) {
                Ok(_) => return Seen::Good(format!("{named} answers")),
                Err(e) => last = format!("{named}: {e}"),
            }
        }
        bad(last)
    }

    fn token(&self) -> Seen {
        match Keyring::of_user(self.token_file.as_deref()).find() {
            Ok(Some(found)) => {
                Seen::Good(format!("fingerprint {}, from {}", found.token.fingerprint(), found.source))
            }
            Ok(None) => bad("none on this machine"),
            // The part behind the last colon is the way out.
            Err(e @ (KeepError::Open { .. } | KeepError::Missing(_))) => {
                let line = e.to_string();
                let (found, mend) = line.rsplit_once(": ").unwrap_or((&line, ""));
                Seen::Bad { found: found.into(), mend: Some(mend.into()).filter(|m: &String| !m.is_empty()) }
            }
            Err(e) => bad(e.to_string()),
        }
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

fn enough(found: Option<u64>, wanted: u64, what: &str) -> Seen {
    match found {
        None => Seen::Unknown(format!("this system does not say how much there is{what}")),
        Some(n) if n < wanted => bad(format!("{}{what}, {} wanted", gigabytes(n), gigabytes(wanted))),
        // A system that does not say how much memory it has is believed to have enough.
        Some(u64::MAX) => Seen::Unknown(format!("this system does not say how much there is{what}")),
        Some(n) => Seen::Good(format!("{}{what}", gigabytes(n))),
    }
}

fn driver() -> Seen {
    let found = devices::list();
    match devices::no_gpu(&found) {
        Some(why) => {
            let (found, mend) = why.split_once(": ").unwrap_or((why.as_str(), ""));
            Seen::Bad { found: found.into(), mend: Some(mend.into()).filter(|m: &String| !m.is_empty()) }
        }
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
    // As a coordinator does, on all interfaces of both families.
    match TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))) {
        Ok(_) => Seen::Good(format!("{port} is free")),
        Err(e) => bad(format!("{port}: {e}")),
    }
}

fn clock() -> Seen {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    if now < WRITTEN {
        let mend = "sudo date -s 'YYYY-MM-DD HH:MM'     # then: sudo timedatectl set-ntp true";
        return Seen::Bad { found: "it says a time before 2026".into(), mend: Some(mend.into()) };
    }
    match system::clock_is_kept() {
        Some(true) => Seen::Good("kept right by the network".into()),
        Some(false) => bad("nothing keeps it right"),
        None => Seen::Unknown("plausible; nobody could be asked whether it is kept right".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(seen: Seen) -> String {
        match seen {
            Seen::Good(t) => format!("good {t}"),
            Seen::Bad { found, mend } => format!("bad {found} | {}", mend.unwrap_or_default()),
            Seen::Unknown(t) => format!("unknown {t}"),
            Seen::Nothing(t) => format!("nothing {t}"),
        }
    }

    #[test]
    fn amounts() {
        assert_eq!(text(enough(Some(3_000_000_000), 2_000_000_000, " free")), "good 3.0 GB free");
        assert_eq!(
            text(enough(Some(1_000_000_000), 2_000_000_000, " free")),
            "bad 1.0 GB free, 2.0 GB wanted | "
        );
        assert!(text(enough(None, 1, "")).starts_with("unknown"));
    }

    #[test]
    fn a_port_that_somebody_has_is_not_free() {
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let number = taken.local_addr().unwrap().port();
        assert!(text(port(number)).starts_with(&format!("bad {number}: ")));
        drop(taken);
        assert_eq!(text(port(number)), format!("good {number} is free"));
    }

    #[test]
    fn a_coordinator_that_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let mut probe =
            Probe { coordinator: None, token_file: None, model_cache: None, output: dir.path().into() };
        assert!(text(probe.coordinator()).starts_with("nothing"));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().to_string();
        probe.coordinator = Some(at.clone());
        assert_eq!(text(probe.coordinator()), format!("good {at} answers"));
        drop(listener);
        assert!(text(probe.coordinator()).starts_with(&format!("bad {at}: ")));
        probe.token_file = Some(dir.path().join("token"));
        let missing = text(probe.token());
        assert!(missing.contains("| `finetune token --token-file"), "{missing}");
    }
}
