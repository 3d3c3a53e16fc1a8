//! Sizes: a file has one subject, a function fits on one screen, a call has few arguments.

use crate::source::{File, Tree, item_end, words};

const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 60;
/// Clippy's limit, but the members of a tuple count: a tuple does not make a call easier to read.
const ARGUMENTS: usize = 7;

type Allowed<'a> = &'a [(&'a str, &'a str)];

struct Function {
    /// `path:name`
    id: String,
    line: usize,
    lines: usize,
    /// Argument texts, without self.
    arguments: Vec<String>,
}

pub fn long_files(tree: &Tree, allowed: Allowed) -> Vec<String> {
    let long = tree.files.iter().filter(|f| f.path.ends_with(".rs")).filter_map(|f| {
        let n = f.text.lines().count();
        (n > FILE_LINES).then(|| (f.path.clone(), format!("{}: {n} lines", f.path)))
    });
    judge(long.collect(), allowed)
}

pub fn long_functions(tree: &Tree, allowed: Allowed) -> Vec<String> {
    over(tree, allowed, |f| {
        (f.lines > FUNCTION_LINES).then(|| format!("{} (line {}): {} lines", f.id, f.line, f.lines))
    })
}

pub fn wide_functions(tree: &Tree, allowed: Allowed) -> Vec<String> {
    over(tree, allowed, |f| {
        let n: usize = f.arguments.iter().map(|a| members(a)).sum();
        (n > ARGUMENTS).then(|| format!("{} (line {}): {n} arguments", f.id, f.line))
    })
}

pub fn bool_arguments(tree: &Tree, allowed: Allowed) -> Vec<String> {
    over(tree, allowed, |f| {
        crate::source::in_package(&f.id)?;
        let named =
            f.arguments.iter().find(|a| a.split_once(':').is_some_and(|(_, t)| t.trim() == "bool"))?;
        Some(format!("{} (line {}): {}", f.id, f.line, named.trim()))
    })
}

fn over(tree: &Tree, allowed: Allowed, rule: impl Fn(&Function) -> Option<String>) -> Vec<String> {
    let all = tree.files.iter().filter(|f| f.path.ends_with(".rs")).flat_map(functions);
    judge(all.filter_map(|f| rule(&f).map(|what| (f.id, what))).collect(), allowed)
}

/// Findings without an exception, and exceptions without a finding.
pub fn judge(found: Vec<(String, String)>, allowed: Allowed) -> Vec<String> {
    let stale = allowed.iter().filter(|(id, _)| !found.iter().any(|(f, _)| f == id));
    let stale: Vec<_> =
        stale.map(|(id, _)| format!("{id}: the exception is no longer needed, remove it")).collect();
    let broken = found.iter().filter(|(id, _)| !allowed.iter().any(|(a, _)| a == id));
    broken.map(|(_, what)| what.clone()).chain(stale).collect()
}

fn functions(file: &File) -> Vec<Function> {
    let code = &file.code;
    let mut out = Vec::new();
    for at in words(code, "fn") {
        let rest = &code[at + 2..];
        let name: String =
            rest.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if name.is_empty() {
            continue; // `fn(u32)` is a type
        }
        let end = item_end(code, at);
        out.push(Function {
            id: format!("{}:{name}", file.path),
            line: file.line(at),
            lines: code[at..end].matches('\n').count() + 1,
            arguments: arguments(argument_list(rest)),
        });
    }
    out
}

/// The text from the argument list on, after the generics: those may contain parentheses, as in
/// `fn f<F: Fn(u32) -> u32>(x: F)`.
fn argument_list(signature: &str) -> &str {
    let (mut angle, mut before) = (0, ' ');
    for (i, c) in signature.char_indices() {
        match c {
            '<' => angle += 1,
            '>' if before != '-' => angle -= 1,
            '(' if angle == 0 => return &signature[i..],
            _ => {}
        }
        before = c;
    }
    ""
}

