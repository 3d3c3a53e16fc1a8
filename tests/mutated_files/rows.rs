//! Rows: JSON lines, JSON, CSV, Parquet, for text generation and classification.

use crate::models::tokenizer_json;
use crate::mutate::{self, Dice};
use crate::runs::damage_lines;
use crate::weights::{file, of};
use crate::{Files, Format};
use finetune::config::refusal::Refusal;
use finetune::data::{self, Options, Task, Tokenizer};
use parquet::basic::Compression;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::LazyLock;

pub const FORMATS: &[Format] = &[
    Format { name: "jsonl", share: 3, whole: lines, damage: in_the_lines, read: read_lines },
    Format {
        name: "json",
        share: 2,
        whole: array,
        damage: in_the_array,
        read: |at| load(at, "r.json", Task::Sft),
    },
    Format {
        name: "csv",
        share: 2,
        whole: table,
        damage: in_the_table,
        read: |at| load(at, "r.csv", Task::Sft),
    },
    Format { name: "parquet", share: 2, whole: columns, damage: in_the_columns, read: read_columns },
];

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let text = String::from_utf8(tokenizer_json()).unwrap();
    Tokenizer::new(&text, Some(&json!({ "eos_token": "<|im_end|>" })), None, Some(data::template::CHATML))
        .unwrap()
});

fn load(folder: &Path, name: &str, task: Task) -> Result<(), Refusal> {
    let options = Options { task, max_seq_len: 64, threads: 1, ..Options::default() };
    let corpus = data::load(&[folder.join(name)], &options, &TOKENIZER)?;
    assert!(corpus.counts.rows >= corpus.samples.len() as u64);
    for sample in corpus.samples.iter().take(3) {
        data::preview::preview(&sample, 0..sample.ids.len(), &TOKENIZER)?;
    }
    Ok(())
}

fn rows() -> Vec<Value> {
    vec![
        json!({ "prompt": "Show the list", "completion": "one two", "id": 1 }),
        json!({ "messages": [{ "role": "user", "content": "Name?" }, { "role": "assistant", "content": "Blue" }] }),
        json!({ "conversations": [{ "from": "human", "value": "Name?" }, { "from": "gpt", "value": "Red" }] }),
        json!({ "instruction": "Write", "input": "", "output": "42" }),
        json!({ "text": "Which number is it" }),
        json!({ "messages": [{ "role": "assistant", "content": "x", "tool_calls": [{ "id": "1" }] }], "tools": [{}] }),
    ]
}

fn joined(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

fn lines() -> Files {
    let labelled: Vec<Value> =
        (0..6).map(|i| json!({ "text": "a file", "label": (["yes", "no"][i % 2]) })).collect();
    vec![file("r.jsonl", joined(&rows())), file("labels.jsonl", joined(&labelled))]
}

fn in_the_lines(dice: &mut Dice, whole: &Files) -> Files {
    let name = dice.word(&["r.jsonl", "r.jsonl", "labels.jsonl"]);
    let damaged = damage_lines(dice, std::str::from_utf8(of(whole, name)).unwrap());
    vec![file(name, damaged)]
}

fn read_lines(folder: &Path) -> Result<(), Refusal> {
    let labels = load(folder, "labels.jsonl", Task::Classify);
    load(folder, "r.jsonl", Task::Sft)?;
    labels
}

fn array() -> Files {
    vec![file("r.json", Value::from(rows()).to_string())]
}

fn in_the_array(dice: &mut Dice, whole: &Files) -> Files {
    vec![file("r.json", mutate::json(dice, &serde_json::from_slice(of(whole, "r.json")).unwrap()))]
}

const CSV: &str =
    "prompt,completion,id\nShow it,one,1\n\"two, \"\"2\"\"\",\"a\nb\",2\nGrüße,世界,3\n,x,\nlast,row,4\n";

fn table() -> Files {
    vec![file("r.csv", CSV)]
}

fn in_the_table(dice: &mut Dice, _: &Files) -> Files {
    let mut bytes = match dice.below(4) {
        0 => CSV.replace(',', dice.word(&[";", "\t", "\",", ",,", ""])).into_bytes(),
        1 => {
            let wide = vec!["c"; 1 << dice.below(12)].join(",");
            format!("{wide},{CSV}").into_bytes()
        }
        2 => mutate::text(dice, CSV).into_bytes(),
        _ => mutate::lines(dice, CSV).into_bytes(),
    };
    if dice.one_in(4) {
        mutate::bytes(dice, &mut bytes);
    }
    vec![file("r.csv", bytes)]
}

/// The same rows under every compression.
fn columns() -> Files {
    let kinds = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::LZ4_RAW,
        Compression::BROTLI(Default::default()),
        Compression::ZSTD(Default::default()),
    ];
    kinds.into_iter().enumerate().map(|(i, kind)| file(&format!("{i}.parquet"), parquet_of(kind))).collect()
}

fn parquet_of(compression: Compression) -> Vec<u8> {
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
    use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    let schema = "message schema { REQUIRED BYTE_ARRAY prompt (UTF8); OPTIONAL BYTE_ARRAY completion (UTF8); \
        REQUIRED INT64 id; REQUIRED DOUBLE x; }";
    let schema = parquet::schema::parser::parse_message_type(schema).unwrap();
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema.into(), properties.into()).unwrap();
    let texts: Vec<ByteArray> =
        (0..20).map(|i| ByteArray::from(["Show it", "the list", "Grüße"][i % 3])).collect();
    let mut group = writer.next_row_group().unwrap();
    for levels in [None, Some(vec![1i16; 20])] {
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, levels.as_deref(), None).unwrap();
        column.close().unwrap();
    }
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&(0..20).collect::<Vec<i64>>(), None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<DoubleType>().write_batch(&[f64::NAN; 20], None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    out
}

/// One file: its pages, its footer, or the length of the footer.
fn in_the_columns(dice: &mut Dice, whole: &Files) -> Files {
    let (name, bytes) = dice.pick(whole);
    let mut bytes = bytes.clone().unwrap();
    let end = bytes.len() - 8;
    let footer = u32::from_le_bytes(bytes[end..end + 4].try_into().unwrap()) as usize;
    match dice.below(6) {
        0 => mutate::bytes(dice, &mut bytes),
        1 => mutate::number(dice, &mut bytes, end),
        2 => (0..1 + dice.below(3)).for_each(|_| bytes[4 + dice.below(end - footer - 4)] = dice.byte()),
        3 => {
            // A part of the footer is removed, and its length is corrected.
            let at = end - footer + dice.below(footer - 8);
            let part = 1 + dice.below(8);
            bytes.drain(at..at + part);
            let at = bytes.len() - 8;
            bytes[at..at + 4].copy_from_slice(&((footer - part) as u32).to_le_bytes());
        }
        _ => (0..1 + dice.below(3)).for_each(|_| bytes[end - footer + dice.below(footer)] = dice.byte()),
    }
    // Only this file is read.
    let others = whole.iter().filter(|(other, _)| other != name).map(|(other, _)| (other.clone(), None));
    others.chain([file(name, bytes)]).collect()
}

fn read_columns(folder: &Path) -> Result<(), Refusal> {
    for i in 0..6 {
        let name = format!("{i}.parquet");
        if folder.join(&name).exists() {
            load(folder, &name, Task::Sft)?;
        }
    }
    Ok(())
}
