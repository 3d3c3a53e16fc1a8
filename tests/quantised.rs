//! Bases in blocks: training on them equals, bit for bit, training on the same weights widened to f32, and equals
//! PEFT's training on the weights that the blocks' own packages dequantised, within the bound of all cases
//! (`tests/golden/make_quantised.py`).

#[path = "parity/case.rs"]
mod case;
#[path = "quantised/drawn.rs"]
mod drawn;
#[path = "tested_adapters/mod.rs"]
mod tested_adapters;
#[path = "parity/train.rs"]
mod train;

use case::Case;
use finetune::backend::Cpu;
use finetune::backend::wgpu::Options as Opening;
use finetune::families;
use finetune::format::{self, safetensors};
use finetune::model::decoder::Build;
use finetune::model::generate::generate;
use finetune::model::quantised::{QuantiseError, Quantised, Recipe};
use finetune::model::stage::{Microbatch, Model, Output, Sampling, Ticket, Want};
use finetune::numeric::block::{Block, Blocks, Encoding};
use finetune::numeric::tensor::{About, Tensor, Tensors};
use stages::Loads;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quantised").join(name)
}

/// The case `folder` with the model `model` in it.
fn open(folder: &str, model: &str) -> Case {
    let files = format::open(&golden(folder).join(model)).unwrap();
    Case::of(&golden(folder), &files.config, files.tensors)
}

/// The same tensors, widened.
struct Widened<'a>(&'a dyn Tensors);

impl Tensors for Widened<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        self.0.tensor(name)
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }
}

fn stage(cpu: Cpu, case: &Case, tensors: &dyn Tensors) -> Box<dyn Model> {
    cpu.stage((&case.config, tensors, &case.lora), Build::whole(&case.config)).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Loss and gradient of the first rows, and the tokens generated after the first three ids.
fn answers(stage: Box<dyn Model>, case: &Case) -> (f64, Vec<u32>, Vec<u32>) {
    outputs(stage, &case.adapter("adapter_init"), &case.microbatch(0, 4))
}

fn outputs(mut stage: Box<dyn Model>, parameters: &[f32], batch: &Microbatch) -> (f64, Vec<u32>, Vec<u32>) {
    stage.set_parameters(parameters).unwrap();
    let Output::Loss(sums) = stage.forward(batch, None, Want::Gradient(Ticket(0))).unwrap() else {
        panic!("a whole model gives a loss");
    };
    let mut gradient = vec![f32::NAN; parameters.len()];
    stage.backward(Ticket(0), None, &mut gradient).unwrap();
    let sampling = Sampling { max_new_tokens: 8, temperature: 0.0, top_p: 1.0, seed: 1, stop: vec![] };
    let said = generate(&mut *stage, &batch.ids[..3], &sampling, &mut |_| true).unwrap();
    (sums.loss, bits(&gradient), said)
}

const CASES: [(&str, &str); 3] = [("gguf", "model.gguf"), ("nf4", "model"), ("mxfp4", "model.gguf")];

#[test]
fn quantised_cases_train_as_in_peft() {
    for (folder, model) in CASES {
        let case = open(folder, model);
        println!(
            "{folder}: {:?}",
            train::train(&case, &mut *stage(Cpu::new(2), &case, &case.tensors), &train::CPU)
        );
    }
}

/// Every adapter of tests/tested_adapters.
#[test]
fn quantised_cases_train_as_in_peft_on_wgpu() {
    for tested in tested_adapters::all() {
        for (folder, model) in CASES {
            let case = open(folder, model);
            let wgpu = tested.open(Opening { poison: true, ..Opening::default() }).unwrap();
            let build = Build::whole(&case.config);
            let mut stage = wgpu.stage((&case.config, &case.tensors, &case.lora), build).unwrap();
            let name = tested.adapter.name();
            println!("{name} {folder}: {:?}", train::train(&case, &mut *stage, &train::WGPU));
        }
    }
}

#[test]
fn training_from_blocks_equals_training_from_widened() {
    for (folder, model) in CASES {
        let case = open(folder, model);
        for open in [Cpu::new, Cpu::bf16, Cpu::reference] {
            let got = answers(stage(open(2), &case, &case.tensors), &case);
            let want = answers(stage(open(2), &case, &Widened(&case.tensors)), &case);
            assert!(got == want, "{folder}: {} {}", got.0, want.0);
        }
    }
}

/// Fails if the widened values of a matrix in blocks are requested.
struct OnlyBlocks<'a>(&'a dyn Tensors);

