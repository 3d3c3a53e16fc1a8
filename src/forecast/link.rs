//! --link: the speed of a network in common notation. A lower-case b means bits, a capital B means bytes.

use super::profile::Link;
use crate::config::Settings;
use crate::config::refusal::Refusal;

/// Assumed link of a home network.
pub const ASSUMED: Link = Link { bandwidth: 110e6, round_trip: 0.0005 };

/// Assumed operations per second of an unknown device.
pub const UNKNOWN: f64 = 0.1e12;

/// The typed link.
pub fn typed(s: &Settings) -> Result<Option<Link>, Refusal> {
    let Some(text) = s.text("link")? else { return Ok(None) };
    let read = read(text).map(|bandwidth| Link { bandwidth, ..ASSUMED });
    let why = || s.malformed("link", format!("{text:?} is no speed of a network, as 1gbit, 100mbit or 50MB"));
    read.map(Some).ok_or_else(why)
}

/// Bytes per second. About a ninth of the nominal bit rate is subtracted for headers.
fn read(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    let unit = text[end..].trim().trim_end_matches("/s");
    let bits = |n: f64| n / 8.0 * 0.88;
    let factor = match unit {
        "gbit" | "Gbit" | "Gbps" | "gbps" => bits(1e9),
        "mbit" | "Mbit" | "Mbps" | "mbps" => bits(1e6),
        "kbit" | "Kbit" | "kbps" => bits(1e3),
        "GB" => 1e9,
        "MB" => 1e6,
        "kB" | "KB" => 1e3,
        _ => return None,
    };
    Some(number * factor).filter(|v| v.is_finite() && *v > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_speeds_are_parsed() {
        for (text, expected) in [
            ("1gbit", Some(110e6)),
            ("2.5Gbit/s", Some(275e6)),
            ("100mbit", Some(11e6)),
            ("50MB", Some(50e6)),
            ("50 MB/s", Some(50e6)),
            ("0gbit", None),
            ("1", None),
            ("fast", None),
            ("-1gbit", None),
        ] {
            let got = read(text);
            let near = got.zip(expected).is_some_and(|(a, b)| (a - b).abs() < 1.0);
            assert!(near || got == expected, "{text}: {got:?}");
        }
    }
}
