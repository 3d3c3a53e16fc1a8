//! Patterns of machine code that cost time on a card and that PTX does not show, because ptxas moves statements and makes
//! branches of predicates: a branch for each output of a tile, loads of the next step behind the products of this one,
//! a wait after each wgmma.

use std::ops::Range;

struct Instruction {
    opcode: String,
    /// Everything after the opcode.
    operands: String,
}

/// The machine code of one entry.
pub struct Entry {
    pub name: String,
    code: Vec<Instruction>,
    /// Labels, with the index of the next instruction.
    labels: Vec<(String, usize)>,
}

/// The entries in the output of `nvdisasm -c`.
pub fn entries(text: &str) -> Vec<Entry> {
    let mut all: Vec<Entry> = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix(".text.") {
            all.push(Entry { name: name.trim_end_matches(':').into(), code: vec![], labels: vec![] });
        }
        let Some(entry) = all.last_mut() else { continue };
        if let Some(label) = line.strip_prefix(".L_").and_then(|l| l.strip_suffix(':')) {
            entry.labels.push((format!(".L_{label}"), entry.code.len()));
        }
        entry.code.extend(instruction(line));
    }
    all
}

/// `        /*0a30*/              @!P0 LDG.E.64 R10, desc[UR8][R18.64] ;`
fn instruction(line: &str) -> Option<Instruction> {
    let text = line.trim_start().strip_prefix("/*")?.split_once("*/")?.1.split(';').next()?.trim();
    let text = if text.starts_with('@') { text.split_once(' ')?.1.trim() } else { text };
    let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
    opcode
        .starts_with(char::is_uppercase)
        .then(|| Instruction { opcode: opcode.into(), operands: operands.into() })
}

impl Instruction {
    fn is(&self, beginning: &str) -> bool {
        self.opcode.split('.').next() == Some(beginning)
    }
    /// Whether it loads from or stores to global memory 8 or 16 bytes at once.
    fn is_wide(&self) -> bool {
        self.opcode.split('.').any(|part| part == "64" || part == "128")
    }
    fn loads(&self) -> bool {
        self.is("LDG") || self.is("LDGSTS")
    }
    fn multiplies(&self) -> bool {
        self.is("HMMA") || self.is("FFMA")
    }
    fn ends_block(&self) -> bool {
        ["BRA", "EXIT", "BRX", "CALL", "RET"].iter().any(|op| self.is(op))
    }
}

