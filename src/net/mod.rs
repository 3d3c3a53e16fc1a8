//! Floor 1: tokens, TLS and frames between machines. This folder knows no model, step or message: it carries bytes
//! whose length is checked before they are read.

pub mod address;
pub mod discovery;
pub mod keyring;
pub mod token;

mod connection;
mod dial;
mod error;
mod frame;
mod greeting;
mod listen;
mod party;
mod secure;
mod tls;

pub use address::{AddressError, DEFAULT_PORT, Endpoint, default_route};
pub use connection::{Connection, Security};
pub use dial::{DIAL_TIMEOUT, dial};
pub use error::{NetError, Side};
pub use frame::{Decoder, FrameReader, FrameWriter, TooLong};
pub use greeting::PROTOCOL;
pub use listen::{Closer, Listener, Refusal};
pub use party::Party;
pub use secure::{SecureError, Secured, Wishes, await_token, invitation, secure};
pub use token::{Fingerprint, Token};
