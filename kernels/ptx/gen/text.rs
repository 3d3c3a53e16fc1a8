//! The builder of a file of kernels. It checks every statement and ends the generator with a message if a register is
//! not declared, has another type than its instruction needs, is used by a part of a kernel that does not name it, or
//! is read after a part has used it as scratch.

use crate::File;
use crate::flow::{Item, fault};
use crate::order::Mark;
use crate::registers::Registers;
use crate::statement::Statement;
use std::fmt::Write;
use std::ops::{Deref, DerefMut};

/// PTX under construction.
#[derive(Default)]
pub struct Text {
    out: String,
    marks: Vec<Mark>,
    entry: Entry,
}

/// The current entry.
#[derive(Default)]
struct Entry {
    name: String,
    registers: Registers,
    items: Vec<Item>,
    parts: Vec<Part>,
}

/// An open part.
struct Part {
    name: String,
    /// For the registers that were declared before it: whether it may read and write each of them.
    rights: Vec<(bool, bool)>,
    scratch: Vec<usize>,
}

/// The registers of its callers that a part of a kernel uses: lists in the notation of `.reg` without that word, as
/// `.u32 %x, %y; .pred %p`. Registers that a part declares are its own.
#[derive(Default, Clone, Copy)]
pub struct Uses<'a> {
    /// Read, not changed.
    pub reads: &'a str,
    /// Changed: the part's results.
    pub changes: &'a str,
    /// Clobbered: a later read needs a write before it.
    pub scratch: &'a str,
}

/// The current part; it ends when this value is dropped.
pub struct Open<'a>(&'a mut Text);

impl Deref for Open<'_> {
    type Target = Text;
    fn deref(&self) -> &Text {
        self.0
    }
}

impl DerefMut for Open<'_> {
    fn deref_mut(&mut self) -> &mut Text {
        self.0
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if let Some(part) = self.0.entry.parts.pop() {
            self.0.entry.items.push(Item::Left { part: part.name, scratch: part.scratch });
        }
    }
}

impl Entry {
    /// The last statement.
    fn last(&self) -> &str {
        let Some(Item::Run(s)) = self.items.last() else { return "" };
        &s.text
    }

    /// Adds a statement to the body.
    fn take(&mut self, text: &str) {
        if let Some(list) = text.strip_prefix(".reg ") {
            return self.registers.declare(list);
        }
        if text.starts_with(".shared") {
            return;
        }
        let s = Statement::new(text, &self.registers);
        for part in &self.parts {
            let lacks = |write: bool| {
                move |r: &&usize| part.rights.get(**r).is_some_and(|has| !(if write { has.1 } else { has.0 }))
            };
            let wrong = s.reads.iter().find(lacks(false)).or(s.writes.iter().find(lacks(true)));
            let wrong = wrong.map(|r| self.registers.name(*r));
            assert!(
                wrong.is_none(),
                "{}: `{text}`: {} uses {} without naming it",
                self.name,
                part.name,
                wrong.unwrap_or_default()
            );
        }
        self.items.push(Item::Run(s));
    }

    fn open(&mut self, name: &str, uses: &Uses) {
        let mut rights = vec![(false, false); self.registers.len()];
        let whose = format!("{}: {name}", self.name);
        let places = |list| self.registers.places(list, &whose);
        places(uses.reads).into_iter().for_each(|r| rights[r].0 = true);
        places(uses.changes).into_iter().for_each(|r| rights[r] = (true, true));
        let scratch = places(uses.scratch);
        scratch.iter().for_each(|r| rights[*r] = (true, true));
        self.parts.push(Part { name: name.into(), rights, scratch });
    }
}

impl Text {
    /// Adds one line unchanged.
    pub fn line(&mut self, line: impl AsRef<str>) {
        self.out.push_str(line.as_ref());
        self.out.push('\n');
    }
    /// Adds statements, split at `;`, each on its own line, indented.
    pub fn code(&mut self, statements: impl AsRef<str>) {
        for s in statements.as_ref().split(';').map(str::trim).filter(|s| !s.is_empty()) {
            let before = self.entry.last();
            let mark = Mark::new(&self.entry.name, s, (before, self.out.len() + "    ".len()));
            self.marks.extend(mark);
            self.entry.take(s);
            let _ = writeln!(self.out, "    {s};");
        }
    }
    /// Begins a part of the kernel that uses only these registers and its own, until the returned value is dropped.
    pub fn part(&mut self, name: &str, uses: &Uses) -> Open<'_> {
        self.entry.open(name, uses);
        Open(self)
    }
    /// A comment inside a body.
    pub fn say(&mut self, comment: &str) {
        let _ = writeln!(self.out, "    // {comment}");
    }
    pub fn label(&mut self, name: &str) {
        self.entry.items.push(Item::Label(name.into()));
        let _ = writeln!(self.out, "{name}:");
    }
    /// The beginning of a file: its head as comments, and its target.
    pub fn head(&mut self, comment: &str, (version, target): (&str, &str)) {
        comment.trim().lines().for_each(|l| self.line(format!("// {l}").trim_end()));
        self.line("// Written by kernels/ptx/gen; change it there.");
        self.line(format!(".version {version}\n.target {target}\n.address_size 64\n"));
    }
    /// The beginning of an entry: name, parameters as (type, name), threads.
    pub fn entry(&mut self, name: &str, params: &[(&str, &str)], threads: usize) {
        self.entry_within(name, params, (threads, ""));
    }
    /// The same with further directives: ptxas prefers spills to losing a block that fits beside others.
    pub fn entry_within(&mut self, name: &str, params: &[(&str, &str)], (threads, more): (usize, &str)) {
        let params: Vec<String> = params.iter().map(|(t, n)| format!("    .param .{t} {n}")).collect();
        self.line(format!(
            ".visible .entry {name}(\n{}\n) .reqntid {threads}, 1, 1{more}\n{{",
            params.join(",\n")
        ));
        self.entry = Entry { name: name.into(), ..Entry::default() };
    }
    /// Ends an entry and checks it.
    pub fn end(&mut self) {
        self.line("    ret;\n}\n");
        let fault = fault(&self.entry.items, &self.entry.registers);
        assert!(fault.is_none(), "{}: {}", self.entry.name, fault.unwrap_or_default());
        self.entry = Entry::default();
    }
    pub fn finish(self, name: &'static str) -> File {
        File { name, text: format!("{}\n", self.out.trim_end()), marks: self.marks }
    }
}

