//! The secret that machines of one run share, and what is derived from it. It is 32 random bytes, because whoever
//! dials sees a public key made from it and could try guesses at leisure. It is never an argument (others read
//! those), never printed by `Debug`, and a file with it is for its owner alone.

use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;

/// Bytes of a token.
const BYTES: usize = 32;

/// In front of the form with a checksum.
const PREFIX: &str = "ft1-";

/// Letters and digits of that form (RFC 4648, lower case): none is lost when it is read aloud or typed.
const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// Bytes of the checksum.
const CHECK: usize = 4;

/// Fewer different bytes than this among 32 do not come from a random generator (odds below 1e-9).
const LEAST_DIFFERENT: usize = 16;

/// The shared secret.
#[derive(Clone)]
pub struct Token([u8; BYTES]);

/// What may be shown of a token: another HKDF output than its key, so that it tells nothing of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 8]);

/// Why a text is no token. The text itself is never repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadToken {
    /// Too little to be safe.
    #[error(
        "not a token: {bits} bits at most, which could be guessed; `finetune token` makes one of 256 bits"
    )]
    Short {
        /// At most what it holds.
        bits: usize,
    },
    /// Neither form.
    #[error("not a token: a token is 64 hex digits, or what `finetune token` prints ({PREFIX}...)")]
    Form,
    /// The form of ours, mistyped.
    #[error("the token is damaged (its checksum does not fit): copy it again, whole")]
    Checksum,
    /// 32 bytes that somebody made up.
    #[error("the token is not random ({different} different bytes among 32): `finetune token` makes one")]
    MadeUp {
        /// How many.
        different: usize,
    },
}

/// No random bytes from the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system gives no random bytes, so no token can be made")]
pub struct NoRandom;

impl Token {
    /// A new one.
    pub fn random() -> Result<Self, NoRandom> {
        let mut bytes = [0; BYTES];
        SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandom)?;
        Ok(Token(bytes))
    }

    /// Reads either form; blanks and line breaks around it are put up with.
    pub fn parse(text: &str) -> Result<Self, BadToken> {
        let text = text.trim();
        let token = match text.get(..PREFIX.len()) {
            Some(start) if start.eq_ignore_ascii_case(PREFIX) => Token(checked(&text[PREFIX.len()..])?),
            _ => Token(hex(text)?),
        };
        let mut seen = [false; 256];
        token.0.iter().for_each(|b| seen[usize::from(*b)] = true);
        match seen.iter().filter(|s| **s).count() {
            different if different < LEAST_DIFFERENT => Err(BadToken::MadeUp { different }),
            _ => Ok(token),
        }
    }

    /// The form with a checksum: what `finetune token` prints.
    pub fn text(&self) -> String {
        let mut bytes = self.0.to_vec();
        bytes.extend(checksum(&self.0));
        let digit = |i: usize| {
            let at = |k: usize| u16::from(bytes.get(k).copied().unwrap_or(0));
            let pair = at(i * 5 / 8) << 8 | at(i * 5 / 8 + 1);
            char::from(LETTERS[usize::from(pair >> (11 - i * 5 % 8) & 31)])
        };
        let digits: String = (0..(bytes.len() * 8).div_ceil(5)).map(digit).collect();
        format!("{PREFIX}{digits}")
    }

    /// What may be shown.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint(self.derive(b"finetune fingerprint 1"))
    }

    /// Secret or public bytes for one purpose: HKDF-SHA256 under the purpose's own label.
    pub fn derive<const N: usize>(&self, label: &[u8]) -> [u8; N] {
        struct Length(usize);
        impl KeyType for Length {
            fn len(&self) -> usize {
                self.0
            }
        }
        let mut out = [0; N];
        let key = Salt::new(HKDF_SHA256, b"finetune token 1").extract(&self.0);
        let filled = key.expand(&[label], Length(N)).and_then(|okm| okm.fill(&mut out));
        assert!(filled.is_ok(), "HKDF-SHA256 gives up to 8160 bytes");
        out
    }
}

/// Never the secret.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Token({})", self.fingerprint())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let pairs: Vec<String> = self.0.chunks(2).map(|p| format!("{:02x}{:02x}", p[0], p[1])).collect();
        f.write_str(&pairs.join("-"))
    }
}

fn checksum(bytes: &[u8]) -> [u8; CHECK] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"finetune token checksum").update(bytes);
    let mut out = [0; CHECK];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..CHECK]);
    out
}

