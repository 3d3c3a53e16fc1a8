//! The kernels that travel in the binary: PTX text by file name. The driver compiles a file for its device when an
//! entry of it is first launched.

/// Name and text of a file of kernels/ptx.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// As [`Launch::file`](super::Launch::file) names it.
    pub file: &'static str,
    /// PTX.
    pub text: &'static str,
}

macro_rules! sources {
    ($($file:literal),* $(,)?) => {
        &[$(Source { file: $file, text: include_str!(concat!("../../../kernels/ptx/", $file)) }),*]
    };
}

/// All of them.
pub const SOURCES: &[Source] = sources![
    "add.ptx",
    "attention.ptx",
    "attention_grad.ptx",
    "attention_grad_sm80.ptx",
    "attention_sm80.ptx",
    "bias.ptx",
    "copy.ptx",
    "cross_entropy.ptx",
    "dropout.ptx",
    "embed.ptx",
    "fill.ptx",
    "gather_rows.ptx",
    "linear.ptx",
    "linear_grad.ptx",
    "lora_linear_sm80.ptx",
    "matmul.ptx",
    "product_sm80.ptx",
    "rmsnorm.ptx",
    "rmsnorm_grad.ptx",
    "rmsnorm_sm80.ptx",
    "rope.ptx",
    "rope_sm80.ptx",
    "swiglu.ptx",
    "swiglu_grad.ptx",
    "swiglu_sm80.ptx",
    "widen.ptx",
    "widen_sm80.ptx",
];

/// The text of a file.
pub fn source(file: &str) -> Option<&'static str> {
    SOURCES.iter().find(|s| s.file == file).map(|s| s.text)
}

impl Source {
    /// The PTX version that the text asks for, as 70 for 7.0: a driver takes no later one than its own.
    pub fn version(&self) -> u32 {
        let line = self.line(".version ").unwrap_or("0.0");
        let (major, minor) = line.trim().split_once('.').unwrap_or(("0", "0"));
        major.parse().unwrap_or(0) * 10 + minor.parse().unwrap_or(0)
    }

    /// The lowest compute capability that it runs on, as 70 for 7.0.
    pub fn target(&self) -> u32 {
        self.line(".target sm_").and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }

    fn line(&self, begins: &str) -> Option<&str> {
        self.text.lines().find_map(|l| l.strip_prefix(begins))
    }
}
