//! Parses PTX text to kernels. An unknown opcode, register, label or parameter is an error with its line.

use super::arithmetic::arithmetic;
use super::ins::{Arg, Ins, Kernel, Op, Param, Shuffle, Space, Special};
use super::tensor_map::MAPS;
use super::wmma;
use std::collections::HashMap;

/// All entries of a file.
pub fn kernels(source: &str) -> Result<Vec<Kernel>, String> {
    let text = without_comments(source);
    let mut out = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].find(".entry") {
        let start = from + at + ".entry".len();
        let open = start + text[start..].find('(').ok_or("an entry without parameters")?;
        let close = open + text[open..].find(')').ok_or("a list of parameters without an end")?;
        let body = close + text[close..].find('{').ok_or("an entry without a body")?;
        let end = closing(&text, body).ok_or("a body without an end")?;
        let mut reader = Reader::new(text[start..open].trim(), &text[open + 1..close]);
        reader.threads(&text[close + 1..body]);
        text[..open].lines().filter(|l| l.starts_with(".extern")).try_for_each(|l| reader.outside(l))?;
        out.push(reader.body(&text, (body + 1, end))?);
        from = end;
    }
    Ok(out)
}

/// Replaces comments by blanks, so that line numbers do not change.
fn without_comments(source: &str) -> String {
    source.lines().map(|l| l.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

fn closing(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in text[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return Some(open + i),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The start of the launch's shared memory: an odd multiple of 16 bytes, near a multiple of 512.
const OUTSIDE: usize = 528;

struct Reader {
    kernel: Kernel,
    registers: HashMap<String, usize>,
    shared: HashMap<String, usize>,
    labels: HashMap<String, usize>,
}

fn width(ty: &str) -> Option<usize> {
    Some(match ty {
        "u8" | "b8" => 1,
        "u16" | "b16" | "f16" => 2,
        "u32" | "b32" | "f32" | "s32" => 4,
        "u64" | "b64" | "s64" => 8,
        _ => return None,
    })
}

impl Reader {
    fn new(name: &str, params: &str) -> Self {
        let param = |p: &str| {
            let words: Vec<&str> = p.split_whitespace().collect();
            let of = |word: &&str| width(word.strip_prefix('.')?);
            let bytes = words.iter().find_map(of).unwrap_or(0);
            let last = words.last().unwrap_or(&"");
            let (name, many) = last.trim_end_matches(']').split_once('[').unwrap_or((last, "1"));
            Param { name: name.to_string(), bytes: bytes * many.parse().unwrap_or(0) }
        };
        let params = params.split(',').map(str::trim).filter(|p| !p.is_empty()).map(param).collect();
        let kernel = Kernel {
            name: name.into(),
            params,
            registers: vec![],
            shared: 0,
            dynamic: false,
            threads: 0,
            body: vec![],
        };
        Reader { kernel, registers: HashMap::new(), shared: HashMap::new(), labels: HashMap::new() }
    }

    fn threads(&mut self, directives: &str) {
        let after = directives.split(".reqntid").nth(1).unwrap_or("");
        let first: String = after.trim_start().chars().take_while(char::is_ascii_digit).collect();
        self.kernel.threads = first.parse().unwrap_or(0);
    }

    /// Shared memory of the launch, after that of the entry; with no more than the declared alignment.
    fn outside(&mut self, line: &str) -> Result<(), String> {
        let name =
            line.split_whitespace().last().and_then(|w| w.strip_suffix("[];")).ok_or("`.extern` of what?")?;
        if !line.contains(".shared .align 16 .b8 ") {
            return Err(format!("unknown directive {line}"));
        }
        (self.kernel.shared, self.kernel.dynamic) = (OUTSIDE, true);
        self.shared.insert(name.into(), OUTSIDE);
        Ok(())
    }

    fn body(mut self, text: &str, span: (usize, usize)) -> Result<Kernel, String> {
        let mut statements = Vec::new();
        let mut at = span.0;
        let (mut counted, mut line) = (0, 1);
        while at < span.1 {
            let rest = &text[at..span.1];
            let skipped = rest.len() - rest.trim_start().len();
            at += skipped;
            let rest = &text[at..span.1];
            if rest.is_empty() {
                break;
            }
            line += text[counted..at].matches('\n').count();
            counted = at;
            let name: String =
                rest.chars().take_while(|c| c.is_alphanumeric() || "_$".contains(*c)).collect();
            if !name.is_empty() && rest[name.len()..].starts_with(':') {
                self.labels.insert(name.clone(), statements.len());
                at += name.len() + 1;
                continue;
            }
            let end = rest.find(';').ok_or_else(|| format!("line {line}: a statement without `;`"))?;
            let statement = rest[..end].trim();
            at += end + 1;
            if statement.starts_with('.') {
                self.declare(statement).map_err(|e| format!("line {line}: {e}: {statement}"))?;
            } else if !statement.starts_with(".pragma") {
                statements.push((line, statement.to_string()));
            }
        }
        for (line, statement) in statements {
            let ins = self
                .statement(line, &statement)
                .map_err(|e| format!("{}, line {line}: {e}: {statement}", self.kernel.name))?;
            self.kernel.body.push(ins);
        }
        Ok(self.kernel)
    }

    fn declare(&mut self, statement: &str) -> Result<(), String> {
        let words: Vec<&str> = statement.split_whitespace().collect();
        match words[0] {
            ".pragma" => Ok(()),
            ".reg" => {
                for name in words[2..].join(" ").split(',').map(str::trim) {
                    let (stem, count) = match name.split_once('<') {
                        Some((stem, n)) => {
                            (stem, n.trim_end_matches('>').parse::<usize>().map_err(|e| e.to_string())?)
                        }
                        None => (name, 0),
                    };
                    if count == 0 {
                        self.register(stem.into());
                    }
                    (0..count).for_each(|i| self.register(format!("{stem}{i}")));
                }
                Ok(())
            }
            ".shared" if self.kernel.dynamic => Err("both kinds of shared memory".into()),
            ".shared" => {
                let last = words.last().ok_or("a name is missing")?;
                let (name, n) = last.split_once('[').ok_or("an array is expected")?;
                let n: usize = n.trim_end_matches(']').parse().map_err(|_| "a length is expected")?;
                let ty = words[words.len() - 2].trim_start_matches('.');
                let width = width(ty).ok_or("a type is expected")?;
                // With no more than the declared alignment: a device may place it there.
                let asked =
                    words.iter().position(|w| *w == ".align").and_then(|i| words.get(i + 1)?.parse().ok());
                let align: usize = asked.unwrap_or(width);
                let at = self.kernel.shared.next_multiple_of(align);
                let at = if at.is_multiple_of(2 * align) { at + align } else { at };
                self.shared.insert(name.into(), at);
                self.kernel.shared = at + n * width;
                Ok(())
            }
            _ => Err("unknown directive".into()),
        }
    }

    fn register(&mut self, name: String) {
        self.registers.insert(name.clone(), self.kernel.registers.len());
        self.kernel.registers.push(name);
    }

    fn statement(&self, line: usize, statement: &str) -> Result<Ins, String> {
        let (guard, rest) = match statement.strip_prefix('@') {
            Some(rest) => {
                let (name, rest) = rest.split_once(char::is_whitespace).ok_or("nothing is guarded")?;
                let wanted = !name.starts_with('!');
                let name = name.trim_start_matches('!');
                (Some((*self.registers.get(name).ok_or("unknown predicate")?, wanted)), rest.trim())
            }
            None => (None, statement),
        };
        let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let args: Vec<Arg> = split(operands).into_iter().map(|a| self.arg(a)).collect::<Result<_, _>>()?;
        let op = op(opcode, &args).ok_or_else(|| format!("unknown opcode {opcode}"))?;
        Ok(Ins { line, guard, op, args })
    }

    fn arg(&self, text: &str) -> Result<Arg, String> {
        let text = text.trim();
        if let Some(inner) = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) {
            return Ok(Arg::Vector(inner.split(',').map(|a| self.arg(a)).collect::<Result<_, _>>()?));
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            if let Some(i) = self.kernel.params.iter().position(|p| p.name == inner.trim()) {
                return Ok(Arg::Param(i));
            }
            if let Some((map, place)) = inner.split_once(',') {
                let Arg::Vector(place) = self.arg(place)? else { return Err("a place is expected".into()) };
                return Ok(Arg::Tensor(Box::new(self.arg(map)?), place));
            }
            let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
            let offset = offset.trim().parse().map_err(|_| format!("a bad offset {offset}"))?;
            return Ok(Arg::Address(Box::new(self.arg(base)?), offset));
        }
        if let Some(bits) = text.strip_prefix("0f") {
            return u64::from_str_radix(bits, 16).map(Arg::Imm).map_err(|_| format!("a bad number {text}"));
        }
        if let Some(bits) = text.strip_prefix("0x") {
            return u64::from_str_radix(bits, 16).map(Arg::Imm).map_err(|_| format!("a bad number {text}"));
        }
        if let Ok(n) = text.parse::<i64>() {
            return Ok(Arg::Imm(n as u64));
        }
        if let Some(&r) = self.registers.get(text) {
            return Ok(Arg::Reg(r));
        }
        if let Some(&at) = self.shared.get(text) {
            return Ok(Arg::Imm(at as u64));
        }
        if let Some(&at) = self.labels.get(text) {
            return Ok(Arg::Label(at));
        }
        if let Some(i) = self.kernel.params.iter().position(|p| p.name == text && p.bytes == 128) {
            return Ok(Arg::Imm(MAPS + i as u64));
        }
        if text == "_" {
            return Ok(Arg::Sink);
        }
        Ok(Arg::Special(match text {
            "%tid.x" => Special::Thread,
            "%ntid.x" => Special::Threads,
            "%ctaid.x" => Special::Block(0),
            "%ctaid.y" => Special::Block(1),
            "%ctaid.z" => Special::Block(2),
            "%nctaid.x" => Special::Blocks(0),
            "%nctaid.y" => Special::Blocks(1),
            "%laneid" => Special::Lane,
            _ => return Err(format!("unknown name {text}")),
        }))
    }
}

/// Splits operands at commas, but not inside brackets and braces.
fn split(operands: &str) -> Vec<&str> {
    let (mut depth, mut from, mut out) = (0, 0, Vec::new());
    for (i, c) in operands.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                out.push(&operands[from..i]);
                from = i + 1;
            }
            _ => {}
        }
    }
    if !operands[from..].trim().is_empty() {
        out.push(&operands[from..]);
    }
    out
}

