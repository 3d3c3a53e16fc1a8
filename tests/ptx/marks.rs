//! Faults at the marks of the generator: every statement that orders others (barrier, fence, arrival, wait, copy,
//! group) is removed once, and every count of one is changed. Statements that only save time are not marked.

use crate::files;
use ptx_gen::{File, Mark};
use std::sync::LazyLock;

static FILES: LazyLock<Vec<File>> = LazyLock::new(ptx_gen::files);

/// The marks of an entry; a file written by hand has none.
pub fn of_entry(name: &str, entry: &str) -> impl Iterator<Item = &'static Mark> {
    let entry = entry.to_string();
    let file = FILES.iter().find(|f| f.name == name);
    file.into_iter().flat_map(|f| &f.marks).filter(move |m| m.entry == entry)
}

/// Injects every fault of an entry and returns those that `detects` misses; `needless` lists statements without effect.
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
