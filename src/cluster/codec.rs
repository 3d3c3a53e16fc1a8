//! Encodes messages as bodies of frames and back, without copying bulk data. An outgoing body is a head made by
//! postcard and the bulk data in its own memory; decoded bulk data is a part of the frame's memory. On the wire the
//! body is the plain postcard encoding of the message.

use bytes::{Buf, Bytes};
use postcard::ser_flavors::Flavor;
use serde::{Serialize, de::DeserializeOwned};
use std::cell::RefCell;

/// A frame's body: `head`, then `bulk`.
#[derive(Debug, Clone)]
pub struct Body {
    head: Bytes,
    bulk: Bytes,
}

impl Body {
    /// The whole body, for a writer.
    pub fn into_buf(self) -> impl Buf + Send {
        self.head.chain(self.bulk)
    }

    /// The whole body in one buffer.
    pub fn whole(self) -> Bytes {
        if self.bulk.is_empty() { self.head } else { [self.head, self.bulk].concat().into() }
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a message is never empty")]
    pub fn len(&self) -> usize {
        self.head.len() + self.bulk.len()
    }
}

/// A message that may end with bulk data, which [`bulk`](Bulky::bulk) returns.
pub trait Bulky {
    /// The data that the message ends with.
    fn bulk(&self) -> Option<&Bytes>;
}

/// Encodes a message as the body of a frame.
pub fn encode<M: Serialize + Bulky>(message: &M) -> Result<Body, String> {
    let bulk = message.bulk().cloned().unwrap_or_default();
    let head = Head { bytes: Vec::with_capacity(64), bulk: &bulk, left_out: false };
    let done = postcard::serialize_with_flavor(message, head);
    let (head, left_out) = done.map_err(|e| format!("a message cannot be encoded: {e}"))?;
    Ok(Body { head: head.into(), bulk: if left_out { bulk } else { Bytes::new() } })
}

/// Collects the output of postcard without the bulk data, which must come last.
struct Head<'a> {
    bytes: Vec<u8>,
    bulk: &'a Bytes,
    left_out: bool,
}

impl Flavor for Head<'_> {
    type Output = (Vec<u8>, bool);

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        if self.left_out {
            return Err(postcard::Error::SerializeSeqLengthUnknown);
        }
        // The same memory, not only equal bytes.
        self.left_out = !data.is_empty() && std::ptr::eq(data, &self.bulk[..]);
        if !self.left_out {
            self.bytes.extend_from_slice(data);
        }
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Self::Output> {
        Ok((self.bytes, self.left_out))
    }
}

/// Decodes the body of a frame. Remaining bytes are an error.
pub fn decode<M: DeserializeOwned>(frame: &Bytes) -> Result<M, String> {
    let before = FRAME.replace(frame.clone());
    let taken = postcard::take_from_bytes(frame);
    FRAME.replace(before);
    match taken {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(format!("said something that is no message: {} bytes too many", rest.len())),
        Err(e) => Err(format!("said something that is no message: {e}")),
    }
}

thread_local! {
    /// The frame that [`decode`] reads on this thread. serde gives a field only its slice; the memory that the slice
    /// belongs to has to be passed separately.
    static FRAME: RefCell<Bytes> = const { RefCell::new(Bytes::new()) };
}

/// Serialization of fields that hold bulk data: `#[serde(with = "in_place")]`.
pub mod in_place {
    use super::FRAME;
    use bytes::Bytes;
    use serde::{Deserializer, Serialize, Serializer, de};
    use std::fmt;

    /// Serializes as bytes.
    pub fn serialize<S: Serializer>(bytes: &Bytes, to: S) -> Result<S::Ok, S::Error> {
        bytes.serialize(to)
    }

    /// A part of the frame that is being decoded, or a copy if the bytes are not in that frame.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
        from.deserialize_bytes(Lying)
    }

    struct Lying;

    impl<'de> de::Visitor<'de> for Lying {
        type Value = Bytes;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Bytes, E> {
            Ok(FRAME.with_borrow(|frame| {
                let (frame_at, at) = (frame.as_ptr_range(), bytes.as_ptr_range());
                let within = frame_at.start <= at.start && at.end <= frame_at.end;
                if within { frame.slice_ref(bytes) } else { Bytes::copy_from_slice(bytes) }
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::message::{Packed, ToCoordinator, ToWorker};

    fn check<M: Serialize + DeserializeOwned + Bulky + PartialEq + std::fmt::Debug>(message: M, bulk: usize) {
        let body = encode(&message).unwrap();
        assert_eq!(body.bulk.len(), bulk, "{message:?}");
        if let Some(sent) = message.bulk().filter(|bytes| !bytes.is_empty()) {
            assert!(std::ptr::eq(&sent[..], &body.bulk[..]), "it was copied");
        }
        let frame = body.whole();
        assert_eq!(frame, postcard::to_stdvec(&message).unwrap(), "the plain encoding");
        let heard: M = decode(&frame).unwrap();
        assert_eq!(heard, message);
        if let Some(heard) = heard.bulk().filter(|bytes| !bytes.is_empty()) {
            assert!(frame.as_ptr_range().contains(&heard.as_ptr()), "it was copied");
        }
    }

    #[test]
    fn bulk_is_not_copied_and_the_encoding_is_plain() {
        for len in [0, 1, 127, 128, 70_000] {
            let bytes = Bytes::from(vec![7u8; len]);
            for packed in [Packed::Fixed(bytes.clone()), Packed::Single(bytes.clone())] {
                check(ToCoordinator::SumPiece { sum: 3, offset: 1 << 40, len: 9, packed }, len);
            }
            check(ToWorker::ParametersPiece { step: 300, offset: 5, bytes: bytes.clone() }, len);
            check(ToWorker::Piece { file: 1, offset: 2, bytes }, len);
        }
        check(ToCoordinator::Leave { reason: "done".into() }, 0);
        check(ToWorker::Flush { step: 1, relays: None }, 0);
    }

    #[test]
    fn every_truncated_message_is_refused() {
        let message = ToWorker::Piece { file: 1, offset: 2, bytes: vec![1; 40].into() };
        let frame = encode(&message).unwrap().whole();
        for cut in 0..frame.len() {
            assert!(decode::<ToWorker>(&frame.slice(..cut)).is_err());
        }
    }
}
