//! The ways in which two machines fail to connect. Each is one line that says what, where and what to do, and
//! whether a retry can help.

use super::DEFAULT_PORT;
use super::address::Endpoint;
use super::party::Party;
use super::token::Fingerprint;
use std::net::SocketAddr;

/// A failure between two machines. `peer` is the address as it was typed, or as the connection came in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// The name cannot be resolved.
    #[error(
        "{}: unknown name ({cause}): check its spelling, or give the address, as 10.0.0.5:{}",
        target.host, target.port
    )]
    Unresolved {
        /// The address as typed.
        target: Endpoint,
        /// The resolver's message.
        cause: String,
    },
    /// No coordinator in the local network announces our fingerprint.
    #[error(
        "no coordinator in this local network shows the token's fingerprint {ours}{}: start it, or type its \
         address: --coordinator HOST:{DEFAULT_PORT}",
        if others.is_empty() { String::new() } else { format!(" (there are {others})") }
    )]
    NotFound {
        /// Fingerprint of our token.
        ours: Fingerprint,
        /// Announced fingerprints of other tokens.
        others: String,
    },
    /// There is no token, so no fingerprint to search for.
    #[error(
        "--coordinator auto finds a token's fingerprint and there is no token here: `finetune token --set` takes it"
    )]
    NothingToFind,
    /// The machine is reachable; the port is closed.
    #[error("nothing listens on {target}: start finetune there first, or check the port")]
    Refused {
        /// The address as typed.
        target: Endpoint,
    },
    /// No answer at all.
    #[error("{target} does not answer: a firewall drops it, or the machine is off: {}", open(*seeks, target))]
    TimedOut {
        /// The address as typed.
        target: Endpoint,
        /// The role that was expected there.
        seeks: Party,
    },
    /// The network reports an error.
    #[error("{target} cannot be reached ({cause}): is the machine on, and in this network?")]
    Unreachable {
        /// The address as typed.
        target: Endpoint,
        /// The system's message.
        cause: String,
    },
    /// The peer does not speak this protocol.
    #[error("{peer} is not finetune (it says {heard:?}): check host and port")]
    NotFinetune {
        /// Address of the peer.
        peer: String,
        /// Its first bytes.
        heard: String,
    },
    /// The peer accepted the connection and sent nothing, or too little.
    #[error("{peer} took the connection and {how}: it is not finetune, or it hangs; check host and port")]
    Mute {
        /// Address of the peer.
        peer: String,
        /// What it did.
        how: &'static str,
    },
    /// Each side holds a token, and the tokens differ.
    #[error(
        "{peer} has another token (fingerprint {theirs} there, {ours} here): \
         `finetune token` there prints it, `finetune token --set` here takes it"
    )]
    WrongToken {
        /// Address of the peer.
        peer: String,
        /// Fingerprint of its token.
        theirs: Fingerprint,
        /// Fingerprint of our token.
        ours: Fingerprint,
    },
    /// There is no token on this side.
    #[error(
        "{peer} wants a token (fingerprint {theirs}) and there is none here: \
         `finetune token` there prints it, `finetune token --set` here takes it"
    )]
    NoTokenHere {
        /// Address of the peer.
        peer: String,
        /// Fingerprint of its token.
        theirs: Fingerprint,
    },
    /// There is no token on the other side.
    #[error("{peer} has no token (fingerprint {ours} here): `finetune token --set` there takes it")]
    NoTokenThere {
        /// Address of the peer.
        peer: String,
        /// Fingerprint of our token.
        ours: Fingerprint,
    },
    /// One side uses `--insecure`.
    #[error("{peer} {}", insecure(*plain))]
    Insecure {
        /// Address of the peer.
        peer: String,
        /// The side that uses it.
        plain: Side,
    },
    /// Plain TCP to another machine.
    #[error("{at} is not this machine alone, and plain TCP (--insecure) stays on it: leave --insecure out")]
    PlainFar {
        /// The address to bind or dial.
        at: Endpoint,
    },
    /// The peer shows the fingerprint of our token and does not prove that it holds the token.
    #[error("{peer} does not prove that it holds the token ({cause}): something stands between, or pretends")]
    Unproven {
        /// Address of the peer.
        peer: String,
        /// TLS's message.
        cause: String,
    },
    /// Two builds with different protocols.
    #[error(
        "{peer} speaks protocol {theirs}, this finetune {ours}: update finetune {}",
        if theirs > ours { "here" } else { "there" }
    )]
    Protocol {
        /// Address of the peer.
        peer: String,
        /// Its protocol.
        theirs: u16,
        /// Our protocol.
        ours: u16,
    },
    /// Two coordinators, or two workers.
    #[error("{peer} is a {role} too: {}", if *role == Party::Worker { "a worker needs a coordinator" } else { "a run has one" })]
    SameRole {
        /// Address of the peer.
        peer: String,
        /// The role of both.
        role: Party,
    },
    /// The other side is no party of this connection.
    #[error("{peer} is a {role}, not a {sought}: check host and port")]
    OtherRole {
        /// Address of the peer.
        peer: String,
        /// Its role.
        role: Party,
        /// The role that was expected there.
        sought: Party,
    },
    /// Another process uses the port.
    #[error("port {} is in use here: stop what uses it (another finetune?), or take another: --bind {}",
        at.port, Endpoint { port: next(at.port), ..at.clone() })]
    PortInUse {
        /// The address to bind.
        at: Endpoint,
    },
    /// Listening failed for another reason.
    #[error(
        "cannot listen on {at} ({cause}): --bind takes an address of this machine, or :{DEFAULT_PORT} for all"
    )]
    CannotListen {
        /// The address to bind.
        at: Endpoint,
        /// The system's message.
        cause: String,
    },
    /// Newer connections displaced it, or the queue of authenticated connections is full.
    #[error("{peer} was rejected: {limit} connections wait already")]
    Crowded {
        /// Address of the peer.
        peer: String,
        /// The limit.
        limit: usize,
    },
    /// The conversation is over.
    #[error("{peer} is gone ({cause})")]
    Closed {
        /// Address of the peer.
        peer: String,
        /// How it ended.
        cause: String,
    },
    /// A frame beyond the agreed limit.
    #[error("{peer} announces a frame of {length} bytes, {limit} are allowed")]
    FrameTooLong {
        /// Address of the peer.
        peer: String,
        /// The announced length.
        length: u64,
        /// The agreed limit.
        limit: usize,
    },
    /// An operation on this machine failed.
    #[error("{what}: {cause}")]
    Local {
        /// The operation.
        what: &'static str,
        /// The system's message.
        cause: String,
    },
}

