//! llama.cpp's mixes of types (`Q4_K_M`): which type each tensor of a model gets. The rules are those of
//! `llama_tensor_get_type` and `tensor_type_fallback` in src/llama-quant.cpp of ggml-org/llama.cpp at 0c1e57098, without
//! an importance matrix. `tests/golden/export/mixes.json` has llama.cpp's own choices. Left out is what no family here
//! has: Falcon, and layers without exactly one projection of values.

use super::encode::F16;
use crate::numeric::block::{Block, Encoding};

/// A model as the rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model<'a> {
    /// llama.cpp's architecture.
    pub architecture: &'a str,
    /// Number of decoder blocks.
    pub layers: usize,
    /// Query heads, key/value heads.
    pub heads: (usize, usize),
    /// Experts of a layer; 0 for a dense model.
    pub experts: usize,
    /// Whether each layer has a convolution in the place of attention; empty where none has.
    pub convolutions: &'a [bool],
    /// Whether the file has no `output.weight`.
    pub tied: bool,
}

impl Model<'_> {
    /// llama.cpp's `LLM_TYPE_70B`: its values have fewer heads, so that more bits for them cost little.
    fn is_70b(&self) -> bool {
        let shape = self.architecture == "llama" && self.heads.0 != self.heads.1;
        self.layers == 80 && (shape || self.architecture == "qwen2")
    }
}

macro_rules! table {
    ($($mix:ident = $name:literal, $number:literal, $block:ident);* $(;)?) => {
        /// A mix. Mixes that need an importance matrix are left out.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(non_camel_case_types, missing_docs)] // llama.cpp's own names
        pub enum Mix { $($mix),* }

        impl Mix {
            /// All mixes.
            pub const ALL: &[Mix] = &[$(Mix::$mix),*];

            /// Name of the option.
            pub fn name(self) -> &'static str {
                match self { $(Mix::$mix => $name),* }
            }

            /// llama.cpp's number of a file (`general.file_type`).
            pub fn file_type(self) -> u32 {
                match self { $(Mix::$mix => $number),* }
            }

            /// The type of a tensor for which no rule says otherwise.
            fn usual(self) -> Block {
                match self { $(Mix::$mix => Block::$block),* }
            }
        }
    };
}

table! {
    Q2_K = "q2_k", 10, Q2_K;
    Q3_K_S = "q3_k_s", 11, Q3_K;
    Q3_K_M = "q3_k_m", 12, Q3_K;
    Q3_K_L = "q3_k_l", 13, Q3_K;
    Q4_0 = "q4_0", 2, Q4_0;
    Q4_1 = "q4_1", 3, Q4_1;
    Q4_K_S = "q4_k_s", 14, Q4_K;
    Q4_K_M = "q4_k_m", 15, Q4_K;
    Q5_0 = "q5_0", 8, Q5_0;
    Q5_1 = "q5_1", 9, Q5_1;
    Q5_K_S = "q5_k_s", 16, Q5_K;
    Q5_K_M = "q5_k_m", 17, Q5_K;
    Q6_K = "q6_k", 18, Q6_K;
}

impl Mix {
    /// The type of a matrix with this name and this many values in a row.
    pub fn kind(self, model: &Model, name: &str, row: usize) -> Encoding {
        let head = name == "output.weight" || model.tied && name == "token_embd.weight";
        let block = match head {
            true if row.is_multiple_of(self.usual().elements()) => Block::Q6_K,
            true => Block::Q8_0,
            false => layer_of(name).map_or(self.usual(), |(layer, part)| self.in_layer(model, layer, part)),
        };
        let smaller = match block {
            Block::Q2_K | Block::Q3_K => Block::Q4_0,
            Block::Q4_K => Block::Q5_0,
            Block::Q5_K => Block::Q5_1,
            Block::Q6_K => Block::Q8_0,
            other => other,
        };
        let whole = [block, smaller].into_iter().find(|block| row.is_multiple_of(block.elements()));
        whole.map_or(F16, Encoding::Blocks)
    }

    fn in_layer(self, model: &Model, layer: usize, part: &str) -> Block {
        match part {
            "attn_v" | "attn_qkv" => self.values(model, layer),
            "attn_k" if model.experts == 8 => Block::Q8_0,
            "attn_output" => self.attention_output(model),
            "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" => self.down(model.layers, layer),
            _ => self.usual(),
        }
    }

    fn values(self, model: &Model, layer: usize) -> Block {
        // llama.cpp counts the layers of attention here.
        let convolutions = |layers: usize| model.convolutions.iter().take(layers).filter(|has| **has).count();
        let (layer, layers) = (layer - convolutions(layer), model.layers - convolutions(model.layers));
        let block = match self {
            // llama.cpp asks layer 0, which has no heads where it is a convolution.
            Mix::Q2_K
                if model.convolutions.first() != Some(&true) && model.heads.0 / model.heads.1.max(1) >= 4 =>
            {
                Block::Q4_K
            }
            Mix::Q2_K => Block::Q3_K,
            Mix::Q3_K_M if layer >= 2 => Block::Q4_K,
            Mix::Q3_K_M | Mix::Q3_K_L => Block::Q5_K,
            Mix::Q4_K_M | Mix::Q5_K_M if gets_more_bits(layer, layers) => Block::Q6_K,
            Mix::Q4_K_S if layer < 4 => Block::Q5_K,
            _ => self.usual(),
        };
        match block {
            _ if model.experts == 8 => Block::Q8_0,
            Block::Q3_K | Block::Q4_K if model.is_70b() => Block::Q5_K,
            block => block,
        }
    }

    fn attention_output(self, model: &Model) -> Block {
        match self {
            Mix::Q2_K | Mix::Q3_K_S | Mix::Q3_K_M | Mix::Q4_K_S | Mix::Q4_K_M if model.experts == 8 => {
                Block::Q5_K
            }
            _ if model.experts == 8 => self.usual(),
            Mix::Q2_K => Block::Q3_K,
            Mix::Q3_K_M => Block::Q4_K,
            Mix::Q3_K_L => Block::Q5_K,
            _ => self.usual(),
        }
    }

    fn down(self, layers: usize, layer: usize) -> Block {
        match self {
            Mix::Q2_K => Block::Q3_K,
            Mix::Q3_K_M if layer >= layers / 16 => Block::Q4_K,
            Mix::Q3_K_M | Mix::Q3_K_L => Block::Q5_K,
            Mix::Q4_K_M | Mix::Q5_K_M if gets_more_bits(layer, layers) => Block::Q6_K,
            Mix::Q4_K_S if layer < layers / 8 => Block::Q5_K,
            _ => self.usual(),
        }
    }
}

/// llama.cpp's `use_more_bits`: the first and the last eighth of the layers, and every third one between.
fn gets_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// The layer of a weight, and the middle of its name: (3, `attn_v`) for `blk.3.attn_v.weight`.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}
