//! The first 20 bytes in each direction, before TLS. They are not trusted. They only let both sides report why two
//! machines do not connect (no `finetune`, another build, another token) instead of a failed handshake. A false
//! greeting is refused here or fails in TLS, which checks the protocol number and the token again.
//!
//! The dialler sends first; a listener answers only to the right first eight bytes. These 20 bytes stay the same in
//! every later version.

use super::error::{NetError, Side};
use super::party::Party;
use super::token::Fingerprint;

/// The version of all messages between machines; both ends must have the same one. Raised with every change once a
/// version has been released, which is not yet the case.
pub const PROTOCOL: u16 = 1;

/// Bytes of a greeting.
pub(super) const LENGTH: usize = 20;

const MAGIC: &[u8; 8] = b"finetune";

/// The security that a side requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Means {
    /// Plain TCP.
    Plain,
    /// TLS with the token of this fingerprint.
    Token(Fingerprint),
    /// TLS without a token: this side asks for the fingerprint of the one that it needs.
    None,
}

/// The greeting of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Greeting {
    pub protocol: u16,
    pub party: Party,
    pub means: Means,
}

impl Greeting {
    /// Bytes 0..8 `finetune`; 8..10 protocol, little-endian; 10: 0 plain, 1 token, 2 no token; 11: 0 coordinator, 1
    /// worker, 2 seat of a line; 12..20 fingerprint, zeros without a token.
    pub fn bytes(&self) -> [u8; LENGTH] {
        let mut out = [0; LENGTH];
        out[..8].copy_from_slice(MAGIC);
        out[8..10].copy_from_slice(&self.protocol.to_le_bytes());
        out[11] = match self.party {
            Party::Coordinator => 0,
            Party::Worker => 1,
            Party::Seat => 2,
        };
        match self.means {
            Means::Plain => {}
            Means::None => out[10] = 2,
            Means::Token(fingerprint) => {
                out[10] = 1;
                out[12..].copy_from_slice(&fingerprint.0);
            }
        }
        out
    }

    /// Parses the greeting of `peer`. Of another version only the magic and the number are read.
    pub fn read(bytes: &[u8; LENGTH], peer: &str) -> Result<Greeting, NetError> {
        let strange = || NetError::NotFinetune { peer: peer.into(), heard: shown(bytes) };
        if !begins(bytes) {
            return Err(strange());
        }
        let protocol = u16::from_le_bytes([bytes[8], bytes[9]]);
        if protocol != PROTOCOL {
            return Err(NetError::Protocol { peer: peer.into(), theirs: protocol, ours: PROTOCOL });
        }
        let mut fingerprint = Fingerprint([0; 8]);
        fingerprint.0.copy_from_slice(&bytes[12..]);
        let means = match bytes[10] {
            0 => Means::Plain,
            1 => Means::Token(fingerprint),
            2 => Means::None,
            _ => return Err(strange()),
        };
        let party = match bytes[11] {
            0 => Party::Coordinator,
            1 => Party::Worker,
            2 => Party::Seat,
            _ => return Err(strange()),
        };
        Ok(Greeting { protocol, party, means })
    }

    /// Whether `theirs` matches this one. Security weaker than this side requires is never accepted.
    pub fn fits(&self, theirs: &Greeting, peer: &str) -> Result<(), NetError> {
        let peer = peer.to_string();
        match (self.means, theirs.means) {
            (Means::Token(ours), Means::Token(theirs)) if ours != theirs => {
                return Err(NetError::WrongToken { peer, theirs, ours });
            }
            (Means::Token(ours), Means::None) => return Err(NetError::NoTokenThere { peer, ours }),
            (Means::None, Means::Token(theirs)) => return Err(NetError::NoTokenHere { peer, theirs }),
            (Means::Token(_) | Means::None, Means::Plain) => {
                return Err(NetError::Insecure { peer, plain: Side::There });
            }
            (Means::Plain, Means::Token(_) | Means::None) => {
                return Err(NetError::Insecure { peer, plain: Side::Here });
            }
            (Means::None, Means::None) => {
                return Err(NetError::Mute { peer, how: "has no token either" });
            }
            (Means::Token(_), Means::Token(_)) | (Means::Plain, Means::Plain) => {}
        }
        match theirs.party == self.party.other() {
            true => Ok(()),
            false if theirs.party == self.party => Err(NetError::SameRole { peer, role: self.party }),
            false => Err(NetError::OtherRole { peer, role: theirs.party, sought: self.party.other() }),
        }
    }
}

