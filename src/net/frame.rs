//! A frame is its length (u32, little-endian), then that many bytes. The length is compared with the limit before
//! memory is allocated. A longer frame ends the conversation, because the next frame cannot be found after it.

use super::error::{NetError, ended};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of the length.
const HEADER: usize = 4;

/// Bytes that are reserved while the next length is unknown.
const AHEAD: usize = 8 << 10;

/// The frame is longer than the agreed limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLong {
    /// The announced length.
    pub length: u64,
}

/// Decodes frames from bytes that arrive in any parts. Performs no I/O: the caller puts bytes into
/// [`Decoder::space`].
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    limit: usize,
}

impl Decoder {
    /// A decoder for frames of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Decoder { buffer: BytesMut::new(), limit }
    }

    /// The next complete frame, or `None` if more bytes are needed.
    pub fn next_frame(&mut self) -> Result<Option<Bytes>, TooLong> {
        match self.announced()? {
            Some(length) if self.buffer.len() >= HEADER + length => {
                self.buffer.advance(HEADER);
                Ok(Some(self.buffer.split_to(length).freeze()))
            }
            _ => Ok(None),
        }
    }

    /// The buffer for the next bytes. Space is reserved for the announced frame, never for more than the limit.
    pub fn space(&mut self) -> Result<&mut BytesMut, TooLong> {
        let wanted = match self.announced()? {
            Some(length) => (HEADER + length).saturating_sub(self.buffer.len()),
            None => 0,
        };
        self.buffer.reserve(wanted.max(AHEAD));
        Ok(&mut self.buffer)
    }

    /// Whether the buffer is empty: true between two frames.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The length of the frame at the start of the buffer.
    fn announced(&self) -> Result<Option<usize>, TooLong> {
        let Some(header) = self.buffer.first_chunk::<HEADER>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header);
        match usize::try_from(length) {
            Ok(n) if n <= self.limit => Ok(Some(n)),
            _ => Err(TooLong { length: length.into() }),
        }
    }
}

type Input = Box<dyn AsyncRead + Send + Unpin>;
type Output = Box<dyn AsyncWrite + Send + Unpin>;

/// The receiving half of a connection.
pub struct FrameReader {
    input: Input,
    decoder: Decoder,
    peer: SocketAddr,
    heard: Arc<AtomicU64>,
}

/// The sending half of a connection. The connection closes when both halves are dropped.
pub struct FrameWriter {
    output: Output,
    limit: usize,
    peer: SocketAddr,
}

impl FrameReader {
    pub(super) fn new(input: Input, limit: usize, peer: SocketAddr) -> Self {
        FrameReader { input, decoder: Decoder::new(limit), peer, heard: Arc::default() }
    }

    /// Waits for the next frame. Cancel safe: received bytes stay in the buffer.
    pub async fn next(&mut self) -> Result<Bytes, NetError> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| self.too_long(e))? {
                return Ok(frame);
            }
            let limit = self.decoder.limit;
            let peer = self.peer;
            let space = self.decoder.space().map_err(|e| too_long(peer, e, limit))?;
            match self.input.read_buf(space).await {
                Ok(0) => return Err(ended(peer, &std::io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => drop(self.heard.fetch_add(n as u64, Ordering::Relaxed)),
                Err(e) => return Err(ended(peer, &e)),
            }
        }
    }

    /// The address of the peer.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Counter of received bytes, which shows whether any arrive.
    pub fn heard(&self) -> Arc<AtomicU64> {
        self.heard.clone()
    }

    fn too_long(&self, e: TooLong) -> NetError {
        too_long(self.peer, e, self.decoder.limit)
    }
}

fn too_long(peer: SocketAddr, e: TooLong, limit: usize) -> NetError {
    NetError::FrameTooLong { peer: peer.to_string(), length: e.length, limit }
}

impl FrameWriter {
    pub(super) fn new(output: Output, limit: usize, peer: SocketAddr) -> Self {
        FrameWriter { output, limit, peer }
    }

    /// Sends a frame and flushes it.
    pub async fn send(&mut self, body: impl Buf) -> Result<(), NetError> {
        self.feed(body).await?;
        self.flush().await
    }

    /// Sends a frame that may wait for [`FrameWriter::flush`], so that small frames travel together. Not cancel
    /// safe: a dropped future may leave part of a frame behind, and the connection is then unusable.
    pub async fn feed(&mut self, body: impl Buf) -> Result<(), NetError> {
        let length = u32::try_from(body.remaining()).ok().filter(|_| body.remaining() <= self.limit);
        let Some(length) = length else {
            return Err(too_long(self.peer, TooLong { length: body.remaining() as u64 }, self.limit));
        };
        let mut header = BytesMut::with_capacity(HEADER);
        header.put_u32_le(length);
        let mut frame = header.freeze().chain(body);
        self.output.write_all_buf(&mut frame).await.map_err(|e| ended(self.peer, &e))
    }

    /// Flushes all frames.
    pub async fn flush(&mut self) -> Result<(), NetError> {
        self.output.flush().await.map_err(|e| ended(self.peer, &e))
    }

    /// Tells the peer that no more frames follow.
    pub async fn close(&mut self) -> Result<(), NetError> {
        self.output.shutdown().await.map_err(|e| ended(self.peer, &e))
    }

    /// The address of the peer.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(frames: &[Vec<u8>]) -> Vec<u8> {
        frames.iter().flat_map(|f| [&(f.len() as u32).to_le_bytes()[..], f].concat()).collect()
    }

    proptest! {
        /// The same frames result wherever the bytes are cut.
        #[test]
        fn any_split_of_bytes_gives_the_same_frames(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            cuts in prop::collection::vec(1usize..64, 1..40),
        ) {
            let bytes = encode(&frames);
            let mut decoder = Decoder::new(200);
            let (mut got, mut at) = (Vec::new(), 0);
            for cut in cuts.iter().cycle().take(bytes.len() + 1) {
                let end = (at + cut).min(bytes.len());
                decoder.space().unwrap().extend_from_slice(&bytes[at..end]);
                at = end;
                while let Some(frame) = decoder.next_frame().unwrap() {
                    got.push(frame.to_vec());
                }
            }
            prop_assert_eq!(got, frames);
            prop_assert!(decoder.is_empty());
        }

        /// Arbitrary bytes cause no panic, no frame beyond the limit and no memory for more than one frame.
        #[test]
        fn random_bytes_stay_bounded(bytes in prop::collection::vec(any::<u8>(), 0..4096), limit in 0usize..600) {
            let mut decoder = Decoder::new(limit);
            for part in bytes.chunks(97) {
                match decoder.space() {
                    Ok(space) => space.extend_from_slice(part),
                    Err(e) => {
                        prop_assert!(e.length > limit as u64);
                        return Ok(());
                    }
                }
                while let Ok(Some(frame)) = decoder.next_frame() {
                    prop_assert!(frame.len() <= limit);
                }
                prop_assert!(decoder.buffer.capacity() <= 4 * (limit + AHEAD + 4096));
            }
        }
    }

    #[test]
    fn huge_length_is_refused_before_allocation() {
        let mut decoder = Decoder::new(1 << 20);
        decoder.space().unwrap().extend_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(decoder.next_frame(), Err(TooLong { length: u32::MAX.into() }));
        assert_eq!(decoder.space().err(), Some(TooLong { length: u32::MAX.into() }));
        assert!(decoder.buffer.capacity() < 2 * AHEAD);
    }
}
