//! The tree as text. In Rust files comments and literals are replaced by blanks, so that a word in a sentence does not
//! count as code; line numbers do not change.

use std::path::Path;

/// One text file of the repository.
pub struct File {
    /// Path from the repository's root, with `/`.
    pub path: String,
    /// Unchanged.
    pub text: String,
    /// For Rust: the same number of lines, with comments and literals blanked.
    pub code: String,
    /// For Rust: `code` without the parts that are compiled for tests only.
    pub shipped: String,
}

/// All text files that belong to the repository.
pub struct Tree {
    pub files: Vec<File>,
}

impl File {
    pub fn new(path: &str, text: &str) -> Self {
        let code = if path.ends_with(".rs") { blank(text) } else { String::new() };
        let shipped = without_tests(&code);
        Self { path: path.into(), text: text.into(), code, shipped }
    }

    /// 1-based line of a byte offset of `code`.
    pub fn line(&self, at: usize) -> usize {
        self.code[..at].matches('\n').count() + 1
    }
}

impl Tree {
    /// Reads the repository that this test was built from.
    pub fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = Vec::new();
        walk(root, root, &mut files);
        files.sort_by(|a: &File, b| a.path.cmp(&b.path));
        let mut tree = Self { files };
        tree.drop_test_modules();
        tree
    }

    /// A tree of (path, text), for the checkers' own tests.
    pub fn of(files: &[(&str, &str)]) -> Self {
        let mut tree = Self { files: files.iter().map(|(p, t)| File::new(p, t)).collect() };
        tree.drop_test_modules();
        tree
    }

    /// Rust files of the program: its own package and that of the kernels, whose modules it exports under their names.
    pub fn program(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|f| in_package(&f.path).is_some() && f.path.ends_with(".rs"))
    }

    /// Clears the shipped text of files that are declared `#[cfg(test)] mod name;`.
    fn drop_test_modules(&mut self) {
        let mut test_only = Vec::new();
        for f in self.program() {
            let folder = module_folder(&f.path);
            for (at, _) in f.code.match_indices("#[cfg(test)]") {
                let rest = f.code[at + 12..].trim_start().trim_start_matches("pub ");
                if let Some(name) = rest.strip_prefix("mod ").and_then(|r| r.split(';').next())
                    && name.chars().all(|c| c.is_alphanumeric() || c == '_')
                {
                    test_only.push((format!("{folder}{name}.rs"), format!("{folder}{name}/")));
                }
            }
        }
        for f in &mut self.files {
            if test_only.iter().any(|(file, dir)| f.path == *file || f.path.starts_with(dir)) {
                f.shipped = String::new();
            }
        }
    }
}

/// The path of a file of the program inside its package.
pub fn in_package(path: &str) -> Option<&str> {
    path.strip_prefix("src/").or_else(|| path.strip_prefix("kernels/src/"))
}

/// The folder of a file's child modules: `src/data/` for `src/data/mod.rs`, `src/data/plan/` for `plan.rs`.
fn module_folder(path: &str) -> String {
    let stem = path.trim_end_matches(".rs");
    match stem.rsplit_once('/') {
        Some((folder, "mod" | "lib" | "main")) => format!("{folder}/"),
        _ => format!("{stem}/"),
    }
}

fn walk(root: &Path, dir: &Path, files: &mut Vec<File>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == ".git" {
            continue; // a folder, or a file in a linked work tree
        }
        if path.is_dir() {
            let top = dir == root;
            if !(name == "__pycache__" || (top && ["target", "runs", "quickstart"].contains(&&*name))) {
                walk(root, &path, files);
            }
        } else if entry.metadata().is_ok_and(|m| m.len() < 1_000_000)
            && let Ok(text) = std::fs::read_to_string(&path)
            && let Ok(relative) = path.strip_prefix(root)
        {
            files.push(File::new(&relative.to_string_lossy().replace('\\', "/"), &text));
        }
    }
}

/// The end of the item that starts at `from`: after its `;`, or after its balanced braces.
pub fn item_end(code: &str, from: usize) -> usize {
    let (mut depth, mut round) = (0, 0);
    for (i, c) in code[from..].char_indices() {
        match c {
            '(' | '[' => round += 1,
            ')' | ']' => round -= 1,
            '{' => depth += 1,
            '}' if depth <= 1 => return from + i + 1,
            '}' => depth -= 1,
            ';' if depth == 0 && round == 0 => return from + i + 1,
            _ => {}
        }
    }
    code.len()
}