impl NetError {
    /// Whether a retry is pointless until a person does something: exit code 78. A machine may still be starting
    /// (unknown name, refused, no answer) and a peer may hang only for a while; these are retried.
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
            | SameRole { .. }
            | OtherRole { .. } => true,
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
        Party::Seat => format!("open port {port} there for the workers of a line (--stages)"),
    }
}

/// One of two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// This side.
    Here,
    /// The peer's side.
    There,
}

fn insecure(plain: Side) -> &'static str {
    match plain {
        Side::There => "speaks plain TCP (--insecure) and this side does not: leave --insecure out there",
        Side::Here => "has a token and this side speaks plain TCP: leave --insecure out, set the token here",
    }
}

/// The port to propose instead.
fn next(port: u16) -> u16 {
    port.checked_add(1).unwrap_or(DEFAULT_PORT)
}

/// The system's message without Rust's error number.
pub(super) fn words(e: &std::io::Error) -> String {
    let text = e.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// The meaning of an I/O error once the conversation has started.
pub(super) fn ended(peer: SocketAddr, e: &std::io::Error) -> NetError {
    use std::io::ErrorKind::*;
    let cause = match e.kind() {
        UnexpectedEof => "it closed the connection".into(),
        ConnectionReset | BrokenPipe | ConnectionAborted => "the connection broke".into(),
        _ => words(e),
    };
    NetError::Closed { peer: peer.to_string(), cause }
}