impl Tensors for OnlyBlocks<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        assert!(self.0.blocks(name)?.is_none(), "{name} was widened");
        self.0.tensor(name)
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        self.0.blocks(name)
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        self.0.about(name)
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }
}

#[test]
fn matrices_in_blocks_are_not_widened_on_loading() {
    for (folder, model) in CASES {
        let case = open(folder, model);
        for open in [Cpu::new, Cpu::bf16] {
            let got = answers(stage(open(2), &case, &OnlyBlocks(&case.tensors)), &case);
            assert!(got == answers(stage(open(2), &case, &case.tensors), &case), "{folder}");
        }
    }
}

/// Combinations that the PEFT cases leave out: biases, head norms and windows over blocks of every type.
#[test]
fn every_family_trains_from_blocks_of_every_type() {
    for family in families::ALL {
        let model = drawn::Drawn::new(family);
        let lora = model.lora();
        let parameters = model.parameters(&lora);
        let load = |cpu: Cpu, tensors: &dyn Tensors| {
            cpu.stage((&model.config, tensors, &lora), Build::whole(&model.config)).unwrap()
        };
        for open in [Cpu::new, Cpu::bf16] {
            let got = outputs(load(open(2), &OnlyBlocks(&model)), &parameters, &model.batch());
            let want = outputs(load(open(2), &Widened(&model)), &parameters, &model.batch());
            assert!(got.0.is_finite() && got.1.iter().any(|&g| f32::from_bits(g) != 0.0), "{}", family.name);
            assert!(got == want, "{}: {} {}", family.name, got.0, want.0);
        }
    }
}

#[test]
fn every_quantised_matrix_of_a_file_stays_in_blocks() {
    for (folder, model, blocks) in
        [("gguf", "model.gguf", 16), ("nf4", "model", 14), ("mxfp4", "model.gguf", 16)]
    {
        let case = open(folder, model);
        let named = case.tensors.names();
        let packed = named.iter().filter_map(|name| {
            let blocks = case.tensors.blocks(name).unwrap()?;
            let about = case.tensors.about(name).unwrap().unwrap();
            assert_eq!(about.encoding, Encoding::Blocks(blocks.block), "{name}");
            assert_eq!(about.shape, [blocks.rows, blocks.cols], "{name}");
            let tensor = case.tensors.tensor(name).unwrap().unwrap();
            let mut values = vec![0.0; blocks.rows * blocks.cols];
            blocks.block.widen(&mut values, &blocks.bytes);
            assert!(bits(&tensor.dtype.widen(&tensor.bytes)) == bits(&values), "{name}");
            Some(blocks.block)
        });
        let packed: Vec<Block> = packed.collect();
        assert_eq!(packed.len(), blocks, "{folder}");
        assert!(!named.iter().any(|name| name.contains("absmax") || name.contains("quant")), "{named:?}");
    }
}

#[test]
fn nested_magnitudes_are_read_as_by_bitsandbytes() {
    let case = open("nf4", "model");
    let worth = safetensors::open(&golden("nf4/dequantised.safetensors")).unwrap();
    assert_eq!(worth.names().len(), 2);
    for name in worth.names() {
        let (got, want) = (case.tensors.tensor(&name).unwrap().unwrap(), worth.get(&name).unwrap());
        assert_eq!(got.shape, want.shape);
        assert!(got.bytes == want.bytes, "{name}");
    }
}

#[test]
fn nf4_quantisation_matches_bitsandbytes() {
    let theirs = open("nf4", "model");
    let ours = Quantised::new(format::open(&golden("nf4/plain")).unwrap().tensors, Recipe::Nf4).unwrap();
    let layer = |name: &&String| name.contains("layers.0.") && name.contains("proj");
    let names = ours.names();
    assert_eq!(names.iter().filter(layer).count(), 7);
    // The magnitudes of layer 1 are quantised a second time, which changes no code.
    for name in names.iter().filter(layer) {
        let (got, want) =
            (ours.blocks(name).unwrap().unwrap(), theirs.tensors.blocks(name).unwrap().unwrap());
        assert!(got.bytes == want.bytes, "{name}");
    }
    assert!(ours.blocks("model.embed_tokens.weight").unwrap().is_none());
}

