//! No circle of modules inside a folder of `src`, so that one of them can be read without all the others. A module is a
//! file with the files below it; those may name one another.

use crate::floors::{module, paths};
use crate::shape::judge;
use crate::source::Tree;
use std::collections::{BTreeMap, BTreeSet};

/// What each module of a folder names in that folder. What stands in `mod.rs` itself is the module `mod`.
type Names = BTreeMap<String, BTreeSet<String>>;

pub fn check(tree: &Tree, allowed: &[(&str, &str)]) -> Vec<String> {
    let mut found = Vec::new();
    for (folder, names) in folders(tree) {
        let circles = names.keys().filter_map(|start| circle(&names, start));
        if let Some(shortest) = circles.min_by_key(Vec::len) {
            let path = format!("src/{folder}");
            found.push((path.clone(), format!("{path}: {}", shortest.join(" -> "))));
        }
    }
    judge(found, allowed)
}

fn folders(tree: &Tree) -> BTreeMap<String, Names> {
    let mut folders: BTreeMap<String, Names> = BTreeMap::new();
    for file in tree.rust("src/") {
        if let [folder, rest @ ..] = &module(&file.path)[..] {
            let name = rest.first().map_or("mod", String::as_str);
            folders.entry(folder.clone()).or_default().entry(name.into()).or_default();
        }
    }
    for file in tree.rust("src/") {
        let own = module(&file.path);
        let Some(names) = own.first().and_then(|folder| folders.get_mut(folder)) else { continue };
        let name = own.get(1).map_or("mod", String::as_str).to_string();
        for (_, path) in paths(file).iter().filter(|(_, path)| path.first() == own.first()) {
            let seen = path.get(1).filter(|seen| names.contains_key(*seen)).map_or("mod", String::as_str);
            if seen != name
                && let Some(all) = names.get_mut(&name)
            {
                all.insert(seen.to_string());
            }
        }
    }
    folders
}

/// The shortest way from `start` back to it.
fn circle(names: &Names, start: &str) -> Option<Vec<String>> {
    let mut ways = vec![vec![start.to_string()]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            for next in names.get(way.last()?)? {
                let mut way = way.clone();
                way.push(next.clone());
                if next == start {
                    return Some(way);
                }
                if seen.insert(next.clone()) {
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

#[test]
fn circles_are_found() {
    let a = ("src/x/a.rs", "use super::b::B;");
    let (to_a, to_c) = (("src/x/b.rs", "use crate::x::a::A;"), ("src/x/b.rs", "use super::c;"));
    let below = ("src/x/c/d.rs", "fn f() { super::super::a::g() }");
    assert_eq!(check(&Tree::of(&[a, to_a]), &[]), ["src/x: a -> b -> a"]);
    assert_eq!(check(&Tree::of(&[a, to_c]), &[]), Vec::<String>::new());
    assert_eq!(check(&Tree::of(&[a, to_c, below]), &[]), ["src/x: a -> b -> c -> a"]);
    let root = ("src/x/mod.rs", "pub struct B;");
    let in_root = ("src/x/a.rs", "use super::B;");
    assert_eq!(check(&Tree::of(&[root, in_root]), &[]), Vec::<String>::new());
    assert_eq!(check(&Tree::of(&[a, to_a]), &[("src/x", "why")]), Vec::<String>::new());
}
