//! Weights: safetensors, shards with their index, GGUF models and adapters, PEFT adapters.

use crate::build::{self, Entry, Meta};
use crate::mutate::{self, Dice};
use crate::{Files, Format};
use finetune::config::refusal::Refusal;
use finetune::data::Tokenizer;
use finetune::families::LLAMA;
use finetune::format::gguf::order::Orders;
use finetune::format::{self, gguf, peft, safetensors};
use finetune::model::config::Config;
use finetune::numeric::tensor::Tensors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

pub const FORMATS: &[Format] = &[
    Format { name: "safetensors", share: 4, whole: plain, damage: in_the_file, read: read_plain },
    Format { name: "index", share: 2, whole: shards, damage: in_the_index, read: read_shards },
    Format { name: "gguf", share: 3, whole: model, damage: in_the_fields, read: read_model },
    Format { name: "gguf-bytes", share: 2, whole: real, damage: in_the_bytes, read: read_real },
    Format { name: "gguf-adapter", share: 2, whole: lora, damage: in_the_bytes, read: read_lora },
    Format { name: "peft", share: 3, whole: peft_adapter, damage: in_the_adapter, read: read_peft },
];

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub fn file(name: &str, bytes: impl Into<Vec<u8>>) -> (String, Option<Vec<u8>>) {
    (name.to_string(), Some(bytes.into()))
}

/// The bytes of a file of an undamaged input.
pub fn of<'a>(whole: &'a Files, name: &str) -> &'a [u8] {
    whole.iter().find(|(n, _)| n == name).and_then(|(_, bytes)| bytes.as_deref()).unwrap()
}