fn op(opcode: &str, args: &[Arg]) -> Option<Op> {
    let parts: Vec<&str> = opcode.split('.').collect();
    match parts[0] {
        "mov" if matches!(args, [_, Arg::Vector(_)]) => return Some(Op::Pack(pieces(&args[1], parts[1])?)),
        "mov" if matches!(args, [Arg::Vector(_), _]) => return Some(Op::Unpack(pieces(&args[0], parts[1])?)),
        "ld" | "st" => {
            let space = match parts[1] {
                "param" => Space::Param,
                "global" => Space::Global,
                "shared" => Space::Shared,
                _ => return None,
            };
            let (vector, rest) = match parts[2..].iter().find(|p| ["v2", "v4"].contains(p)) {
                Some(v) => (v[1..].parse().ok()?, parts.len() - 4),
                None => (1, parts.len() - 3),
            };
            let known = parts[2..].iter().filter(|p| ["nc"].contains(p)).count();
            let named = args.iter().find_map(|a| if let Arg::Vector(v) = a { Some(v.len()) } else { None });
            if known != rest || named.unwrap_or(1) != vector {
                return None;
            }
            let bytes = width(parts[parts.len() - 1])?;
            if bytes * vector > 16 {
                return None;
            }
            return Some(match (parts[0], known) {
                ("ld", 0) => Op::Load(space, bytes),
                ("ld", _) if space == Space::Global => Op::LoadConstant(bytes),
                ("st", 0) => Op::Store(space, bytes),
                _ => return None,
            });
        }
        _ => {}
    }
    Some(match opcode {
        "shfl.sync.bfly.b32" => Op::Shuffle(Shuffle::Butterfly),
        "shfl.sync.idx.b32" => Op::Shuffle(Shuffle::Index),
        "shfl.sync.down.b32" => Op::Shuffle(Shuffle::Down),
        "shfl.sync.up.b32" => Op::Shuffle(Shuffle::Up),
        "bar.sync" => Op::Barrier,
        "bar.warp.sync" => Op::WarpBarrier,
        "bra" | "bra.uni" => Op::Branch,
        "ret" | "exit" => Op::Exit,
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16" => Op::LoadMatrix(4, false),
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" => Op::LoadMatrix(4, true),
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16" => Op::LoadMatrix(2, false),
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16" => Op::LoadMatrix(2, true),
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => Op::Multiply,
        "cp.async.cg.shared.global" => Op::CopyAsync(16),
        "cp.async.ca.shared.global" => Op::CopyAsync(4),
        "cp.async.commit_group" => Op::CommitGroup,
        "cp.async.wait_group" => Op::WaitGroup,
        _ => return of_sm90a(opcode).or_else(|| wmma::op(opcode)).or_else(|| arithmetic(opcode)),
    })
}

