//! Compression of HTTP responses: a page with many devices is a megabyte, and a twentieth of that compressed.

use bytes::Bytes;
use hyper::header::{self, HeaderMap};
use std::io::Read;

/// Encoding of a response, as the client requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Uncompressed.
    Plain,
    /// Compressed with gzip.
    Gzip,
}

impl Packing {
    /// Gzip if the client accepts `gzip` with a weight above 0.
    pub fn of(headers: &HeaderMap) -> Self {
        let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|h| h.to_str().ok());
        let gzip = accepted.into_iter().flat_map(|all| all.split(',')).any(|one| {
            let (name, weight) = one.split_once(';').unwrap_or((one, ""));
            let none = weight.trim().strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0));
            name.trim().eq_ignore_ascii_case("gzip") && !none
        });
        if gzip { Packing::Gzip } else { Packing::Plain }
    }

    /// The text in this encoding.
    pub fn pack(self, text: impl Into<Bytes>) -> Bytes {
        let text = text.into();
        match self {
            Packing::Plain => text,
            Packing::Gzip => {
                let mut packer = flate2::read::GzEncoder::new(&text[..], flate2::Compression::new(4));
                let mut packed = Vec::new();
                // Reading from memory cannot fail.
                let _ = packer.read_to_end(&mut packed);
                packed.into()
            }
        }
    }
}
