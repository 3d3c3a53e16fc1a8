//! Every way in which two machines do not come together, told apart: each is one line that says what, where and
//! what to do, and whether trying again could help.

use super::DEFAULT_PORT;
use super::address::Endpoint;
use super::party::Party;
use super::token::Fingerprint;
use std::net::SocketAddr;

/// What went wrong between two machines. `peer` is the address as it was typed, or as it came in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// The name means nothing.
    #[error(
        "{}: unknown name ({cause}): check its spelling, or give the address, as 10.0.0.5:{}",
        target.host, target.port
    )]
    Unresolved {
        /// As typed.
        target: Endpoint,
        /// The resolver's words.
        cause: String,
    },
    /// Nobody in the local network shows our fingerprint.
    #[error(
        "no coordinator in this local network shows the token's fingerprint {ours}{}: start it, or type its \
         address: --coordinator HOST:{DEFAULT_PORT}",
        if others.is_empty() { String::new() } else { format!(" (there are {others})") }
    )]
    NotFound {
        /// Ours.
        ours: Fingerprint,
        /// Of other tokens.
        others: String,
    },
    /// No token, so no fingerprint to look for.
    #[error(
        "--coordinator auto finds a token's fingerprint and there is no token here: `finetune token --set` takes it"
    )]
    NothingToFind,
    /// The machine is there, the port is not.
    #[error("nothing listens on {target}: start finetune there first, or check the port")]
    Refused {
        /// As typed.
        target: Endpoint,
    },
    /// No answer at all.
    #[error("{target} does not answer: a firewall drops it, or the machine is off: {}", open(*seeks, target))]
    TimedOut {
        /// As typed.
        target: Endpoint,
        /// What was to be there.
        seeks: Party,
    },
    /// The network says no.
    #[error("{target} cannot be reached ({cause}): is the machine on, and in this network?")]
    Unreachable {
        /// As typed.
        target: Endpoint,
        /// The system's words.
        cause: String,
    },
    /// It answered in another language.
    #[error("{peer} is not finetune (it says {heard:?}): check host and port")]
    NotFinetune {
        /// Which.
        peer: String,
        /// The first bytes.
        heard: String,
    },
    /// It took the connection and nothing came, or too little.
    #[error("{peer} took the connection and {how}: it is not finetune, or it hangs; check host and port")]
    Mute {
        /// Which.
        peer: String,
        /// What it did instead.
        how: &'static str,
    },
    /// Both hold a token, not the same one.
    #[error(
        "{peer} has another token (fingerprint {theirs} there, {ours} here): \
         `finetune token` there prints it, `finetune token --set` here takes it"
    )]
    WrongToken {
        /// Which.
        peer: String,
        /// Its token's.
        theirs: Fingerprint,
        /// Ours.
        ours: Fingerprint,
    },
    /// There is no token on this side.
    #[error(
        "{peer} wants a token (fingerprint {theirs}) and there is none here: \
         `finetune token` there prints it, `finetune token --set` here takes it"
    )]
    NoTokenHere {
        /// Which.
        peer: String,
        /// Its token's.
        theirs: Fingerprint,
    },
    /// There is no token on the other side.
    #[error("{peer} has no token (fingerprint {ours} here): `finetune token --set` there takes it")]
    NoTokenThere {
        /// Which.
        peer: String,
        /// Ours.
        ours: Fingerprint,
    },
    /// One side is `--insecure`.
    #[error("{peer} {}", insecure(*plain))]
    Insecure {
        /// Which.
        peer: String,
        /// The side that is.
        plain: Side,
    },
    /// Plain TCP to another machine.
    #[error("{at} is not this machine alone, and plain TCP (--insecure) stays on it: leave --insecure out")]
    PlainFar {
        /// What was to be bound or dialled.
        at: Endpoint,
    },
    /// It shows the fingerprint of our token and cannot prove that it holds it.
    #[error("{peer} does not prove that it holds the token ({cause}): something stands between, or pretends")]
    Unproven {
        /// Which.
        peer: String,
        /// TLS's words.
        cause: String,
    },
    /// Two builds that do not understand each other.
    #[error(
        "{peer} speaks protocol {theirs}, this finetune {ours}: update finetune {}",
        if theirs > ours { "here" } else { "there" }
    )]
    Protocol {
        /// Which.
        peer: String,
        /// Its number.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// Two coordinators, or two workers.
    #[error("{peer} is a {role} too: {}", if *role == Party::Worker { "a worker needs a coordinator" } else { "a run has one" })]
    SameRole {
        /// Which.
        peer: String,
        /// What both are.
        role: Party,
    },
    /// Somebody has the port.
    #[error("port {} is in use here: stop what uses it (another finetune?), or take another: --bind {}",
        at.port, Endpoint { port: next(at.port), ..at.clone() })]
    PortInUse {
        /// What was to be bound.
        at: Endpoint,
    },
    /// It cannot listen there for another reason.
    #[error(
        "cannot listen on {at} ({cause}): --bind takes an address of this machine, or :{DEFAULT_PORT} for all"
    )]
    CannotListen {
        /// What was to be bound.
        at: Endpoint,
        /// The system's words.
        cause: String,
    },
    /// Other connections pushed it out, or more wait than can be taken.
    #[error("{peer} was rejected: {limit} connections wait already")]
    Crowded {
        /// Which.
        peer: String,
        /// How many may.
        limit: usize,
    },
    /// The conversation is over.
    #[error("{peer} is gone ({cause})")]
    Closed {
        /// Which.
        peer: String,
        /// How it ended.
        cause: String,
    },
    /// A frame that nobody may send.
    #[error("{peer} announces a frame of {length} bytes, {limit} are allowed")]
    FrameTooLong {
        /// Who.
        peer: String,
        /// What it said.
        length: u64,
        /// What was agreed.
        limit: usize,
    },
    /// This machine fails.
    #[error("{what}: {cause}")]
    Local {
        /// What was tried.
        what: &'static str,
        /// The system's words.
        cause: String,
    },
}

