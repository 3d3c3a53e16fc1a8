//! A link over an authenticated connection.

use super::super::codec::Body;
use super::{Link, ReadFrames, Spoken, WriteFrames, over};
use crate::cluster::message::FRAME_LIMIT;
use crate::net::{Connection, FrameReader, FrameWriter, NetError};
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

impl ReadFrames for FrameReader {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        match FrameReader::next(self).await {
            Ok(frame) => Ok(Some(frame)),
            Err(NetError::Closed { .. }) => Ok(None),
            Err(e) => Err(e.to_string()),
        }
    }

    fn heard(&self) -> Arc<AtomicU64> {
        FrameReader::heard(self)
    }
}

impl WriteFrames for FrameWriter {
    async fn send(&mut self, frame: Body) -> Result<(), String> {
        FrameWriter::send(self, frame.into_buf()).await.map_err(|e| e.to_string())
    }

    async fn finish(&mut self) {
        // If the peer has closed already, this fails without effect.
        let _ = self.close().await;
    }
}

/// A link over `connection`; see [`over`].
pub fn connected<Out: Spoken>(
    runtime: &tokio::runtime::Handle,
    connection: Connection,
    silence: Duration,
) -> Link<Out, Out::Other> {
    let (reader, writer) = connection.split(FRAME_LIMIT);
    over(runtime, reader, writer, silence)
}