/// Number of values in an argument: the members of `(a, b): (u8, u8)` and of `a: (u8, u8)`.
fn members(argument: &str) -> usize {
    let plain =
        |text: &str| text.trim().trim_start_matches('&').trim_start_matches("mut ").trim().to_string();
    let (pattern, rest) = (plain(argument), argument.split_once(": ").map(|(_, of)| plain(of)));
    match [pattern].into_iter().chain(rest).find(|text| text.starts_with('(')) {
        Some(tuple) => arguments(&tuple).iter().map(|part| members(part)).sum(),
        None => 1,
    }
}

/// The arguments of a list that starts with `(`, split at its own commas, without self.
fn arguments(list: &str) -> Vec<String> {
    let (mut depth, mut out, mut now) = (0i32, Vec::new(), String::new());
    let mut before = ' ';
    for c in list.chars() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            '>' if before == '-' || before == '=' => {}
            ')' | ']' | '}' | '>' => depth -= 1,
            _ => {}
        }
        if depth == 0 || (depth == 1 && c == ',') {
            out.push(std::mem::take(&mut now));
            if depth == 0 {
                break;
            }
        } else if !(depth == 1 && c == '(' && now.is_empty()) {
            now.push(c);
        }
        before = c;
    }
    out.retain(|a| {
        let plain = a.replace("mut ", "").replace('&', "");
        let plain = plain.trim().trim_start_matches('\'').trim();
        !plain.is_empty() && plain != "self" && !plain.ends_with(" self")
    });
    out
}

#[test]
fn sizes_are_measured() {
    let body = "    x();\n".repeat(60);
    let long = format!("fn f() {{\n{body}}}\nfn g() {{\n}}\n");
    let tree = Tree::of(&[("src/a/x.rs", &long), ("src/a/y.rs", &"\n".repeat(601))]);
    assert_eq!(long_functions(&tree, &[]), ["src/a/x.rs:f (line 1): 62 lines"]);
    assert_eq!(long_functions(&tree, &[("src/a/x.rs:f", "why")]), Vec::<String>::new());
    assert_eq!(long_files(&tree, &[]), ["src/a/y.rs: 601 lines"]);
    assert_eq!(
        long_files(&tree, &[("src/a/y.rs", "why"), ("src/a/z.rs", "why")]).len(),
        1,
        "stale exception"
    );
}

#[test]
fn arguments_are_counted_without_self() {
    let cases = [
        ("fn f(&mut self, a: u8, b: &[(u8, u8)], c: Vec<(u8, u8)>, d: u8, e: u8) {}", 5),
        ("fn f<F: Fn(u8, u8) -> u8>(a: F, b: u8) {}", 2),
        ("fn f(a: impl Fn(u8, u8) -> u8, b: HashMap<u8, u8>,) {}", 2),
        ("fn f<'a>(&'a self) {}", 0),
        ("fn f() -> (u8, u8) { (1, 2) }", 0),
        ("fn f((a, (b, c)): (u8, (u8, u8)), d: (u8, [u8; 2]), e: &mut (u8, u8), h: u8) {}", 8),
    ];
    for (text, want) in cases {
        let f = functions(&File::new("src/a.rs", text));
        let n: usize = f[0].arguments.iter().map(|a| members(a)).sum();
        assert_eq!(n, want, "{text}: {:?}", f[0].arguments);
    }
    let tree = Tree::of(&[("src/a.rs", "fn f(a: u8, packed: bool) {}\nfn g(x: Option<bool>) {}")]);
    assert_eq!(bool_arguments(&tree, &[]).len(), 1);
    let kernels =
        Tree::of(&[("kernels/src/a.rs", "fn f(packed: bool) {}"), ("tests/a.rs", "fn f(packed: bool) {}")]);
    assert_eq!(bool_arguments(&kernels, &[]).len(), 1);
    assert_eq!(wide_functions(&Tree::of(&[("src/a.rs", cases[5].0)]), &[]).len(), 1);
}