impl NetError {
    /// True where trying again is no use until a person does something: exit 78. What may be a machine that is
    /// still starting (unknown name, refused, no answer) is tried again, and so is a peer that hangs.
    pub fn is_final(&self) -> bool {
        use NetError::*;
        match self {
            Unresolved { .. } | Refused { .. } | TimedOut { .. } | Unreachable { .. } | Mute { .. } => false,
            // A process that is still ending may hold the port.
            PortInUse { .. } | NotFound { .. } | Closed { .. } | Crowded { .. } | Local { .. } => false,
            NotFinetune { .. } | WrongToken { .. } | NoTokenHere { .. } | NoTokenThere { .. } => true,
            NothingToFind
            | Insecure { .. }
            | PlainFar { .. }
            | Unproven { .. }
            | Protocol { .. }
            | SameRole { .. } => true,
            CannotListen { .. } | FrameTooLong { .. } => true,
        }
    }
}

fn open(seeks: Party, target: &Endpoint) -> String {
    let port = target.port;
    match seeks {
        Party::Coordinator => {
            format!(
                "open port {port} there, or let it dial you: --role worker --bind :9001 here, --nodes there"
            )
        }
        Party::Worker => {
            format!("open port {port} there, or let it dial you: --role worker --coordinator there")
        }
    }
}

/// One of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Ours.
    Here,
    /// The peer's.
    There,
}

fn insecure(plain: Side) -> &'static str {
    match plain {
        Side::There => "speaks plain TCP (--insecure) and this side does not: leave --insecure out there",
        Side::Here => "has a token and this side speaks plain TCP: leave --insecure out, set the token here",
    }
}

/// A port to propose instead.
fn next(port: u16) -> u16 {
    port.checked_add(1).unwrap_or(DEFAULT_PORT)
}

/// The system's words without Rust's number behind them.
pub(super) fn words(e: &std::io::Error) -> String {
    let text = e.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// What a connected peer's failure means once the conversation has begun.
pub(super) fn ended(peer: SocketAddr, e: &std::io::Error) -> NetError {
    use std::io::ErrorKind::*;
    let cause = match e.kind() {
        UnexpectedEof => "it closed the connection".into(),
        ConnectionReset | BrokenPipe | ConnectionAborted => "the connection broke".into(),
        _ => words(e),
    };
    NetError::Closed { peer: peer.to_string(), cause }
}
