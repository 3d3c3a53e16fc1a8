//! Faults at the marks that the generator leaves: every statement that orders others (barrier, fence, arrival, wait, copy,
//! group) is taken away once, and every count of one is changed. What only costs time is not marked.

use crate::files;
use ptx_gen::{File, Mark};
use std::sync::LazyLock;

static FILES: LazyLock<Vec<File>> = LazyLock::new(ptx_gen::files);

/// The marks of an entry; a file by hand has none.
pub fn of_entry(name: &str, entry: &str) -> impl Iterator<Item = &'static Mark> {
    let entry = entry.to_string();
    let file = FILES.iter().find(|f| f.name == name);
    file.into_iter().flat_map(|f| &f.marks).filter(move |m| m.entry == entry)
}

/// Puts in every fault of an entry and names those that `detects` misses; `needless` says which statements have no effect.
pub fn undetected(
    (name, entry): (&str, &str),
    needless: impl Fn(&Mark) -> bool,
    detects: impl Fn(&str) -> bool,
) -> Vec<String> {
    let text = files::read(name).text;
    let marks: Vec<&Mark> = of_entry(name, entry).filter(|m| !needless(m)).collect();
    assert!(!marks.is_empty(), "{entry} has marks");
    let faults = marks.into_iter().flat_map(|m| m.faults(&text).into_iter().enumerate().map(move |f| (m, f)));
    let missed = faults.filter(|(_, (_, changed))| !detects(changed));
    missed
        .map(|(m, (n, _))| format!("{entry}: fault {n} at `{}` goes undetected", &text[m.at.clone()]))
        .collect()
}
