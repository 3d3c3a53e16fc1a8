//! Faults at the marks that the generator leaves: every statement that orders others (barrier, fence, arrival, wait, copy,
//! group) is taken away once, and every count of one is changed. What only costs time is not marked.

use ptx_gen::{File, Mark};
use std::sync::LazyLock;

static FILES: LazyLock<Vec<File>> = LazyLock::new(ptx_gen::files);

/// The generated file of that name.
pub fn file(name: &str) -> &'static File {
    FILES.iter().find(|f| f.name == name).unwrap_or_else(|| panic!("{name} is not generated"))
}

/// The marks of an entry.
pub fn of_entry(name: &str, entry: &str) -> impl Iterator<Item = &'static Mark> {
    let entry = entry.to_string();
    file(name).marks.iter().filter(move |m| m.entry == entry)
}

/// Puts in every fault of an entry and names those that `detects` misses; `needless` are labels of waits without effect.
pub fn undetected(
    (name, entry): (&str, &str),
    needless: &[&str],
    detects: impl Fn(&str) -> bool,
) -> Vec<String> {
    let text = &file(name).text;
    let marks: Vec<&Mark> = of_entry(name, entry).filter(|m| !needless.contains(&&*m.label)).collect();
    assert!(!marks.is_empty(), "{entry} has marks");
    let faults = marks.into_iter().flat_map(|m| m.faults(text).into_iter().enumerate().map(move |f| (m, f)));
    let missed = faults.filter(|(_, (_, changed))| !detects(changed));
    missed
        .map(|(m, (n, _))| format!("{entry}: fault {n} at `{}` goes undetected", &text[m.at.clone()]))
        .collect()
}
