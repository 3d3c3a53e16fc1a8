//! Relative links of Markdown files, with their anchors, and paths `docs/...md` in code, kernels, recipes and texts: a
//! link to a file or heading that does not exist is a finding.

use crate::source::{File, Tree};
use std::collections::HashSet;

/// `exists` answers for files that are no text, such as pictures.
pub fn check(tree: &Tree, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let files: HashSet<&str> = tree.files.iter().map(|f| f.path.as_str()).collect();
    let mut found = Vec::new();
    for file in &tree.files {
        if file.path.ends_with(".md") {
            for (line, link) in links(&file.text) {
                let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
                let target = if path.is_empty() { file.path.clone() } else { resolve(&file.path, path) };
                let missing = !files.contains(target.as_str()) && !exists(&target);
                if missing {
                    found.push(format!("{}:{line}: there is no {target}", file.path));
                } else if !anchor.is_empty() && !has_heading(tree, &target, anchor) {
                    found.push(format!("{}:{line}: {target} has no heading #{anchor}", file.path));
                }
            }
        }
        if !["docs/journal/", "tests/tidy/"].iter().any(|folder| file.path.starts_with(folder)) {
            found.extend(
                mentions(file)
                    .filter(|(_, path)| !files.contains(path))
                    .map(|(line, path)| format!("{}:{line}: there is no {path}", file.path)),
            );
        }
    }
    found
}

/// The text outside fenced blocks, with the number of each line.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(n, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((n + 1, line))
    })
}

/// Targets of `[...](target)`, `src="target"` and `srcset="target"` that name no other host.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (n, line) in prose(text) {
        for (opening, closing) in [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"')] {
            for (at, _) in line.match_indices(opening) {
                let target = line[at + opening.len()..].split(closing).next().unwrap_or_default();
                if !target.contains("://") && !target.starts_with("mailto:") {
                    found.push((n, target.to_string()));
                }
            }
        }
    }
    found
}

/// `path` as seen from the folder of `from`.
fn resolve(from: &str, path: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Whether a heading of `path` has the anchor that GitHub gives it.
fn has_heading(tree: &Tree, path: &str, anchor: &str) -> bool {
    let Some(file) = tree.files.iter().find(|f| f.path == path) else { return false };
    let anchor_of = |heading: &str| -> String {
        let kept = heading.trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    prose(&file.text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| line.trim_start_matches('#'))
        .any(|heading| anchor_of(heading) == anchor)
}

/// Words `docs/NAME.md` of a file, which are paths from the repository's root unless a path precedes them.
fn mentions(file: &File) -> impl Iterator<Item = (usize, &str)> {
    let part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    file.text.lines().enumerate().flat_map(move |(n, line)| {
        line.match_indices("docs/").filter_map(move |(at, _)| {
            if line[..at].ends_with(part) {
                return None;
            }
            let path = line[at..].split(|c| !part(c)).next()?;
            let path = &path[..path.find(".md")? + 3];
            Some((n + 1, path))
        })
    })
}

#[test]
fn planted_dead_links_are_found() {
    let dead = |text: &str| {
        let tree = Tree::of(&[
            ("docs/a.md", "# A thing: `of` 2\n```\n# no heading\n```\n"),
            ("docs/deep/b.md", text),
            ("README.md", ""),
        ]);
        check(&tree, |path| path == "docs/picture.png").len()
    };
    for fine in [
        "[x](../a.md) [y](../../README.md#) [z](https://example.org/none.md)",
        "[x](../a.md#a-thing-of-2)",
        "# Own\n[x](#own)",
        "<img src=\"../picture.png\">",
        "see docs/a.md, docs/*.md and other/docs/none.md",
        "```\n[x](none.md)\n```",
    ] {
        assert_eq!(dead(fine), 0, "{fine}");
    }
    for broken in [
        "[x](a.md)",
        "[x](../a.md#no-heading)",
        "[x](#a-thing)",
        "<img src=\"picture.png\">",
        "see docs/b.md.",
        "`docs/deep/c.md`",
    ] {
        assert_eq!(dead(broken), 1, "{broken}");
    }
}
