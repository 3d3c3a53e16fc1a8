//! The command line of benches.

/// The number after an option, or `default` without it.
pub fn option(name: &str, default: usize) -> usize {
    let all: Vec<String> = std::env::args().collect();
    let at = all.iter().position(|a| a == name);
    let value = at.and_then(|i| all.get(i + 1));
    value.map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name} takes a number, not `{v}`")))
}