fn without_tests(code: &str) -> String {
    let mut out = code.to_string();
    while let Some(at) = out.find("#[cfg(test)]") {
        let end = item_end(&out, at + "#[cfg(test)]".len());
        let blanked: String = out[at..end].chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
        out.replace_range(at..end, &blanked);
    }
    out
}

/// Rust with comments and the contents of literals replaced by blanks; quotes and line ends stay.
pub fn blank(text: &str) -> String {
    let c: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut i = 0;
    while i < c.len() {
        let end = literal_end(&c, i);
        if end == i {
            out.push(if c[i].is_ascii() { c[i] } else { ' ' });
            i += 1;
        } else {
            let quoted = c[i] != '/';
            for (j, x) in c[i..end].iter().enumerate() {
                let edge = quoted && (j == 0 || j == end - i - 1);
                out.push(if *x == '\n' {
                    '\n'
                } else if edge {
                    '"'
                } else {
                    ' '
                });
            }
            i = end;
        }
    }
    out
}

/// The end of the comment or literal that starts at `i`, or `i` if none starts there.
fn literal_end(c: &[char], i: usize) -> usize {
    let at = |j: usize| c.get(j).copied().unwrap_or('\0');
    let after_word = i > 0 && (at(i - 1).is_alphanumeric() || at(i - 1) == '_');
    match (at(i), at(i + 1)) {
        ('/', '/') => (i..c.len()).find(|&j| at(j) == '\n').unwrap_or(c.len()),
        ('/', '*') => {
            let (mut depth, mut j) = (1, i + 2);
            while j < c.len() && depth > 0 {
                match (at(j), at(j + 1)) {
                    ('/', '*') => (depth, j) = (depth + 1, j + 2),
                    ('*', '/') => (depth, j) = (depth - 1, j + 2),
                    _ => j += 1,
                }
            }
            j
        }
        ('"', _) => closing(c, i + 1, '"'),
        ('b', '"') if !after_word => closing(c, i + 2, '"'),
        ('r', '"' | '#') if !after_word => raw_end(c, i, i + 1),
        ('b', 'r') if !after_word && matches!(at(i + 2), '"' | '#') => raw_end(c, i, i + 2),
        ('\'', '\\') => closing(c, i + 1, '\''),
        ('\'', _) if at(i + 2) == '\'' => i + 3,
        _ => i,
    }
}

fn closing(c: &[char], mut j: usize, quote: char) -> usize {
    while j < c.len() && c[j] != quote {
        j += if c[j] == '\\' { 2 } else { 1 };
    }
    (j + 1).min(c.len())
}

fn raw_end(c: &[char], start: usize, from: usize) -> usize {
    let hashes = c[from..].iter().take_while(|x| **x == '#').count();
    if c.get(from + hashes) != Some(&'"') {
        return start; // r#identifier
    }
    let mut j = from + hashes + 1;
    while j < c.len() {
        if c[j] == '"' && c[j + 1..].iter().take(hashes).filter(|x| **x == '#').count() == hashes {
            return j + 1 + hashes;
        }
        j += 1;
    }
    c.len()
}

/// Whether `code[at..]` starts with the whole word `word`.
pub fn is_word(code: &str, at: usize, word: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '_';
    !code[..at].chars().next_back().is_some_and(joins)
        && !code[at + word.len()..].chars().next().is_some_and(joins)
}

/// Every position of `word` as a whole word.
pub fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(word).map(|(at, _)| at).filter(move |&at| is_word(code, at, word))
}

#[test]
fn comments_and_literals_are_blanked_and_lines_stay() {
    let cases = [
        ("a // unsafe\nb", "a          \nb"),
        ("/* x /* y */ z */k", "                 k"),
        ("\"un\\\"safe\" z", "\"        \" z"),
        ("r#\"a\"b\"# z", "\"      \" z"),
        ("'x' 'a: &'a str", "\" \" 'a: &'a str"),
        ("'\\'' z", "\"  \" z"),
    ];
    for (text, want) in cases {
        assert_eq!(blank(text), want, "{text}");
    }
}

#[test]
fn what_is_compiled_for_tests_only_is_not_shipped() {
    let tree = Tree::of(&[
        ("src/a/mod.rs", "fn f() {}\n#[cfg(test)]\nmod tests { fn g() { h(); } }\nfn k() {}"),
        ("src/b/mod.rs", "#[cfg(test)]\nmod cases;"),
        ("src/b/cases.rs", "use crate::cli;"),
    ]);
    let shipped = &tree.files[0].shipped;
    assert!(shipped.contains("fn f") && shipped.contains("fn k") && !shipped.contains("fn g"));
    assert_eq!(tree.files[2].shipped, "");
}