fn checked(digits: &str) -> Result<[u8; BYTES], BadToken> {
    let whole = ((BYTES + CHECK) * 8).div_ceil(5);
    if !digits.is_ascii() || digits.len() != whole {
        return Err(BadToken::Checksum);
    }
    let mut bytes = [0u8; BYTES + CHECK];
    let (mut window, mut bits, mut at) = (0u16, 0, 0);
    for c in digits.bytes().map(|c| c.to_ascii_lowercase()) {
        let digit = LETTERS.iter().position(|l| *l == c).ok_or(BadToken::Checksum)?;
        window = window << 5 | digit as u16;
        bits += 5;
        if bits >= 8 && at < bytes.len() {
            bits -= 8;
            bytes[at] = (window >> bits) as u8;
            at += 1;
        }
    }
    let mut token = [0; BYTES];
    token.copy_from_slice(&bytes[..BYTES]);
    // 58 digits hold two bits more than 36 bytes: one text per token.
    let rest = window & ((1 << bits) - 1);
    match rest == 0 && checksum(&token) == bytes[BYTES..] {
        true => Ok(token),
        false => Err(BadToken::Checksum),
    }
}

fn hex(text: &str) -> Result<[u8; BYTES], BadToken> {
    let digits = text.chars().all(|c| c.is_ascii_hexdigit());
    // A password of n characters is at most n bytes, and far less in truth.
    let bits = if digits { text.len() * 4 } else { text.len() * 8 };
    if bits < 128 {
        return Err(BadToken::Short { bits });
    }
    if !digits || text.len() != 2 * BYTES {
        return Err(BadToken::Form);
    }
    let mut bytes = [0; BYTES];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digit = |c: u8| char::from(c).to_digit(16).unwrap_or(0) as u8;
        *byte = digit(pair[0]) << 4 | digit(pair[1]);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

    fn check(text: &str, expected: &str) {
        let got = match Token::parse(text) {
            Ok(t) => t.fingerprint().to_string(),
            Err(e) => e.to_string(),
        };
        assert!(got.contains(expected), "{text:?}: {got}");
        assert!(text.is_empty() || text.len() < 5 || !got.contains(text.trim()), "repeats what was typed");
    }

    #[test]
    fn hex_and_text_forms_are_one_token() {
        let token = Token::parse(HEX).unwrap();
        let shown = token.fingerprint().to_string();
        check(&format!("  {}\n", HEX.to_uppercase()), &shown);
        check(&token.text(), &shown);
        check(&token.text().to_uppercase(), &shown);
        for _ in 0..50 {
            let token = Token::random().unwrap();
            assert_eq!(Token::parse(&token.text()).unwrap().0, token.0);
            assert_eq!(token.text().len(), 62);
        }
    }

    /// Written down once: a change of any label or form would lock machines of two builds out.
    #[test]
    fn token_forms_are_stable() {
        let token = Token::parse(HEX).unwrap();
        assert_eq!(token.text(), "ft1-aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypxdr7p6y");
        assert_eq!(token.fingerprint().to_string(), "d8c1-e0e2-9f37-5f43");
    }

    #[test]
    fn every_mistyped_letter_is_detected() {
        let text = Token::parse(HEX).unwrap().text();
        for at in PREFIX.len()..text.len() {
            let mut wrong = text.clone().into_bytes();
            wrong[at] = if wrong[at] == b'x' { b'y' } else { b'x' };
            let wrong = String::from_utf8(wrong).unwrap();
            assert_eq!(Token::parse(&wrong).unwrap_err(), BadToken::Checksum, "{wrong}");
        }
        for cut in PREFIX.len()..text.len() {
            assert!(Token::parse(&text[..cut]).is_err());
        }
    }

    #[test]
    fn guessable_token_is_refused() {
        check("", "0 bits");
        check("hunter2", "56 bits at most");
        check("deadbeefdeadbeefdeadbeef", "96 bits at most");
        check("deadbeefdeadbeefdeadbeefdeadbeef", "64 hex digits");
        check("correct horse battery staple", "64 hex digits");
        check(&"ab".repeat(32), "not random (1 different");
        check(&"0123456789abcdef".repeat(4), "not random (8 different");
        check(&HEX[..63], "64 hex digits");
        check("ft1-é", "damaged");
    }

    #[test]
    fn debug_shows_no_secret() {
        let token = Token::parse(HEX).unwrap();
        assert_eq!(format!("{token:?}"), format!("Token({})", token.fingerprint()));
    }
}
