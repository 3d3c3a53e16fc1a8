//! The kernels in the binary: PTX text by file name. The driver compiles a file for its device at the first launch of
//! one of its entries.

/// Name and text of a file of kernels/ptx, by hand or generated.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// The name in [`Launch::file`](super::Launch::file).
    pub file: &'static str,
    /// PTX.
    pub text: &'static str,
}

macro_rules! sources {
    ($($folder:ident $file:literal),* $(,)?) => {
        &[$(Source {
            file: $file,
            text: include_str!(concat!("../../../ptx/", stringify!($folder), "/", $file)),
        }),*]
    };
}

/// All files.
pub const SOURCES: &[Source] = sources![
    by_hand "add.ptx",
    generated "attention.ptx",
    generated "attention_grad.ptx",
    generated "attention_grad_sm80.ptx",
    generated "attention_grad_sm90a.ptx",
    generated "attention_grad_wide_sm80.ptx",
    generated "attention_sm80.ptx",
    generated "attention_sm90a.ptx",
    by_hand "bias.ptx",
    by_hand "convolution.ptx",
    by_hand "convolution_silu.ptx",
    by_hand "copy.ptx",
    by_hand "cross_entropy.ptx",
    by_hand "delta_rule.ptx",
    by_hand "dropout.ptx",
    by_hand "embed.ptx",
    by_hand "fill.ptx",
    by_hand "gated.ptx",
    by_hand "gated_grad.ptx",
    by_hand "gated_sm80.ptx",
    by_hand "gather_rows.ptx",
    generated "linear.ptx",
    generated "linear_grad.ptx",
    generated "lora_linear_sm80.ptx",
    generated "lora_linear_sm90a.ptx",
    generated "matmul.ptx",
    generated "product_sm70.ptx",
    generated "product_sm80.ptx",
    generated "product_sm90a.ptx",
    by_hand "rmsnorm.ptx",
    by_hand "rmsnorm_grad.ptx",
    by_hand "rmsnorm_sm80.ptx",
    by_hand "rope.ptx",
    by_hand "rope_sm80.ptx",
    by_hand "scale_rows.ptx",
    generated "skinny.ptx",
    generated "widen.ptx",
    generated "widen_sm80.ptx",
];

/// The text of a file.
pub fn source(file: &str) -> Option<&'static str> {
    find(file).map(|s| s.text)
}

/// A file by its name.
pub fn find(file: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|s| s.file == file)
}

impl Source {
    /// The PTX version of the text, 70 for 7.0. A driver accepts versions up to its own.
    pub fn version(&self) -> u32 {
        let line = self.line(".version ").unwrap_or("0.0");
        let (major, minor) = line.trim().split_once('.').unwrap_or(("0", "0"));
        major.parse().unwrap_or(0) * 10 + minor.parse().unwrap_or(0)
    }

    /// The lowest compute capability of the file, 70 for 7.0.
    pub fn target(&self) -> u32 {
        self.line(".target sm_").and_then(|n| n.trim().trim_end_matches('a').parse().ok()).unwrap_or(0)
    }

    /// Whether it runs on its target's capability alone, as sm_90a does.
    pub fn exact(&self) -> bool {
        self.line(".target sm_").is_some_and(|n| n.trim().ends_with('a'))
    }

    /// Whether a device of this compute capability accepts it, with a driver that reads PTX up to `reads`.
    pub fn runs_on(&self, (major, minor): (u32, u32), reads: u32) -> bool {
        let (has, wants) = (10 * major + minor, self.target());
        reads >= self.version() && if self.exact() { has == wants } else { has >= wants }
    }

    /// Bytes of dynamic shared memory per launch, from the budget in the file's head.
    pub fn dynamic(&self) -> u32 {
        if self.line(".extern .shared").is_none() {
            return 0;
        }
        let budget = self.line("// budget: ").unwrap_or("");
        budget.split([' ', ',']).filter_map(|word| word.parse().ok()).nth(1).unwrap_or(0)
    }

    /// Registers per thread that its warpgroups redistribute (setmaxnreg), from the budget in the file's head.
    pub fn divided(&self) -> Option<u32> {
        let budget = self.line("// budget: ").filter(|_| self.text.contains("setmaxnreg"))?;
        budget.split(' ').find_map(|word| word.parse().ok())
    }

    fn line(&self, begins: &str) -> Option<&str> {
        self.text.lines().find_map(|l| l.strip_prefix(begins))
    }
}