/// Whether `bytes` can still become a greeting.
pub(super) fn begins(bytes: &[u8]) -> bool {
    let n = bytes.len().min(MAGIC.len());
    bytes[..n] == MAGIC[..n]
}

/// The first line of a stranger's bytes, printable, for an error message.
pub(super) fn shown(bytes: &[u8]) -> String {
    let line = bytes.split(|b| *b == b'\r' || *b == b'\n').next().unwrap_or_default();
    line.iter().map(|b| if (b' '..=b'~').contains(b) { char::from(*b) } else { '.' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting(party: Party, means: Means) -> Greeting {
        Greeting { protocol: PROTOCOL, party, means }
    }

    #[test]
    fn greeting_round_trips() {
        let token = Means::Token(Fingerprint([1, 2, 3, 4, 5, 6, 7, 8]));
        for party in [Party::Coordinator, Party::Worker, Party::Seat] {
            for means in [Means::Plain, Means::None, token] {
                let g = greeting(party, means);
                assert_eq!(Greeting::read(&g.bytes(), "x"), Ok(g));
            }
        }
        assert_eq!(
            &greeting(Party::Worker, token).bytes(),
            b"finetune\x01\0\x01\x01\x01\x02\x03\x04\x05\x06\x07\x08"
        );
    }

    /// The message that this side prints about a peer `x` with these first bytes.
    fn check(bytes: &[u8; LENGTH], expected: &str) {
        let got = Greeting::read(bytes, "x").map_or_else(|e| e.to_string(), |g| format!("{g:?}"));
        assert!(got.contains(expected), "{bytes:?}: {got}");
    }

    #[test]
    fn strangers_and_other_protocols_are_refused() {
        check(b"HTTP/1.1 400 Bad Req", "x is not finetune (it says \"HTTP/1.1 400 Bad Req\")");
        check(b"SSH-2.0-OpenSSH_9\r\nx", "x is not finetune (it says \"SSH-2.0-OpenSSH_9\")");
        check(b"finetune\x02\0??????????", "protocol 2, this finetune 1: update finetune here");
        check(b"finetune\0\0\0\0\0\0\0\0\0\0\0\0", "protocol 0, this finetune 1: update finetune there");
        check(b"finetune\x01\0\x03\0\0\0\0\0\0\0\0\0", "not finetune");
        check(b"finetune\x01\0\0\x03\0\0\0\0\0\0\0\0", "not finetune");
        check(b"finetune\x01\0\0\x09\0\0\0\0\0\0\0\0", "not finetune");
    }

    #[test]
    fn only_peers_with_equal_security_connect() {
        let (one, two) = (Means::Token(Fingerprint([1; 8])), Means::Token(Fingerprint([2; 8])));
        let fits =
            |ours, theirs| greeting(Party::Worker, ours).fits(&greeting(Party::Coordinator, theirs), "x");
        let all = [one, two, Means::Plain, Means::None];
        for ours in all {
            for theirs in all {
                let equal = ours == theirs && ours != Means::None;
                assert_eq!(fits(ours, theirs).is_ok(), equal, "{ours:?} {theirs:?}");
            }
        }
        let both = greeting(Party::Worker, one).fits(&greeting(Party::Worker, one), "x");
        assert_eq!(both.unwrap_err().to_string(), "x is a worker too: a worker needs a coordinator");
        let seats = greeting(Party::Seat, one).fits(&greeting(Party::Seat, one), "x");
        assert_eq!(seats, Ok(()));
        for other in [Party::Coordinator, Party::Worker] {
            let mixed = greeting(Party::Seat, one).fits(&greeting(other, one), "x").unwrap_err().to_string();
            assert_eq!(mixed, format!("x is a {other}, not a seat of a line: check host and port"));
        }
    }
}
