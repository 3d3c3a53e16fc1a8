//! A folder of `src` and `kernels/src` uses only the folders that are listed here for it.

use crate::source::{File, Tree, in_package, words};

/// A folder, then the folders that it may use. `main` and `lib` are exempt.
const ARROWS: &[(&str, &[&str])] = &[
    ("support", &[]),
    ("numeric", &[]),
    ("families", &["numeric"]),
    ("data", &["support", "numeric"]),
    ("format", &["support", "numeric", "families"]),
    ("net", &["numeric"]),
    ("backend", &["support", "numeric"]),
    ("model", &["support", "numeric", "families", "format", "backend"]),
    ("train", &["numeric", "data", "format", "model"]),
    ("report", &["support", "numeric", "data", "format", "model", "train"]),
    ("cluster", &["support", "numeric", "format", "net", "model", "train"]),
    ("config", &["data", "format", "net", "backend", "model", "train"]),
    ("devices", &["support", "numeric", "format", "backend", "model", "train", "cluster", "config"]),
    ("forecast", &["numeric", "data", "format", "model", "train", "config", "devices"]),
    ("run", &RUN),
    ("cli", &CLI),
];

/// A run may use everything except backends and the command line.
const RUN: [&str; 13] = [
    "support", "numeric", "families", "data", "format", "net", "model", "train", "report", "cluster",
    "config", "devices", "forecast",
];
const CLI: [&str; 15] = [
    "support", "numeric", "families", "data", "format", "net", "backend", "model", "train", "report",
    "cluster", "config", "devices", "forecast", "run",
];

/// The backends, which do not use one another, and the only folder that may name them.
const CONCRETE: &[&str] = &["cpu", "wgpu", "cuda"];
const NAMES_BACKENDS: &str = "src/devices/";

pub fn check(tree: &Tree) -> Vec<String> {
    let mut found = Vec::new();
    for file in tree.program() {
        let Some((floor, _)) = in_package(&file.path).and_then(|path| path.split_once('/')) else { continue };
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == floor) else {
            found.push(format!("{}: the folder has no place among the floors", file.path));
            continue;
        };
        for (line, path) in paths(file) {
            let Some(seen) = path.first().map(String::as_str) else { continue };
            let known = ARROWS.iter().any(|(name, _)| *name == seen);
            if known && seen != floor && !allowed.contains(&seen) {
                found.push(format!("{}:{line}: {floor} may not see {seen} ({})", file.path, path.join("::")));
            }
            if let Some(backend) = concrete(&path) {
                let own = file.path.starts_with(&format!("kernels/src/backend/{backend}"));
                if !own && !file.path.starts_with(NAMES_BACKENDS) {
                    let only = format!("only {NAMES_BACKENDS} names a backend");
                    found.push(format!("{}:{line}: {} ({only})", file.path, path.join("::")));
                }
            }
        }
    }
    found.dedup();
    found
}

fn concrete(path: &[String]) -> Option<&str> {
    match path {
        [a, b, ..] if a == "backend" => CONCRETE.iter().copied().find(|c| c == b),
        _ => None,
    }
}

/// All paths from the crate's root in shipped code, with their lines: `crate::` and `super::` are resolved, use trees
/// expanded.
pub fn paths(file: &File) -> Vec<(usize, Vec<String>)> {
    let code = &file.shipped;
    let mut out = Vec::new();
    // The package of the kernels is exported by the program under the same names.
    for root in ["crate", "finetune_kernels"] {
        for at in words(code, root) {
            if let Some(rest) = code[at + root.len()..].strip_prefix("::") {
                spread(rest, &mut Vec::new(), &mut |p| out.push((file.line(at), p.to_vec())));
            }
        }
    }
    for at in words(code, "super") {
        if code[..at].trim_end().ends_with("super::") {
            continue; // in the middle of a chain
        }
        let (mut base, rest) = rooted(&code[at..], module(&file.path));
        spread(rest, &mut base, &mut |p| out.push((file.line(at), p.to_vec())));
    }
    // `backend::cpu` after a plain `use crate::backend` does not start at the root.
    for at in words(code, "backend") {
        if !code[..at].ends_with("::") && code[at..].starts_with("backend::") {
            spread(&code[at..], &mut Vec::new(), &mut |p| out.push((file.line(at), p.to_vec())));
        }
    }
    out
}