/// Opcodes of compute capability 9.0: the copy engine, mbarriers, wgmma.
fn of_sm90a(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "mbarrier.init.shared::cta.b64" => Op::BarrierInit,
        "fence.mbarrier_init.release.cluster" => Op::BarrierFence,
        "mbarrier.arrive.shared::cta.b64" => Op::Arrive,
        "mbarrier.arrive.expect_tx.shared::cta.b64" => Op::ArriveExpect,
        "mbarrier.try_wait.parity.shared::cta.b64" => Op::TryWait,
        "setmaxnreg.inc.sync.aligned.u32" => Op::Registers(true),
        "setmaxnreg.dec.sync.aligned.u32" => Op::Registers(false),
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" => Op::CopyBox,
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" => Op::MultiplyAsync(64),
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" => Op::MultiplyAsync(128),
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" => Op::MultiplyAsync(256),
        "wgmma.fence.sync.aligned" => Op::MultiplyFence,
        "wgmma.commit_group.sync.aligned" => Op::MultiplyCommit,
        "wgmma.wait_group.sync.aligned" => Op::MultiplyWait,
        _ => return None,
    })
}

/// Bits of each part of a register that is packed or unpacked.
fn pieces(vector: &Arg, ty: &str) -> Option<u32> {
    match vector {
        Arg::Vector(v) => Some((8 * width(ty)? / v.len()) as u32),
        _ => None,
    }
}
