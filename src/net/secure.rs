//! What a role does about safety, decided in one place before anything is opened. The token that is found is
//! used. Plain TCP comes only with `--insecure`, or where no token can be kept because there is no home folder
//! to write to; it stays on this machine, and it is said.

use super::address::{DEFAULT_PORT, Endpoint, default_route};
use super::connection::Security;
use super::error::NetError;
use super::greeting::Party;
use super::keyring::{self, Found, KeepError};
use std::net::SocketAddr;
use std::path::Path;

/// What the user of a role said.
#[derive(Debug, Clone, Copy)]
pub struct Wishes<'a> {
    /// --token-file.
    pub token_file: Option<&'a Path>,
    /// --insecure.
    pub insecure: bool,
    /// The address that was typed, to listen on or to dial.
    pub at: Option<&'a Endpoint>,
    /// Whether this side listens there: one that listens must have a token.
    pub listens: bool,
}

/// What follows from it.
pub struct Secured {
    /// For [`super::Listener::bind`] and [`super::dial`].
    pub security: Security,
    /// Where to listen or what to dial: what was typed, else the default port, on all interfaces or (plain) on
    /// this machine alone.
    pub at: Endpoint,
    /// The token that is used.
    pub found: Option<Found>,
    /// Lines to print.
    pub notes: Vec<String>,
}

/// Why a role cannot be safe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecureError {
    /// The token.
    #[error(transparent)]
    Keep(#[from] KeepError),
    /// Its key.
    #[error(transparent)]
    Net(#[from] NetError),
}

/// Finds the token, or makes one where a coordinator has none.
pub fn secure(party: Party, wishes: &Wishes) -> Result<Secured, SecureError> {
    let typed = wishes.at.cloned();
    if wishes.insecure {
        let notes = vec!["plain TCP without a token (--insecure), on this machine only".to_string()];
        let at = typed.unwrap_or(Endpoint::loopback(DEFAULT_PORT));
        return Ok(Secured { security: Security::plain(party), at, found: None, notes });
    }
    let near = typed.as_ref().is_none_or(Endpoint::is_loopback);
    let makes = party == Party::Coordinator;
    let found = match makes {
        true => keyring::find_or_make(wishes.token_file).map(Some),
        false => keyring::find(wishes.token_file),
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
        // A coordinator has tried to write; a worker only looks whether one could have been written.
        Err(e @ (KeepError::File { .. } | KeepError::NoHome)) if makes && near && own(wishes) => {
            Ok(homeless(format!("none can be kept: {e}")))
        }
        Ok(None) if near && !writable() => Ok(homeless("none can be kept here".into())),
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

/// No file was named and none that is there was found wanting.
fn own(wishes: &Wishes) -> bool {
    wishes.token_file.is_none() && keyring::own_file().is_none_or(|path| !path.exists())
}

/// Whether the user's file could be made: asked of the nearest folder that is there, by making a file in it.
fn writable() -> bool {
    let Some(path) = keyring::own_file() else { return false };
    let folder = path.ancestors().skip(1).find(|p| p.is_dir());
    folder.is_some_and(|folder| tempfile::tempfile_in(folder).is_ok())
}

fn said(found: &Found) -> Vec<String> {
    let fingerprint = found.token.fingerprint();
    vec![match found.made {
        true => format!("made a token, fingerprint {fingerprint}, kept in {}", found.source),
        false => format!("token with fingerprint {fingerprint}, from {}", found.source),
    }]
}

/// What to type on the next machine, token step included; for plain TCP, in the next terminal. `at` is what was
/// bound, `typed` what --bind said.
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
        Some(_) => vec![
            "finetune token --set   # once on another machine: paste what `finetune token` prints here"
                .into(),
            worker,
        ],
        None => vec![format!("{worker} --insecure")],
    }
}
