//! Numbers with the noun that they count, for lines of text.

/// A count with its noun: `1 microbatch`, `72 microbatches`.
pub fn count(n: u64, what: &str) -> String {
    let plural = if what.ends_with("ch") { "es" } else { "s" };
    format!("{n} {what}{}", if n == 1 { "" } else { plural })
}
