//! Writes the kernels whose text follows from a tile: products, attention, blocks. What it writes lies in
//! kernels/ptx, and [`kernels_are_what_the_generator_writes`] compares; FINETUNE_WRITE_KERNELS=1 writes anew.

mod attention;
mod attention_grad;
mod attention_grad_sm80;
mod attention_grad_sm90a;
mod attention_sm80;
mod attention_sm90a;
mod epilogue;
mod epilogue_sm90a;
mod flash;
mod flash_sm90a;
mod grad_scores_sm90a;
mod grad_sums_sm90a;
mod product;
mod product_sm70;
mod product_sm90a;
mod tensor;
mod widen;

use std::fmt::Write;
use std::path::PathBuf;

/// PTX under construction.
#[derive(Default)]
pub struct Text(String);

impl Text {
    /// One line as it stands.
    pub fn line(&mut self, line: impl AsRef<str>) {
        self.0.push_str(line.as_ref());
        self.0.push('\n');
    }
    /// Statements, each on a line of its own, indented; they are split at `;`.
    pub fn code(&mut self, statements: impl AsRef<str>) {
        for s in statements.as_ref().split(';').map(str::trim).filter(|s| !s.is_empty()) {
            let _ = writeln!(self.0, "    {s};");
        }
    }
    /// A sentence inside a body.
    pub fn say(&mut self, comment: &str) {
        let _ = writeln!(self.0, "    // {comment}");
    }
    pub fn label(&mut self, name: &str) {
        let _ = writeln!(self.0, "{name}:");
    }
    /// The beginning of a file: what it promises, as comments, and its target.
    pub fn head(&mut self, comment: &str, (version, target): (&str, &str)) {
        comment.trim().lines().for_each(|l| self.line(format!("// {l}").trim_end()));
        self.line("// Written by tests/ptx/generate; change it there.");
        self.line(format!(".version {version}\n.target {target}\n.address_size 64\n"));
    }
    /// The beginning of an entry: name, parameters as (type, name), threads.
    pub fn entry(&mut self, name: &str, params: &[(&str, &str)], threads: usize) {
        self.entry_within(name, params, (threads, ""));
    }
    /// The same with further directives: ptxas would rather spill than give up a block that fits beside others.
    pub fn entry_within(&mut self, name: &str, params: &[(&str, &str)], (threads, more): (usize, &str)) {
        let params: Vec<String> = params.iter().map(|(t, n)| format!("    .param .{t} {n}")).collect();
        self.line(format!(
            ".visible .entry {name}(\n{}\n) .reqntid {threads}, 1, 1{more}\n{{",
            params.join(",\n")
        ));
    }
    pub fn end(&mut self) {
        self.line("    ret;\n}\n");
    }
    pub fn finish(self) -> String {
        format!("{}\n", self.0.trim_end())
    }
}

/// All files that are generated: name and text.
pub fn files() -> Vec<(&'static str, String)> {
    let mut out = product::files();
    out.extend(attention::files());
    out.extend(tensor::files());
    out.extend(product_sm70::files());
    out.extend(product_sm90a::files());
    out.extend(attention_grad::files());
    out.extend(attention_sm80::files());
    out.extend(attention_sm90a::files());
    out.extend(attention_grad_sm80::files());
    out.extend(attention_grad_sm90a::files());
    out.extend(widen::files());
    out.sort_by_key(|f| f.0);
    out
}

#[test]
fn kernels_are_what_the_generator_writes() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx");
    let folder = if folder.exists() { folder } else { crate::files::folder() };
    for (name, text) in files() {
        let path = folder.join(name);
        if std::env::var_os("FINETUNE_WRITE_KERNELS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            there == text,
            "{name} is not what the generator writes: FINETUNE_WRITE_KERNELS=1 writes it anew"
        );
    }
}
