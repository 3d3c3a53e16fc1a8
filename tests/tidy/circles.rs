//! The files of a folder use one another in one direction only: files that form a circle are one file in parts.
//!
//! The entries of a folder are its files and its folders. `mod.rs` represents the folder itself and is no entry: the
//! files may use its definitions. A name that `mod.rs` only re-exports belongs to the file that defines it.

use crate::floors::{module, paths, rooted, spread};
use crate::shape::judge;
use crate::source::{File, Tree, words};
use std::collections::{BTreeMap, BTreeSet};

type Module = Vec<String>;
/// The entries of a folder, the entries that each of them uses, and the line of that use.
type Arrows = BTreeMap<String, BTreeMap<String, String>>;

/// Folders with a circle.
pub fn circles(tree: &Tree, allowed: &[(&str, &str)]) -> Vec<String> {
    let found = folders(tree).into_iter().filter_map(|(folder, arrows)| {
        let path = [vec!["crate".to_string()], folder].concat().join("::");
        let inside = in_circles(&arrows);
        (!inside.is_empty()).then(|| (path.clone(), format!("{path}:\n    {}", inside.join("\n    "))))
    });
    judge(found.collect(), allowed)
}

/// Uses of an entry that leads back to the using one.
fn in_circles(arrows: &Arrows) -> Vec<String> {
    let mut out = Vec::new();
    for (from, named) in arrows {
        let circle = named.iter().filter(|(to, _)| reached(arrows, to).contains(from));
        out.extend(circle.map(|(to, line)| format!("{from} -> {to} ({line})")));
    }
    out
}

/// All entries that are reachable.
fn reached<'a>(arrows: &'a Arrows, from: &'a str) -> BTreeSet<&'a String> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(named) = next.pop().and_then(|entry| arrows.get(entry)) {
        next.extend(named.keys().filter(|to| seen.insert(*to)).map(String::as_str));
        next.retain(|entry| arrows.contains_key(*entry));
    }
    seen
}

fn folders(tree: &Tree) -> BTreeMap<Module, Arrows> {
    let modules: BTreeMap<Module, &File> = tree.program().map(|f| (module(&f.path), f)).collect();
    let imports = modules.iter().map(|(module, file)| (module.clone(), imports(module, file))).collect();
    let mut folders: BTreeMap<Module, Arrows> = BTreeMap::new();
    for (from, file) in &modules {
        for (line, path) in paths(file) {
            let to = definition(&imports, path, 0);
            let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            let (Some(entry), Some(named)) = (from.get(shared), to.get(shared)) else { continue };
            let entry = folders.entry(to[..shared].to_vec()).or_default().entry(entry.clone()).or_default();
            entry.entry(named.clone()).or_insert(format!("{}:{line}", file.path));
        }
    }
    folders
}

/// The names that a file imports, and their paths.
fn imports(module: &Module, file: &File) -> BTreeMap<String, Module> {
    let mut names = BTreeMap::new();
    for at in words(&file.shipped, "use") {
        let (mut base, rest) = rooted(file.shipped[at + 3..].trim_start(), module.clone());
        spread(rest, &mut base, &mut |path| {
            path.last().map(|name| names.insert(name.clone(), path.to_vec()));
        });
    }
    names
}

/// The module that defines the item of a path: imports are followed, a few times at most.
fn definition(all: &BTreeMap<Module, BTreeMap<String, Module>>, path: Module, depth: usize) -> Module {
    let Some(n) = (0..=path.len()).rev().find(|&n| all.contains_key(&path[..n])) else {
        return Module::new();
    };
    let import = path.get(n).and_then(|name| all[&path[..n]].get(name));
    match import.filter(|import| depth < 5 && **import != path) {
        Some(import) => definition(all, [import, &path[n + 1..]].concat(), depth + 1),
        None => path[..n].to_vec(),
    }
}

#[test]
fn a_circle_of_files_is_detected() {
    let two = "pub mod b; pub mod c;";
    let cases: &[(&[(&str, &str)], usize)] = &[
        (&[("src/a/mod.rs", two), ("src/a/b.rs", "use super::c::C;"), ("src/a/c.rs", "use super::b::B;")], 1),
        (&[("src/a/mod.rs", two), ("src/a/b.rs", "use super::c::C;"), ("src/a/c.rs", "use super::A;")], 0),
        (
            &[
                ("src/a/mod.rs", "mod b; pub mod c; pub use b::B;"),
                ("src/a/b.rs", "use super::c::C;"),
                ("src/a/c.rs", "use crate::a::B;"),
            ],
            1,
        ),
        (
            &[
                ("src/a/mod.rs", two),
                ("src/a/b/mod.rs", "mod x;"),
                ("src/a/b/x.rs", "use super::super::c::C;"),
                ("src/a/c.rs", "fn f() { crate::a::b::x::g() }"),
            ],
            1,
        ),
        (&[("src/a/b.rs", "use super::c::C;"), ("src/a/c.rs", "use super::d::D;"), ("src/a/d.rs", "")], 0),
        (
            &[
                ("src/a/b.rs", "use super::c::C;"),
                ("src/a/c.rs", "use super::d::D;"),
                ("src/a/d.rs", "use super::b::B;"),
            ],
            1,
        ),
        (
            &[
                ("src/a/b.rs", "use super::c::C;"),
                ("src/a/c.rs", "// super::b\n#[cfg(test)]\nmod tests { use super::super::b::B; }"),
            ],
            0,
        ),
    ];
    for (files, want) in cases {
        let found = circles(&Tree::of(files), &[]);
        assert_eq!(found.len(), *want, "{files:?}: {found:?}");
        let allowed = circles(&Tree::of(files), &[("crate::a", "why")]);
        assert_eq!(allowed.len(), 1 - want, "allowed, or no longer needed: {allowed:?}");
    }
}
