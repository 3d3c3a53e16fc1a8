//! What a kernel is: WGSL text, the constants that are put before it, and how it uses its buffers.
//!
//! Interface of every kernel: entry point `main`; `@group(0) @binding(0) var<uniform> p: Params` (a struct of u32
//! and f32 scalars, at most [`PARAMS`] bytes); storage buffers at bindings 1..n in the order of `buffers`; its
//! workgroup's number is `flat(group, groups)` of the prelude, because a dimension ends at 65,535. Sizes that
//! change the code (tiles, head sizes, encodings) are constants: `const NAME: u32 = value;` lines before the text.

/// How a kernel uses a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    Write,
}

/// The most bytes of a kernel's parameters.
pub const PARAMS: usize = 128;

/// A compute kernel's source.
#[derive(Debug)]
pub struct Kernel {
    /// Verb and variant, as errors name it.
    pub name: &'static str,
    /// Pieces of WGSL, in the order in which they are joined after the prelude.
    pub source: &'static [&'static str],
    /// Storage buffers from binding 1 on.
    pub buffers: &'static [Access],
}

/// A constant of a kernel.
pub type Constant = (&'static str, u32);

const PRELUDE: &str = include_str!("../../../kernels/wgsl/prelude.wgsl");

impl Kernel {
    /// The whole text that a driver compiles.
    pub fn text(&self, constants: &[Constant]) -> String {
        let mut text = String::new();
        for (name, value) in constants {
            text += &format!("const {name}: u32 = {value}u;\n");
        }
        text += PRELUDE;
        self.source.iter().for_each(|piece| text += piece);
        text
    }
}