#[cfg(test)]
mod tests {
    use super::{Text, Uses};

    const SCRATCH: Uses = Uses { reads: ".u32 %y", changes: ".u32 %z", scratch: ".u32 %x" };

    /// z = y + 1, by way of x.
    fn helper(t: &mut Text) {
        let t = &mut t.part("helper", &SCRATCH);
        t.code("add.u32 %x, %y, 1; mov.u32 %z, %x");
    }

    /// The error with which the generator ends, if any.
    fn fault_of(body: impl Fn(&mut Text) + std::panic::RefUnwindSafe) -> String {
        let written = std::panic::catch_unwind(|| {
            let mut t = Text::default();
            t.entry("kernel", &[], 32);
            t.code(".reg .u32 %x, %y, %z; .reg .u64 %w; .reg .pred %p; mov.u32 %x, 1; mov.u32 %y, 2");
            body(&mut t);
            t.end();
        });
        let message = written.err().map(|e| e.downcast_ref::<String>().cloned().unwrap_or_default());
        message.unwrap_or_default()
    }

    fn check(body: impl Fn(&mut Text) + std::panic::RefUnwindSafe, fault: &str) {
        let found = fault_of(body);
        assert!(
            if fault.is_empty() { found.is_empty() } else { found.contains(fault) },
            "{found:?}: {fault:?}"
        );
    }

    #[test]
    fn clobbered_register_is_found() {
        let clobbers = "`add.u32 %y, %x, %z` reads %x, which `helper` clobbers";
        check(
            |t| {
                helper(t);
                t.code("add.u32 %y, %x, %z");
            },
            clobbers,
        );
        check(
            |t| {
                helper(t);
                t.code("mov.u32 %x, 1; add.u32 %y, %x, %z");
            },
            "",
        );
    }

    #[test]
    fn clobber_of_the_lap_before_is_found() {
        let lap = |t: &mut Text, first: &str| {
            t.code("mov.u32 %z, 0");
            t.label("LAP");
            t.code(format!("{first}; add.u32 %y, %x, %z"));
            helper(t);
            t.code("setp.lt.u32 %p, %z, 9; @%p bra LAP");
        };
        check(|t| lap(t, ""), "`add.u32 %y, %x, %z` reads %x, which `helper` clobbers");
        check(|t| lap(t, "mov.u32 %x, 3"), "");
    }

    #[test]
    fn register_that_a_part_does_not_name_is_found() {
        let part = |t: &mut Text, statement: &str| {
            let t = &mut t.part("helper", &SCRATCH);
            t.code(statement);
        };
        check(|t| part(t, "mov.u32 %y, 1"), "`mov.u32 %y, 1`: helper uses %y without naming it");
        check(|t| part(t, "setp.eq.u32 %p, %y, 1"), "helper uses %p without naming it");
        check(|t| part(t, ".reg .u32 %own; mov.u32 %own, %y; mov.u32 %z, %own"), "");
    }

    #[test]
    fn register_of_another_type_is_found() {
        check(|t| t.code("add.u64 %w, %x, 1"), "`add.u64 %w, %x, 1`: %x is of another type");
        check(|t| t.code("setp.eq.u32 %x, %y, 1"), "%x is of another type");
        check(|t| t.code("mad.wide.u32 %w, %x, %y, %w"), "nothing has written");
        check(|t| t.code("mov.u64 %w, 0; mad.wide.u32 %w, %x, %y, %w"), "");
        check(|t| drop(t.part("helper", &Uses { reads: ".u32 %w", ..Uses::default() })), "another type");
    }

    #[test]
    fn undeclared_registers_and_labels_are_found() {
        check(|t| t.code("mov.u32 %a, 1"), "%a is not declared");
        check(|t| t.code(".reg .u32 %x"), "%x is declared twice");
        check(|t| t.code("bra NOWHERE"), "there is no label NOWHERE");
        check(|t| (0..2).for_each(|_| t.label("HERE")), "the label HERE stands twice");
        check(|t| t.code("mov.u32 %y, %z"), "reads %z, which nothing has written");
    }
}