/// bitsandbytes quantised the magnitudes of layer 1 a second time.
#[test]
fn nf4_double_quantisation_matches_bitsandbytes() {
    let theirs = open("nf4", "model");
    let plain = format::open(&golden("nf4/plain")).unwrap().tensors;
    let ours = Quantised::new(plain, Recipe::Nf4Double).unwrap();
    let layer = |name: &&String| name.contains("layers.1.") && name.contains("proj");
    let names = ours.names();
    assert_eq!(names.iter().filter(layer).count(), 7);
    for name in names.iter().filter(layer) {
        let (got, want) =
            (ours.blocks(name).unwrap().unwrap(), theirs.tensors.blocks(name).unwrap().unwrap());
        assert!(got.bytes == want.bytes, "{name}");
    }
}

#[test]
fn unquantisable_models_are_refused_by_name() {
    let again = Quantised::new(open("nf4", "model").tensors, Recipe::Q8).err().unwrap();
    assert!(matches!(&again, QuantiseError::Already { encoding: "NF4", .. }), "{again}");
    let again = Quantised::new(open("gguf", "model.gguf").tensors, Recipe::Nf4).err().unwrap();
    assert!(again.to_string().contains("quantised already"), "{again}");
    let parity = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parity/llama");
    let ragged = Quantised::new(Case::open(&parity).tensors, Recipe::Q8).err().unwrap();
    assert!(ragged.to_string().contains("48 numbers are not whole blocks of 32"), "{ragged}");
    assert!(Recipe::named("int3").err().unwrap().to_string().contains("nf4, nf4-double, q8_0"));
}

#[test]
fn q8_0_has_the_bytes_of_ggml() {
    let name = "model.layers.0.mlp.down_proj.weight";
    let ours = Quantised::new(format::open(&golden("nf4/plain")).unwrap().tensors, Recipe::Q8).unwrap();
    let expected = std::fs::read(golden("nf4/down.q8_0")).unwrap();
    assert!(ours.blocks(name).unwrap().unwrap().bytes == expected);
    assert!(
        ours.blocks("lm_head.weight").unwrap().is_some()
            && ours.blocks("model.norm.weight").unwrap().is_none()
    );
}

/// The error of a bitsandbytes checkpoint in which `from` was replaced by `to`, of the same length.
fn damaged(from: &str, to: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(golden("nf4/model").join(file), dir.path().join(file)).unwrap();
    }
    let mut bytes = std::fs::read(golden("nf4/model/model.safetensors")).unwrap();
    assert_eq!(from.len(), to.len());
    let found: Vec<usize> = bytes
        .windows(from.len())
        .enumerate()
        .filter(|(_, w)| *w == from.as_bytes())
        .map(|(i, _)| i)
        .collect();
    assert!(!found.is_empty(), "{from}");
    found.iter().for_each(|&at| bytes[at..at + to.len()].copy_from_slice(to.as_bytes()));
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let model = format::open(dir.path()).unwrap();
    let name = "model.layers.1.self_attn.q_proj.weight";
    let said = model.tensors.blocks(name).map(|_| ()).unwrap_err();
    assert_eq!(said.lines().count(), 1);
    // Widened numbers need no whole blocks in a row.
    assert_eq!(model.tensors.tensor(name).is_ok(), said.contains("rows of"), "{said}");
    said
}

#[test]
fn damaged_checkpoints_of_bitsandbytes_are_named() {
    for (from, to, said) in [
        ("\"blocksize\": 64", "\"blocksize\": 48", "in blocks of 48 are not whole blocks of 64"),
        ("\"shape\": [64, 64]", "\"shape\": [96, 64]", "is not the codes of 96 x 64 numbers"),
        ("\"shape\": [64, 64]", "\"shape\": [64, 32]", "is not the codes of 64 x 32 numbers"),
        ("\"shape\": [64, 64]", "\"shape\": [128,32]", "rows of 32 numbers"),
        (
            "\"dtype\": \"bfloat16\", \"shape\": [64, 64]",
            "\"shape\": [1099511627776, 64]          ",
            "is not the codes of 1099511627776 x 64 numbers",
        ),
        ("\"shape\": [64, 64]", "\"shape\": [64    ]", "a matrix of 1 dimensions"),
        ("\"shape\": [64, 64]", "\"shape\": [64; 64]", "is not the state of a matrix"),
        (".quant_map", ".quant_mop", "weight.quant_map is missing"),
        (".nested_absmax", ".nested_absmix", "weight.nested_absmax is missing"),
        (".weight.absmax", ".weight.absmix", "weight.absmax is not"),
    ] {
        let got = damaged(from, to);
        assert!(got.contains(said) && got.contains("layers.1.self_attn.q_proj"), "{from}: {got}");
    }
}
