//! The security of a role, decided in one place before a port or connection is opened. A found token is used. Plain
//! TCP is used only with `--insecure`, or if no token can be kept because there is no writable home folder. Plain
//! TCP stays on this machine and is reported.

use super::address::{DEFAULT_PORT, Endpoint, default_route};
use super::connection::Security;
use super::error::NetError;
use super::keyring::{FoundToken, KeepError, Keyring};
use super::party::Party;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

/// The user's options for a role.
#[derive(Debug, Clone, Copy)]
pub struct Wishes<'a> {
    /// --token-file.
    pub token_file: Option<&'a Path>,
    /// --insecure.
    pub insecure: bool,
    /// The typed address, to listen on or to dial.
    pub at: Option<&'a Endpoint>,
    /// Whether this side listens there. A listening side must have a token.
    pub listens: bool,
}

/// The resulting security.
pub struct Secured {
    /// For [`super::Listener::bind`] and [`super::dial`].
    pub security: Security,
    /// Where to listen or what to dial: the typed address, else the default port, on all interfaces or (plain) on
    /// loopback.
    pub at: Endpoint,
    /// The token that is used.
    pub found: Option<FoundToken>,
    /// Lines to print.
    pub notes: Vec<String>,
}

/// Why a role cannot be secured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecureError {
    /// The token is not available.
    #[error(transparent)]
    Keep(#[from] KeepError),
    /// The token's key cannot be made.
    #[error(transparent)]
    Net(#[from] NetError),
}

/// Finds the token, or creates one for a coordinator that has none.
pub fn secure(party: Party, wishes: &Wishes) -> Result<Secured, SecureError> {
    secure_by(party, wishes, &Keyring::of_user(wishes.token_file))
}

/// Waits until a worker's token is there, at most for `patience`: an engine may start a worker before the coordinator has
/// made the token in the home folder that they share. `wait` is called before each further look, with the line that
/// says what is missing.
pub fn await_token(
    wishes: &Wishes,
    patience: Duration,
    wait: &mut dyn FnMut(&str),
) -> Result<(), SecureError> {
    await_by(wishes, patience, wait, &Keyring::of_user(wishes.token_file))
}

fn await_by(
    wishes: &Wishes,
    patience: Duration,
    wait: &mut dyn FnMut(&str),
    keyring: &Keyring,
) -> Result<(), SecureError> {
    let began = Instant::now();
    loop {
        let missing = match keyring.find() {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if wishes.insecure || !keyring.is_writable() => return Ok(()),
            Ok(None) => KeepError::NoToken,
            Err(e @ KeepError::Missing(_)) => e,
            Err(e) => return Err(e.into()),
        };
        if began.elapsed() >= patience {
            return Err(missing.into());
        }
        wait(&missing.to_string());
    }
}

fn secure_by(party: Party, wishes: &Wishes, keyring: &Keyring) -> Result<Secured, SecureError> {
    let typed = wishes.at.cloned();
    if wishes.insecure {
        let notes = vec!["plain TCP without a token (--insecure), on this machine only".to_string()];
        let at = typed.unwrap_or(Endpoint::loopback(DEFAULT_PORT));
        return Ok(Secured { security: Security::plain(party), at, found: None, notes });
    }
    let near = typed.as_ref().is_none_or(Endpoint::is_loopback);
    let makes = party == Party::Coordinator;
    let found = match makes {
        true => keyring.find_or_make().map(Some),
        false => keyring.find(),
    };
    let homeless = |why: String| Secured {
        security: Security::plain(party),
        at: typed.clone().unwrap_or(Endpoint::loopback(DEFAULT_PORT)),
        found: None,
        notes: vec![format!("plain TCP without a token, on this machine only ({why})")],
    };
    match found {
        Ok(Some(found)) => Ok(Secured {
            security: Security::with_token(party, &found.token)?,
            at: typed.unwrap_or(Endpoint::everywhere(DEFAULT_PORT)),
            notes: said(&found),
            found: Some(found),
        }),
        // A coordinator has tried to write; a worker only checks whether a file could be written.
        Err(e @ (KeepError::File { .. } | KeepError::NoHome)) if makes && near && keyring.is_bare() => {
            Ok(homeless(format!("none can be kept: {e}")))
        }
        Ok(None) if near && !keyring.is_writable() => Ok(homeless("none can be kept here".into())),
        Ok(None) if wishes.listens => Err(KeepError::NoToken.into()),
        Ok(None) => Ok(Secured {
            security: Security::without_token(party),
            at: typed.unwrap_or(Endpoint::loopback(DEFAULT_PORT)),
            found: None,
            notes: Vec::new(),
        }),
        Err(e) => Err(e.into()),
    }
}

fn said(found: &FoundToken) -> Vec<String> {
    let fingerprint = found.token.fingerprint();
    vec![match found.made {
        true => format!("made a token, fingerprint {fingerprint}, kept in {}", found.source),
        false => format!("token with fingerprint {fingerprint}, from {}", found.source),
    }]
}

/// The commands for the next machine, with the token step; on loopback, for the next terminal, which finds the same
/// token. `at` is the bound address, `typed` the value of --bind.
pub fn invitation(at: SocketAddr, typed: &Endpoint, security: &Security) -> Vec<String> {
    let host = match (at.ip().is_unspecified(), typed.host.parse::<std::net::IpAddr>()) {
        (true, _) => default_route().map_or_else(|| "THIS-MACHINE".to_string(), |ip| ip.to_string()),
        (false, Ok(ip)) => ip.to_string(),
        (false, Err(_)) if typed.host.is_empty() => at.ip().to_string(),
        (false, Err(_)) => typed.host.clone(),
    };
    let address = Endpoint { host, port: at.port() };
    let worker = format!("finetune --role worker --coordinator {address}");
    match security.fingerprint() {
        Some(_) if at.ip().to_canonical().is_loopback() => vec![worker],
        Some(_) => vec![
            "finetune token --set   # once on another machine: paste what `finetune token` prints on this machine"
                .into(),
            worker,
        ],
        None => vec![format!("{worker} --insecure")],
    }
}

#[cfg(test)]
mod tests {
    use super::super::token::Token;
    use super::*;

    /// Checks the security of `party` with a keyring, at a typed address (or none): one word for it, and the
    /// address.
    fn check(party: Party, keyring: &Keyring, typed: &str, expected: &str) {
        let at: Option<Endpoint> = (!typed.is_empty()).then(|| typed.parse().unwrap());
        let listens = party == Party::Coordinator || typed.starts_with(':');
        let wishes = Wishes { token_file: None, insecure: false, at: at.as_ref(), listens };
        let got = match secure_by(party, &wishes, keyring) {
            Ok(s) if s.security.is_plain() => format!("plain {} {}", s.at, s.notes.len()),
            Ok(s) => {
                format!("{} {}", s.found.map_or("none", |f| if f.made { "made" } else { "token" }), s.at)
            }
            Err(e) => e.to_string(),
        };
        assert!(got.contains(expected), "{party} {typed:?}: {got}, not {expected}");
    }

    #[test]
    fn plain_tcp_is_local_and_only_where_no_token_can_be_kept() {
        use Party::{Coordinator, Worker};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("finetune/token");
        let empty = Keyring::alone(Some(path.clone()));
        check(Worker, &empty, "host:9000", "none host:9000");
        check(Worker, &empty, "127.0.0.1:9000", "none 127.0.0.1:9000");
        check(Worker, &empty, ":9001", "no token here");
        check(Coordinator, &empty, "", "made :9000");
        check(Coordinator, &empty, ":7", "token :7");
        check(Worker, &empty, "host:9000", "token host:9000");
        check(Worker, &empty, ":9001", "token :9001");

        // The folder is a file: no user can keep a token there.
        std::fs::write(folder.path().join("file"), "").unwrap();
        let full = Keyring::alone(Some(folder.path().join("file/finetune/token")));
        for homeless in [Keyring::alone(None), full] {
            check(Coordinator, &homeless, "", "plain 127.0.0.1:9000 1");
            check(Coordinator, &homeless, "localhost:7", "plain localhost:7 1");
            check(Coordinator, &homeless, ":9000", "");
            check(Worker, &homeless, "127.0.0.1:9000", "plain 127.0.0.1:9000 1");
            check(Worker, &homeless, "host:9000", "none host:9000");
            let far = "0.0.0.0:9000".parse().unwrap();
            let wishes = Wishes { token_file: None, insecure: false, at: Some(&far), listens: true };
            assert!(secure_by(Coordinator, &wishes, &homeless).is_err(), "plain TCP for all the world");
        }
        // An existing invalid token is never skipped.
        std::fs::write(&path, "hunter2").unwrap();
        check(Coordinator, &empty, "", "token: ");
        check(Worker, &empty, "127.0.0.1:9000", "token: ");
    }

    #[test]
    fn worker_waits_for_the_token_of_a_shared_home() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("finetune/token");
        let keyring = Keyring::alone(Some(path.clone()));
        let wishes = Wishes { token_file: None, insecure: false, at: None, listens: false };
        let patience = Duration::from_secs(600);
        let mut looks = 0;
        let mut wait = |line: &str| {
            assert!(line.contains("no token here"), "{line}");
            looks += 1;
            if looks == 3 {
                keyring.find_or_make().unwrap();
            }
        };
        await_by(&wishes, patience, &mut wait, &keyring).unwrap();
        assert_eq!(looks, 3);
        await_by(&wishes, patience, &mut |_| panic!("it is there"), &keyring).unwrap();

        std::fs::remove_file(&path).unwrap();
        let late = await_by(&wishes, Duration::ZERO, &mut |_| (), &keyring).unwrap_err().to_string();
        assert!(late.contains("no token here"), "{late}");
        // Nothing comes where none can be kept, and plain TCP needs none.
        await_by(&wishes, patience, &mut |_| panic!("waits"), &Keyring::alone(None)).unwrap();
        let plain = Wishes { insecure: true, ..wishes };
        await_by(&plain, patience, &mut |_| panic!("waits"), &keyring).unwrap();
    }

    #[test]
    fn invitation_prints_commands_for_the_next_machine() {
        let token = Security::with_token(Party::Coordinator, &Token::random().unwrap()).unwrap();
        let lines = |at: &str, typed: &str, security: &Security| {
            invitation(at.parse().unwrap(), &typed.parse().unwrap(), security)
        };
        let got = lines("10.0.0.5:9000", "10.0.0.5:9000", &token);
        assert!(got[0].starts_with("finetune token --set "), "{got:?}");
        assert_eq!(got[1..], ["finetune --role worker --coordinator 10.0.0.5:9000"]);
        let got = lines("[::]:9000", ":9000", &token);
        let host = default_route().map_or("THIS-MACHINE".into(), |ip| ip.to_string());
        let address = Endpoint { host, port: 9000 };
        assert_eq!(got[1..], [format!("finetune --role worker --coordinator {address}")]);
        assert_eq!(lines("10.1.1.1:7", "gpu3:7", &token)[1], "finetune --role worker --coordinator gpu3:7");
        let got = lines("127.0.0.1:9000", "localhost:9000", &token);
        assert_eq!(got, ["finetune --role worker --coordinator localhost:9000"]);
        let plain = Security::plain(Party::Coordinator);
        let got = lines("127.0.0.1:9000", "127.0.0.1:9000", &plain);
        assert_eq!(got, ["finetune --role worker --coordinator 127.0.0.1:9000 --insecure"]);
    }
}