/// A safetensors file with that header.
fn assemble(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// Damages a safetensors file: its header's fields, the header's length, or bytes anywhere.
pub fn safetensors_file(dice: &mut Dice, whole: &[u8]) -> Vec<u8> {
    let n = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (header, data) = (&whole[8..8 + n], &whole[8 + n..]);
    let mut fields: Value = serde_json::from_slice(header).unwrap();
    let mut bytes = match dice.below(8) {
        0 => {
            let mut bytes = whole.to_vec();
            mutate::bytes(dice, &mut bytes);
            bytes
        }
        1 => {
            let mut bytes = whole.to_vec();
            bytes[..8].copy_from_slice(&dice.number().to_le_bytes());
            bytes
        }
        2 => assemble(&mutate::json(dice, &fields), data),
        _ => {
            (0..1 + dice.below(2)).for_each(|_| one_tensor(dice, &mut fields));
            assemble(fields.to_string().as_bytes(), data)
        }
    };
    match dice.below(16) {
        0 => bytes.truncate(8 + n + dice.below(data.len() + 1)),
        1 => bytes.extend([7; 5]),
        // Data with NaN values.
        2 if bytes.len() > 8 + n + 4 => bytes[8 + n..8 + n + 4].copy_from_slice(&f32::NAN.to_le_bytes()),
        _ => {}
    }
    bytes
}

/// Damages a header's entry of one tensor.
fn one_tensor(dice: &mut Dice, header: &mut Value) {
    let names: Vec<String> =
        header.as_object().unwrap().keys().filter(|k| *k != "__metadata__").cloned().collect();
    if names.is_empty() {
        return;
    }
    let (name, other) = (dice.pick(&names).clone(), dice.pick(&names).clone());
    let at = dice.below(2);
    match dice.below(9) {
        0 => header[&name]["data_offsets"][at] = dice.number().into(),
        1 => header[&name]["shape"] = (0..dice.below(5)).map(|_| dice.number()).collect(),
        2 => {
            let types =
                ["F32", "F16", "BF16", "U8", "I64", "I32", "BOOL", "F64", "F8_E4M3", "Q4_0", "f32", ""];
            header[&name]["dtype"] = dice.word(&types).into();
        }
        3 => {
            let (a, b) = (header[&name].clone(), header[&other].clone());
            (header[&name], header[&other]) = (b, a);
        }
        4 => header[&name]["data_offsets"] = header[&other]["data_offsets"].clone(),
        5 => header[&name]["shape"].as_array_mut().into_iter().for_each(|shape| shape.reverse()),
        6 => drop(header.as_object_mut().unwrap().shift_remove(&name)),
        7 => {
            let tensor = header[&name].clone();
            header[mutate::text(dice, &name)] = tensor;
        }
        _ => header["__metadata__"] = json!({ mutate::text(dice, "format"): mutate::text(dice, "pt") }),
    }
}

/// Reads the values of every tensor.
fn every(tensors: &dyn Tensors) -> Result<(), Refusal> {
    for name in tensors.names() {
        if let Some(tensor) = tensors.tensor(&name).map_err(Refusal::failure)? {
            drop(std::hint::black_box(tensor.dtype.widen(&tensor.bytes)));
        }
        drop(std::hint::black_box(tensors.blocks(&name).map_err(Refusal::failure)?));
        drop(std::hint::black_box(tensors.about(&name).map_err(Refusal::failure)?));
    }
    Ok(())
}

fn tensors(names: &[&str]) -> Vec<u8> {
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (i, name) in names.iter().enumerate() {
        let (dtype, width) = [("F32", 4), ("BF16", 2), ("F16", 2)][i % 3];
        let end = at + 12 * width;
        header.insert((*name).into(), json!({"dtype": dtype, "shape": [3, 4], "data_offsets": [at, end]}));
        at = end;
    }
    assemble(Value::Object(header).to_string().as_bytes(), &vec![0x3c; at])
}

fn plain() -> Files {
    vec![file("model.safetensors", tensors(&["a.weight", "b.weight", "c.bias", "d.weight"]))]
}

fn in_the_file(dice: &mut Dice, whole: &Files) -> Files {
    vec![file("model.safetensors", safetensors_file(dice, of(whole, "model.safetensors")))]
}

fn read_plain(folder: &Path) -> Result<(), Refusal> {
    let path = folder.join("model.safetensors");
    // Shards that may contain raw bytes are read by another function.
    let shards = safetensors::Sharded::open_with_bytes(folder).map(|file| {
        file.raw_names().for_each(|name| drop(std::hint::black_box(file.raw(name).map(<[u8]>::to_vec))));
    });
    every(&safetensors::open(&path)?)?;
    Ok(shards?)
}

fn shards() -> Files {
    let index = json!({
        "metadata": { "total_size": 144 },
        "weight_map": { "a.weight": "one.safetensors", "b.weight": "one.safetensors", "c.weight": "two.safetensors" },
    });
    vec![
        file("one.safetensors", tensors(&["a.weight", "b.weight"])),
        file("two.safetensors", tensors(&["c.weight"])),
        file("model.safetensors.index.json", index.to_string()),
    ]
}

fn in_the_index(dice: &mut Dice, whole: &Files) -> Files {
    let index: Value = serde_json::from_slice(of(whole, "model.safetensors.index.json")).unwrap();
    let shard = dice.word(&["one.safetensors", "two.safetensors"]);
    match dice.below(4) {
        0 => vec![(shard.into(), None)],
        1 => vec![file(shard, safetensors_file(dice, of(whole, shard)))],
        _ => vec![file("model.safetensors.index.json", mutate::json(dice, &index))],
    }
}

fn read_shards(folder: &Path) -> Result<(), Refusal> {
    every(&safetensors::Sharded::open(folder)?)
}

const NAMES: [&str; 9] =
    ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"];

/// A model of two tokens with one tensor of each of several types.
fn fields() -> build::File {
    let mut file = build::llama(&["a".into(), "b".into()]);
    let (mut at, kinds) = (32, [(0, 4), (1, 2), (30, 2), (8, 34), (2, 18), (3, 20), (6, 22), (7, 24)]);
    for (i, (kind, bytes)) in kinds.into_iter().enumerate() {
        let (dims, len) = if bytes < 5 { (vec![4, 8], 32 * bytes) } else { (vec![32, 2], 2 * bytes) };
        file.tensors.push(Entry(format!("blk.0.{}.weight", NAMES[i]), dims, kind, at));
        at += u64::next_multiple_of(len, 32);
    }
    for (i, (kind, bytes)) in [(10, 84), (11, 110), (12, 144), (13, 176), (14, 210)].into_iter().enumerate() {
        file.tensors.push(Entry(format!("blk.1.{}.weight", NAMES[i + 3]), vec![256, 1], kind, at));
        at += u64::next_multiple_of(bytes, 32);
    }
    file.data = at as usize;
    file.set("tokenizer.ggml.token_type", Meta::Ints(vec![1, 1])).set("general.alignment", Meta::U32(32))
}

fn model() -> Files {
    vec![file("m.gguf", fields().bytes())]
}

fn in_the_fields(dice: &mut Dice, _: &Files) -> Files {
    let mut made = fields();
    for _ in 0..1 + dice.below(3) {
        let (pair, tensor) = (dice.below(made.metadata.len()), dice.below(made.tensors.len()));
        match dice.below(13) {
            0 => made.version = dice.number() as u32,
            1 => made.pairs = Some(dice.number()),
            2 => made.count = Some(dice.number()),
            3..=5 => made.metadata[pair].1 = value(dice),
            6 => made.metadata[pair].0 = mutate::text(dice, &made.metadata[pair].0),
            7 => made.metadata.push((made.metadata[pair].0.clone(), value(dice))),
            8 => {
                made.tensors[tensor].2 =
                    *dice.pick(&[0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30, 99, 1 << 31])
            }
            9 => made.tensors[tensor].3 = dice.number() & !31,
            10 => made.tensors[tensor].1 = (0..dice.below(6)).map(|_| dice.number()).collect(),
            11 => made.tensors[tensor].0 = mutate::text(dice, &made.tensors[tensor].0),
            _ => drop(made.metadata.remove(pair)),
        }
        if made.metadata.is_empty() {
            break;
        }
    }
    let mut bytes = made.bytes();
    if dice.one_in(4) {
        let end = dice.below(bytes.len());
        bytes.truncate(end);
    }
    vec![file("m.gguf", bytes)]
}

/// A metadata value, possibly of another type than expected.
fn value(dice: &mut Dice) -> Meta {
    let array = |kind: u32, n: u64, bytes: &[u8]| {
        Meta::Raw(9, [&kind.to_le_bytes()[..], &n.to_le_bytes(), bytes].concat())
    };
    match dice.below(12) {
        0 => Meta::U32(dice.number() as u32),
        1 => Meta::F32(*dice.pick(&[f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-45, 3e38])),
        2 => Meta::Bool(dice.one_in(2)),
        3 => Meta::Text(mutate::text(dice, "llama")),
        4 => Meta::Texts(
            (0..dice.below(5)).map(|i| mutate::text(dice, ["a", "b", "a b", ""][i % 4])).collect(),
        ),
        5 => Meta::Floats(vec![f32::NAN; dice.below(4)]),
        6 => Meta::Ints((0..dice.below(4)).map(|_| dice.number() as i32).collect()),
        7 => Meta::Raw(10, dice.number().to_le_bytes().to_vec()),
        8 => Meta::Raw(8, [&dice.number().to_le_bytes()[..], b"text"].concat()),
        9 => array(dice.below(14) as u32, dice.number(), &[1; 16]),
        10 => array(9, 1 + dice.below(3) as u64, &array_head().repeat(1 + dice.below(60))),
        _ => Meta::Raw(dice.below(16) as u32, vec![dice.byte(); dice.below(20)]),
    }
}

/// The head of an array of arrays.
fn array_head() -> Vec<u8> {
    [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat()
}

fn read_model(folder: &Path) -> Result<(), Refusal> {
    read_gguf(&folder.join("m.gguf"))
}

fn read_gguf(path: &Path) -> Result<(), Refusal> {
    let files = format::open(path)?;
    every(&*files.tensors)?;
    Config::from_json(&files.config)?;
    let t = &files.tokenizer;
    let tokenizer =
        Tokenizer::new(&t.tokenizer_json, t.tokenizer_config.as_ref(), None, t.chat_template.as_deref())?;
    std::hint::black_box(tokenizer.vocab_size());
    Ok(())
}

/// Real files: a whole model, and blocks of every type.
fn real() -> Files {
    let read = |name: &str| std::fs::read(golden(name)).unwrap();
    vec![file("m.gguf", read("gguf/tiny.gguf")), file("blocks.gguf", read("gguf/blocks.gguf"))]
}

/// Damages bytes of one file, mostly in its head, where nearly all checks are.
fn in_the_bytes(dice: &mut Dice, whole: &Files) -> Files {
    let (name, bytes) = dice.pick(whole);
    let mut bytes = bytes.clone().unwrap();
    let head = bytes.len().min(if dice.one_in(3) { 64 } else { 12_000 });
    match dice.below(3) {
        0 => mutate::bytes(dice, &mut bytes),
        1 => (0..1 + dice.below(3)).for_each(|_| bytes[dice.below(head)] = dice.byte()),
        _ => {
            let at = dice.below(head);
            mutate::number(dice, &mut bytes, at);
        }
    }
    vec![file(name, bytes)]
}

fn read_real(folder: &Path) -> Result<(), Refusal> {
    let blocks = gguf::Gguf::open(&folder.join("blocks.gguf"))?;
    for info in blocks.tensors().values() {
        drop(std::hint::black_box(gguf::decode(info.kind, blocks.bytes(info))));
    }
    read_gguf(&folder.join("m.gguf"))
}

fn lora() -> Files {
    vec![file("a.gguf", std::fs::read(golden("export/llama/lora.gguf")).unwrap())]
}

fn read_lora(folder: &Path) -> Result<(), Refusal> {
    let orders = Orders { paired: Some((2, 1)), ..Orders::default() };
    let adapter = gguf::adapter::load(&folder.join("a.gguf"), &LLAMA, orders)?;
    std::hint::black_box(adapter.parts.len());
    Ok(())
}

fn peft_adapter() -> Files {
    let read = |name: &str| std::fs::read(golden("parity/llamacls/adapter_init").join(name)).unwrap();
    vec![
        file("adapter_config.json", read("adapter_config.json")),
        file("adapter_model.safetensors", read("adapter_model.safetensors")),
        file("label_map.json", peft::label_map(&["no".into(), "yes".into()], None)),
    ]
}

fn in_the_adapter(dice: &mut Dice, whole: &Files) -> Files {
    let json = |dice: &mut Dice, name: &str| {
        let value = serde_json::from_slice(of(whole, name)).unwrap();
        vec![file(name, mutate::json(dice, &value))]
    };
    match dice.below(8) {
        0 => json(dice, "label_map.json"),
        1..4 => json(dice, "adapter_config.json"),
        4 => vec![(dice.pick(whole).0.clone(), None)],
        _ => {
            let name = "adapter_model.safetensors";
            vec![file(name, safetensors_file(dice, of(whole, name)))]
        }
    }
}

fn read_peft(folder: &Path) -> Result<(), Refusal> {
    let adapter = peft::read(folder)?;
    let (labels, numbers) = (adapter.labels, adapter.numbers);
    let extras = peft::Extras { labels, numbers, ..peft::Extras::default() };
    std::hint::black_box(peft::card(&adapter.config, "bf16", &extras, &[]));
    Ok(())
}