impl Entry {
    /// Ranges of instructions with no label inside and no branch but the last.
    fn blocks(&self) -> Vec<Range<usize>> {
        let ends = self.code.iter().enumerate().filter(|(_, i)| i.ends_block()).map(|(at, _)| at + 1);
        let mut cuts: Vec<usize> = self.labels.iter().map(|(_, at)| *at).chain(ends).collect();
        cuts.extend([0, self.code.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).map(|w| w[0]..w[1]).collect()
    }

    /// The code of every loop, by the place of the branch back.
    fn loops(&self) -> impl Iterator<Item = &[Instruction]> {
        self.code.iter().enumerate().filter(|(_, i)| i.is("BRA")).filter_map(|(at, i)| {
            let label = i.operands.split_once('(')?.1.split(')').next()?;
            let (_, start) = self.labels.iter().find(|(name, _)| name == label)?;
            self.code.get(*start..at)
        })
    }
}

/// Fewer stores than this between two branches are a branch per output.
const TOGETHER: usize = 4;

/// The faults of an epilogue. `stores`: number of vector stores in its PTX, and only vectors are counted; 0: stores of any
/// width are counted.
pub fn epilogue_faults(entry: &Entry, stores: usize) -> Vec<String> {
    let counts = |i: &Instruction| stores == 0 || i.is_wide();
    let places = |of: Range<usize>, op: &str| -> Vec<usize> {
        of.filter(|&at| entry.code[at].is(op) && counts(&entry.code[at])).collect()
    };
    let all = places(0..entry.code.len(), "STG").len();
    let blocks: Vec<Range<usize>> = entry.blocks();
    let has = |b: &Range<usize>, op: &str| !places(b.clone(), op).is_empty();
    let first = places(0..entry.code.len(), "STG").first().copied().unwrap_or(0);
    let outputs = |b: &&Range<usize>| has(b, "STG") || b.start > first && has(b, "LDG");
    let with: Vec<&Range<usize>> = blocks.iter().filter(outputs).collect();
    let mut found = Vec::new();
    if all < stores.max(TOGETHER) {
        found.push(format!("{}: {all} stores of outputs, and PTX has {stores} of vectors", entry.name));
    }
    if with.len() * TOGETHER > all {
        found.push(format!(
            "{}: {all} stores of outputs in {} pieces between branches",
            entry.name,
            with.len()
        ));
    }
    let late = |b: &&Range<usize>| places((*b).clone(), "LDG").last() > places((*b).clone(), "STG").first();
    if stores > 0 && with.into_iter().any(|b| late(&b)) {
        found.push(format!("{}: outputs are loaded after others are stored", entry.name));
    }
    found
}

/// The faults of the main loop, the first with loads and products: loads of the next step stand behind products of
/// this one, or, if they go to registers, the products wait for them.
pub fn loop_faults(entry: &Entry) -> Vec<String> {
    let main = entry.loops().find(|code| {
        code.iter().any(Instruction::loads) && code.iter().filter(|i| i.multiplies()).count() >= 16
    });
    let Some(code) = main else { return vec![format!("{}: no loop with loads and products", entry.name)] };
    let first = code.iter().position(Instruction::multiplies).unwrap_or(0);
    let behind = code[first..].iter().filter(|i| i.loads()).count();
    let mut found = Vec::new();
    if behind > 0 {
        found.push(format!(
            "{}: {behind} loads of the next step stand behind products of this one",
            entry.name
        ));
    }
    let used = |(at, load): &(usize, &Instruction)| {
        let register = load.operands.split(',').next().unwrap_or("").trim();
        let uses = |i: &Instruction| i.operands.split([',', ' ', '[', ']', '.']).any(|o| o == register);
        code[at + 1..first].iter().any(uses)
    };
    let waits = code[..first].iter().enumerate().filter(|(_, i)| i.is("LDG")).filter(used).count();
    if waits > 0 {
        found.push(format!("{}: products wait for {waits} loads of the next step", entry.name));
    }
    found
}

/// A wait after more than every second wgmma.
pub fn serialised(entry: &Entry) -> Option<String> {
    let count = |is: &dyn Fn(&Instruction) -> bool| entry.code.iter().filter(|i| is(i)).count();
    let (products, waits) = (count(&|i| i.is("HGMMA")), count(&|i| i.opcode.starts_with("WARPGROUP.DEPBAR")));
    (2 * waits > products).then(|| format!("{}: {waits} waits for {products} wgmma", entry.name))
}

/// A body in the form of the disassembler's output: labels end with `:`.
fn body(lines: &str) -> Entry {
    let of =
        |line: &str| if line.ends_with(':') { line.into() } else { format!("        /*0010*/  {line} ;") };
    let text: Vec<String> = lines.split(';').map(str::trim).map(of).collect();
    entries(&format!(".text.f:\n{}", text.join("\n"))).remove(0)
}

#[test]
fn slow_epilogues_are_found() {
    let together = "@P0 BRA `(.L_x_1); @P1 LDG.E.64 R2, [R4.64]; STG.E.64 [R4.64], R2; STG.E.64 [R4.64+0x8], R2; \
                    STG.E.64 [R4.64+0x10], R2; STG.E.64 [R4.64+0x18], R2; EXIT; .L_x_1:; @P0 STG.E [R4.64], R2; EXIT";
    let late = together.replace("STG.E.64 [R4.64+0x18]", "LDG.E.64 R2, [R4.64]; STG.E.64 [R4.64+0x18]");
    let apart = "STG.E [R4.64], R2; @P0 BRA `(.L_x_1); LDG.E R2, [R4.64]; .L_x_1:; STG.E [R4.64], R2; \
                 STG.E [R4.64], R2; @P1 BRA `(.L_x_2); LDG.E R2, [R4.64]; .L_x_2:; STG.E [R4.64], R2; EXIT";
    let cases = [(together, 4, 0), (&late, 4, 1), (apart, 0, 1), (apart, 4, 1), (together, 8, 1)];
    for (text, stores, want) in cases {
        assert_eq!(epilogue_faults(&body(text), stores).len(), want, "{text}, {stores}");
    }
}

#[test]
fn slow_main_loops_are_found() {
    let products = "HMMA R8, R2, R4, R8;".repeat(16);
    let with =
        |before: &str, after: &str| body(&format!(".L_x_1:;{before}{products}{after}@P0 BRA `(.L_x_1)"));
    assert_eq!(loop_faults(&with("LDG.E R10, [R6.64];", "STS [R5], R10;")), Vec::<String>::new());
    assert_eq!(loop_faults(&with("LDGSTS.E.128 [R5], [R6.64];", "")), Vec::<String>::new());
    let behind = loop_faults(&with("LDG.E R10, [R6.64];", "LDG.E R11, [R6.64];"));
    assert_eq!(behind, ["f: 1 loads of the next step stand behind products of this one"]);
    let waits = loop_faults(&with("LDG.E R10, [R6.64]; LDG.E R11, [R6.64]; STS [R5], R10;", ""));
    assert_eq!(waits, ["f: products wait for 1 loads of the next step"]);
    assert_eq!(loop_faults(&body("EXIT")), ["f: no loop with loads and products"]);
}

#[test]
fn waits_after_each_wgmma_are_found() {
    let both = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24; WARPGROUP.DEPBAR.LE gsb0, 0x0;";
    assert_eq!(serialised(&body(&both.repeat(4))), Some("f: 4 waits for 4 wgmma".into()));
    let once = format!("{}{both}", both.split_inclusive(';').next().unwrap().repeat(3));
    assert_eq!(serialised(&body(&once)), None);
}
