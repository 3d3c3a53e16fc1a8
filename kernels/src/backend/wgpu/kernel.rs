//! A kernel: WGSL text, the constants that precede it, and how it uses its buffers.
//!
//! Interface of every kernel: entry point `main`; `@group(0) @binding(0) var<uniform> p: Params` (a struct of u32 and
//! f32 scalars, at most [`PARAMS`] bytes); storage buffers at bindings 1..n in the order of `buffers`. The number of
//! its workgroup is `flat(group, groups)` of the prelude, because a dimension is limited to 65,535. Sizes that change
//! the code (tiles, head sizes, encodings) are constants: `const NAME: u32 = value;` lines before the text, and numbers
//! of its template. A kernel that reads a frozen matrix in blocks gets the code that unpacks them.

/// How a kernel uses a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    Write,
}

/// Most bytes of a kernel's parameters.
pub const PARAMS: usize = 128;

/// A compute kernel's source.
#[derive(Debug)]
pub struct Kernel {
    /// Verb and variant, as named in errors.
    pub name: &'static str,
    /// Pieces of WGSL, in the order in which they follow the prelude.
    pub source: &'static [&'static str],
    /// Storage buffers from binding 1 on.
    pub buffers: &'static [Access],
}

/// A constant of a kernel.
pub type Constant = (&'static str, u32);

pub(super) const PRELUDE: &str = include_str!("../../../wgsl/prelude.wgsl");

impl Kernel {
    /// The whole text for the driver. Requests for extensions come first; the constants determine them. A template that
    /// does not expand is returned unchanged, and no driver compiles it: the fault names the kernel.
    pub fn text(&self, constants: &[Constant]) -> String {
        let mut text = String::new();
        let says = |name: &str| constants.iter().any(|(n, value)| *n == name && *value > 0);
        if says("HALF") || says("SIDE") {
            text += "enable f16;\n";
        }
        if says("SIDE") {
            text += "enable wgpu_cooperative_matrix;\n";
        }
        let mut numbers: Vec<(&str, i64)> = constants.iter().map(|(n, v)| (*n, i64::from(*v))).collect();
        let block = super::encodings::block(constants);
        numbers.extend(
            block.iter().flat_map(|b| [("ELEMENTS", b.elements() as i64), ("BYTES", b.bytes() as i64)]),
        );
        for (name, value) in &numbers {
            text += &format!("const {name}: u32 = {value}u;\n");
        }
        text += PRELUDE;
        let mut pieces = self.source.concat();
        block.iter().for_each(|b| pieces += &super::encodings::pieces(*b).concat());
        text += &super::template::expand(&pieces, &numbers).unwrap_or(pieces);
        text
    }
}