/// The module at which a path in `module` starts, and the rest of the path.
pub fn rooted(mut rest: &str, mut module: Vec<String>) -> (Vec<String>, &str) {
    if let Some(rest) = rest.strip_prefix("crate::") {
        return (Vec::new(), rest);
    }
    rest = rest.strip_prefix("self::").unwrap_or(rest);
    while let Some(outer) = rest.strip_prefix("super::") {
        module.pop();
        rest = outer;
    }
    (module, rest)
}

/// The module path of a file, from the crate's root.
pub fn module(path: &str) -> Vec<String> {
    let inner = in_package(path).unwrap_or(path).trim_end_matches(".rs");
    inner.split('/').filter(|s| !matches!(*s, "mod" | "lib" | "main")).map(String::from).collect()
}

/// Reads a path or use tree and reports every path in it; returns the text after it.
pub fn spread<'a>(mut rest: &'a str, base: &mut Vec<String>, each: &mut dyn FnMut(&[String])) -> &'a str {
    let depth = base.len();
    loop {
        rest = rest.trim_start();
        if let Some(mut inner) = rest.strip_prefix('{') {
            while !inner.trim_start().starts_with('}') && !inner.trim_start().is_empty() {
                inner = spread(inner, base, each).trim_start();
                inner = inner.strip_prefix(',').unwrap_or(inner);
            }
            rest = inner.trim_start().strip_prefix('}').unwrap_or("");
            break;
        }
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        if end > 0 {
            base.push(rest[..end].to_string());
            rest = &rest[end..];
        }
        if end > 0
            && let Some(more) = rest.strip_prefix("::")
        {
            rest = more;
            continue;
        }
        each(base);
        let alias = rest.trim_start();
        if let Some(name) = alias.strip_prefix("as ") {
            rest = name.trim_start().trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
        } else if end == 0 {
            rest = rest.get(1..).unwrap_or(""); // `*`, or something that is no path
        }
        break;
    }
    base.truncate(depth);
    rest
}

#[test]
fn wrong_arrows_are_found() {
    let cases: &[(&str, &str, usize)] = &[
        ("src/train/mod.rs", "use crate::backend::Backend;", 1),
        ("src/train/mod.rs", "use finetune_kernels::backend::Backend;", 1),
        ("src/train/mod.rs", "use crate::model::stage::Stage;", 0),
        ("src/train/mod.rs", "// use crate::backend::Backend;\n", 0),
        ("src/train/mod.rs", "use crate::{model::stage, numeric::{rng, fixed}, backend};", 1),
        ("src/train/step.rs", "fn f() { super::super::cli::main(); }", 1),
        ("src/train/step.rs", "use super::super::report;", 1),
        ("src/config/values.rs", "use crate::devices::choose;", 1),
        ("src/devices/open.rs", "use crate::forecast::profile;", 1),
        ("src/forecast/team.rs", "use crate::run::prepare::Prepared;", 1),
        ("src/run/job.rs", "use crate::cli::generate;", 1),
        ("src/run/job.rs", "use crate::forecast::recorder;", 0),
        ("src/data/mod.rs", "use crate::format::open;", 1),
        ("src/format/gguf/mod.rs", "use crate::data::tokenizer;", 1),
        ("src/model/decoder.rs", "use crate::data::plan::Plan;\nuse crate::cli;", 2),
        ("kernels/src/backend/cpu/mod.rs", "use super::Backend; use super::wgpu::Wgpu;", 1),
        ("kernels/src/backend/cpu/linear.rs", "use super::super::cuda::X;", 1),
        ("kernels/src/backend/cpu/linear.rs", "use crate::backend::cpu::X;", 0),
        ("src/cli/train.rs", "use crate::backend::cpu::Cpu;", 1),
        ("src/cli/train.rs", "use crate::backend; fn f() { backend::cpu::Cpu::new(1); }", 1),
        ("src/devices/gpu.rs", "use crate::backend::wgpu::Wgpu;", 0),
        ("src/cli/devices/mod.rs", "use crate::backend::cpu::Cpu;", 1),
        ("src/helpful/mod.rs", "", 1),
        ("src/model/mod.rs", "#[cfg(test)]\nmod tests { use crate::backend::cpu::Cpu; }", 0),
        ("src/model/mod.rs", "use crate::backend::cpu as c;", 1),
    ];
    for (path, text, want) in cases {
        let found = check(&Tree::of(&[(path, text)]));
        assert_eq!(found.len(), *want, "{path}: {text}: {found:?}");
    }
}
