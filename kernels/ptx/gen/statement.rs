//! One statement of PTX, as far as the builder checks it: the registers that it reads and writes, their types, and
//! the next statement.

use crate::registers::{Registers, Type};

/// A predicate that is always false: a wgmma with it as the operand for "add" sets its sums.
pub const NEVER: &str = "%none";
/// Special registers: they are read only and need no declaration.
const SPECIAL: [&str; 4] = ["%tid", "%ctaid", "%nctaid", "%laneid"];

/// The effect of a statement on registers and on the order of statements.
#[derive(Default, Clone)]
pub struct Statement {
    /// Its text, without `;`.
    pub text: String,
    /// Indices of registers.
    pub reads: Vec<usize>,
    /// Sums that an instruction adds to, unless an operand says that it sets them.
    pub adds: Vec<usize>,
    pub writes: Vec<usize>,
    /// Under a predicate.
    pub guarded: bool,
    /// The label that it branches to.
    pub jumps: Option<String>,
    /// Ends the thread.
    pub ends: bool,
}

/// Guard, opcode and operands.
pub struct Parts<'a> {
    pub guard: Option<&'a str>,
    pub opcode: &'a str,
    pub operands: Vec<&'a str>,
}

/// Splits a statement; operands are separated by commas outside of brackets.
pub fn parts(text: &str) -> Parts<'_> {
    let (guard, rest) = match text.strip_prefix('@') {
        Some(guarded) => guarded.split_once(' ').map_or((None, guarded), |(g, rest)| (Some(g), rest.trim())),
        None => (None, text),
    };
    let (opcode, list) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let (mut operands, mut depth, mut from) = (Vec::new(), 0, 0);
    for (i, c) in list.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                operands.push(list[from..i].trim());
                from = i + 1;
            }
            _ => {}
        }
    }
    if !list.trim().is_empty() {
        operands.push(list[from..].trim());
    }
    Parts { guard, opcode, operands }
}

/// Whether the first operand is read (an address, a stored value) or is no register.
fn writes_nothing(opcode: &str) -> bool {
    const BEGINNINGS: [&str; 13] = [
        "st.",
        "bar.",
        "fence.",
        "cp.async",
        "setmaxnreg",
        "mbarrier.init",
        "mbarrier.arrive",
        "wmma.store",
        "wgmma.fence",
        "wgmma.commit",
        "wgmma.wait",
        "bra",
        "ret",
    ];
    BEGINNINGS.iter().any(|b| opcode.starts_with(b))
}

/// Names of registers in an operand, without special ones.
fn names(operand: &str) -> impl Iterator<Item = &str> {
    operand.match_indices('%').filter_map(|(at, _)| {
        let rest = &operand[at..];
        let end =
            rest[1..].find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map_or(rest.len(), |n| n + 1);
        (!SPECIAL.contains(&&rest[..end])).then_some(&rest[..end])
    })
}

impl Statement {
    /// Reads a statement; its registers must be declared, with the types of its opcode.
    pub fn new(text: &str, registers: &Registers) -> Statement {
        let p = parts(text);
        let find =
            |name: &str| registers.find(name).unwrap_or_else(|| panic!("`{text}`: {name} is not declared"));
        let mut s = Statement { text: text.into(), guarded: p.guard.is_some(), ..Statement::default() };
        s.reads.extend(p.guard.into_iter().flat_map(names).map(find));
        if p.opcode == "bra" {
            s.jumps = p.operands.first().map(|label| label.to_string());
        }
        s.ends = p.opcode == "ret";
        for (i, operand) in p.operands.iter().enumerate() {
            let places = names(operand).map(find);
            match i {
                0 if !writes_nothing(p.opcode) && !operand.starts_with('[') => s.writes.extend(places),
                _ => s.reads.extend(places),
            }
        }
        if p.opcode.starts_with("wgmma.mma_async") && p.operands.get(3) != Some(&NEVER) {
            s.adds.clone_from(&s.writes);
        }
        check_types(text, &p, registers);
        s
    }
}

/// Operands in brackets or braces are addresses and vectors: only ptxas checks their types, of loads and stores.
fn check_types(text: &str, p: &Parts, registers: &Registers) {
    let suffixes: Vec<&str> = p.opcode.split('.').collect();
    let typed: Vec<Type> = suffixes[1..].iter().copied().filter_map(Type::named).collect();
    let Some(&own) = typed.last() else { return };
    let (pred, count) = (Type::named("pred"), Type::named("u32"));
    let wide = suffixes.get(1) == Some(&"wide");
    let n = p.operands.len();
    let asked = |i: usize| match suffixes[0] {
        "mov" | "add" | "sub" | "mul" | "mad" | "fma" | "div" | "min" | "max" | "and" | "or" | "xor"
        | "neg" | "ex2" | "lg2" | "rcp" => Some(if wide && (i == 0 || i == 3) { own.wide() } else { own }),
        "shl" | "shr" => {
            if i == 2 {
                count
            } else {
                Some(own)
            }
        }
        "selp" => {
            if i + 1 == n {
                pred
            } else {
                Some(own)
            }
        }
        "setp" => {
            if i == 0 {
                pred
            } else {
                Some(own)
            }
        }
        "cvt" => Some(if i == 0 { typed[0] } else { own }),
        "shfl" => {
            if i < 2 {
                Some(own)
            } else {
                count
            }
        }
        _ => None,
    };
    for (i, operand) in p.operands.iter().enumerate() {
        let Some(at) = registers.find(operand) else { continue };
        if let Some(asked) = asked(i) {
            let fits = asked.takes(registers.kind(at)) || narrows(p.opcode, i, asked, registers.kind(at));
            assert!(fits, "`{text}`: {operand} is of another type");
        }
    }
}

/// Conversions accept a wider register for an integer of fewer bits.
fn narrows(opcode: &str, operand: usize, asked: Type, has: Type) -> bool {
    opcode.starts_with("cvt.") && operand == 1 && asked.bits <= has.bits
}
