//! SPIR-V whose arithmetic a driver may not contract: a * b + c with one rounding in place of two.

/// OpDecorate and OpMemberDecorate, and the decoration NoContraction (SPIR-V 1.6, 3.20 and 3.52.3).
const DECORATE: u32 = 71;
const MEMBER_DECORATE: u32 = 72;
const NO_CONTRACTION: u32 = 42;
/// OpFNegate, OpFAdd, OpFSub, OpFMul, OpFDiv, OpVectorTimesScalar and OpDot.
const ARITHMETIC: [u32; 7] = [127, 129, 131, 133, 136, 142, 148];

/// The words of a header, before the first instruction.
const HEADER: usize = 5;

/// Each instruction of a module: where it begins, and its opcode.
fn instructions(words: &[u32]) -> Vec<(usize, u32)> {
    let (mut at, mut all) = (HEADER, Vec::new());
    while at < words.len() {
        all.push((at, words[at] & 0xffff));
        at += (words[at] >> 16) as usize;
    }
    all
}

/// The module with the decoration NoContraction at every result of arithmetic.
pub fn decorated(words: &[u32]) -> Vec<u32> {
    let all = instructions(words);
    let results = all.iter().filter(|(_, code)| ARITHMETIC.contains(code)).map(|(at, _)| words[at + 2]);
    let added: Vec<u32> = results.flat_map(|id| [3 << 16 | DECORATE, id, NO_CONTRACTION]).collect();
    let is_decoration = |(_, code): &&(usize, u32)| [DECORATE, MEMBER_DECORATE].contains(code);
    let (first, _) = *all.iter().find(is_decoration).expect("a module with bindings has decorations");
    [&words[..first], &added, &words[first..]].concat()
}
