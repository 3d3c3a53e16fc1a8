//! The text of a file of kernels while it is written.

use std::fmt::Write;

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
        self.line("// Written by kernels/ptx/gen; change it there.");
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
