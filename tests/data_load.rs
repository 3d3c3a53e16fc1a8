//! Loads files of every kind into a corpus, and checks the errors of bad files.

use finetune::data::{self, Corpus, DataError, LabelMap, LongRows, Options, Task, Tokenizer, files};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};

fn tokenizer() -> Tokenizer {
    let json = std::fs::read_to_string("tests/golden/rows/bytes.json").unwrap();
    Tokenizer::new(&json, Some(&json!({"eos_token": "<|im_end|>"})), None, Some(data::template::CHATML))
        .unwrap()
}

fn write(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn load(paths: &[PathBuf], options: &Options) -> Result<Corpus, DataError> {
    data::load(paths, options, &tokenizer())
}

fn classify() -> Options {
    Options { task: Task::Classify, ..Options::default() }
}

fn many(n: usize) -> String {
    (0..n)
        .map(|i| format!("{}\n", json!({"prompt": format!("q{i}"), "completion": "a".repeat(i % 50)})))
        .collect()
}

fn parquet(path: &Path, columns: &[(&str, &[&str])]) {
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    let fields: String = columns.iter().map(|(n, _)| format!("REQUIRED BYTE_ARRAY {n} (UTF8); ")).collect();
    let schema =
        parquet::schema::parser::parse_message_type(&format!("message schema {{ {fields} }}")).unwrap();
    let properties = WriterProperties::builder()
        .set_compression(parquet::basic::Compression::ZSTD(Default::default()))
        .build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.into(), properties.into()).unwrap();
    for half in 0..2 {
        let mut group = writer.next_row_group().unwrap();
        for (_, cells) in columns {
            let middle = cells.len() / 2;
            let part = if half == 0 { &cells[..middle] } else { &cells[middle..] };
            let values: Vec<ByteArray> = part.iter().map(|&c| ByteArray::from(c)).collect();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn gzip(text: &str) -> Vec<u8> {
    let mut packed = Vec::new();
    flate2::read::GzEncoder::new(text.as_bytes(), flate2::Compression::fast())
        .read_to_end(&mut packed)
        .unwrap();
    packed
}

#[test]
fn every_kind_of_file_gives_the_same_rows() {
    let dir = tempfile::tempdir().unwrap();
    let rows = [("one, \"two\"", "x"), ("multi\nline", "Grüße"), ("", "z"), ("last", "世界")];
    let objects: Vec<Value> = rows.iter().map(|(p, c)| json!({"prompt": p, "completion": c})).collect();
    let lines = objects.iter().map(|o| format!("{o}\n")).collect::<Vec<_>>().join("\n");
    let mut csv = String::from("completion,prompt,other\n");
    rows.iter().for_each(|(p, c)| csv += &format!("{c},\"{}\",1\n", p.replace('"', "\"\"")));
    let columns: (Vec<&str>, Vec<&str>) = rows.iter().copied().unzip();
    let path = dir.path().join("rows.parquet");
    parquet(&path, &[("prompt", &columns.0), ("completion", &columns.1)]);
    let all = [
        write(dir.path(), "rows.jsonl", &lines),
        write(dir.path(), "bom.jsonl", format!("\u{feff}{lines}")),
        write(dir.path(), "crlf.jsonl", lines.replace('\n', "\r\n")),
        write(dir.path(), "lines.json", &lines),
        write(dir.path(), "array.json", serde_json::to_string_pretty(&objects).unwrap()),
        write(dir.path(), "rows.csv", &csv),
        write(dir.path(), "rows.csv.gz", gzip(&csv)),
        // gzip's files may be concatenated.
        write(dir.path(), "rows.jsonl.gz", [gzip(&lines[..30]), gzip(&lines[30..])].concat()),
        path,
    ];
    let first = load(&all[..1], &Options::default()).unwrap();
    assert_eq!((first.counts.rows, first.counts.dropped), (4, 0));
    for path in &all[1..] {
        let other = load(std::slice::from_ref(path), &Options::default()).unwrap();
        assert_eq!(other.samples, first.samples, "{}", path.display());
        assert_eq!(other.hash, first.hash);
    }
}

#[test]
fn threads_change_no_row() {
    let dir = tempfile::tempdir().unwrap();
    let path = [write(dir.path(), "rows.jsonl", many(10_000))];
    let one = load(&path, &Options { threads: 1, ..Options::default() }).unwrap();
    let five = load(&path, &Options { threads: 5, ..Options::default() }).unwrap();
    assert_eq!(one.samples, five.samples);
    assert_eq!(one.counts, five.counts);
}

#[test]
fn counts_cover_lengths_and_dropped_rows() {
    let dir = tempfile::tempdir().unwrap();
    let text = concat!(
        r#"{"prompt": "a", "completion": "b"}"#,
        "\n",
        r#"{"messages": [{"role": "user", "content": "absent answers"}]}"#,
        "\n\n",
        r#"{"prompt": "a prompt of more than eight tokens", "completion": "never reached"}"#,
        "\n",
        r#"{"text": "half of this text is cut away, which leaves eight tokens"}"#,
        "\n",
    );
    let path = [write(dir.path(), "rows.jsonl", text)];
    let corpus = load(&path, &Options { max_seq_len: 8, ..Options::default() }).unwrap();
    assert_eq!((corpus.counts.rows, corpus.counts.dropped, corpus.counts.truncated), (4, 2, 3));
    let rows: Vec<u64> = corpus.samples.iter().map(|s| s.row).collect();
    assert_eq!(rows, [0, 3]);
    // "a" + "b" + EOS: two targets; of eight supervised tokens the first has no predecessor
    let targets: Vec<usize> = corpus.samples.iter().map(|s| s.supervised_targets()).collect();
    assert_eq!(targets, [2, 7]);
    assert_eq!(corpus.counts.supervised, 9);
    let first = corpus.counts.first_dropped.as_ref().unwrap().to_string();
    assert_eq!(
        first,
        format!(
            "{}:2: no message has the role assistant (the roles are user): rename them to user and assistant",
            path[0].display()
        )
    );
    let over = Options { max_seq_len: 8, max_dropped: Some(1), ..Options::default() };
    assert!(matches!(load(&path, &over), Err(DataError::TooManyDropped { dropped: 2, rows: 4, .. })));
}

/// The second of three rows is long. The parts of a split row are the tokens of the whole, each with its mask.
#[test]
fn long_rows_are_cut_split_dropped_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let row = |text: &str| format!("{}\n", json!({ "text": text }));
    let answer = json!({"prompt": "the of to a", "completion": "list all"});
    let text = format!("{}{}{answer}\n", row("list list list"), row(&" red".repeat(18)));
    let path = [write(dir.path(), "rows.jsonl", &text)];
    let with = |long, max_seq_len| load(&path, &Options { long, max_seq_len, ..Options::default() });
    let whole = with(LongRows::Refuse, 100).unwrap();
    let lengths: Vec<usize> = (0..3).map(|i| whole.samples.tokens(i)).collect();
    assert_eq!(whole.samples, with(LongRows::Cut, 100).unwrap().samples);
    assert_eq!((lengths[0] <= 12, lengths[1], lengths[2] <= 12), (true, 19, true), "{lengths:?}");
    let cut = with(LongRows::Cut, 12).unwrap();
    assert_eq!(cut.counts.lengths(), "; 1 cut at --max-seq-len");
    let split = with(LongRows::Split, 12).unwrap();
    assert_eq!(split.counts.lengths(), "; 1 split into 2 at --max-seq-len");
    let parts: Vec<u32> = split.samples.iter().filter(|s| s.row == 1).flat_map(|s| s.ids.to_vec()).collect();
    assert_eq!(parts, whole.samples.get(1).ids);
    assert_eq!(split.counts.rows, 3);
    // The second part loses the prediction of its first token.
    assert_eq!(split.counts.supervised + 1, whole.counts.supervised);
    // The prompt alone is the first part, without anything to train on.
    let answers = with(LongRows::Split, 4).unwrap();
    let of_answer: Vec<_> = answers.samples.iter().filter(|s| s.row == 2).collect();
    assert!(of_answer.iter().all(|s| s.supervised_targets() > 0) && !of_answer.is_empty());
    let drop = with(LongRows::Drop, 12).unwrap();
    assert_eq!(drop.counts.lengths(), "; 1 longer than --max-seq-len left out");
    assert_eq!((drop.counts.dropped, drop.samples.len()), (0, 2));
    let error = with(LongRows::Refuse, 12).unwrap_err().to_string();
    let expected = "rows.jsonl:2: it has more than 12 tokens (--max-seq-len): raise this number";
    assert!(error.contains(expected), "{error}");
    let error = with(LongRows::Drop, 2).unwrap_err().to_string();
    assert!(error.contains("rows.jsonl:1: it has more than 2 tokens (--long-rows drop)"), "{error}");
}

/// (name, text, options, part of the message, bad configuration?)
#[test]
fn bad_input_gets_one_line_with_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let sft = Options::default;
    let n = |n| Options { num_classes: Some(n), ..classify() };
    let known =
        || Options { labels: Some(LabelMap { names: vec!["no".into(), "yes".into()] }), ..classify() };
    let ok = r#"{"text": "x", "label": 0}"#;
    let cases: Vec<(&str, String, Options, &str, bool)> = vec![
        ("a.jsonl", "{\"text\": \"x\"}\n{\"text\": ".into(), sft(), "a.jsonl:2: not valid JSON: EOF", false),
        ("b.jsonl", "{\"text\": \"x\"}\n\n[1]".into(), sft(), "b.jsonl:3: a row must be an object", false),
        (
            "c.jsonl",
            "{\"body\": 1}".into(),
            sft(),
            "c.jsonl:1: no known form: it has the fields [body]",
            false,
        ),
        (
            "d.jsonl",
            "{\"text\": 7}".into(),
            sft(),
            "d.jsonl:1: `text` must be a string, it is a number",
            false,
        ),
        (
            "e.jsonl",
            "{\"messages\": []}".into(),
            sft(),
            "e.jsonl:1: a conversation must have at least one",
            false,
        ),
        (
            "f.jsonl",
            r#"{"messages": [{"content": "x"}]}"#.into(),
            sft(),
            "f.jsonl:1: message 1 has no role",
            false,
        ),
        (
            "g.jsonl",
            r#"{"prompt": "p", "chosen": "a", "rejected": "b"}"#.into(),
            sft(),
            "g.jsonl:1: preference rows",
            false,
        ),
        ("h.jsonl", "\n\n".into(), sft(), "no rows in", false),
        ("i.jsonl", "{\"prompt\": \"a\"}".into(), sft(), "i.jsonl:1: no known form", false),
        ("j.json", "[{\"text\": \"x\"}, {\"text\" 1}]".into(), sft(), "j.json row 2: not valid JSON", false),
        ("k.json", "[{\"text\": \"x\"}".into(), sft(), "k.json row 2: not valid JSON", false),
        ("l.csv", "text,b\nx,1\ny\n".into(), sft(), "l.csv:3: not a row of this table", false),
        ("m.parquet", "PAR1 nonsense".into(), sft(), "m.parquet: not a readable Parquet file", false),
        ("n.txt", "x".into(), sft(), "n.txt: rows must be .jsonl", false),
        (
            "o.jsonl",
            format!("{ok}\n{}", ok.replace('0', "3")),
            n(3),
            "o.jsonl:2: label 3 is outside 0 .. 2",
            true,
        ),
        ("p.jsonl", ok.replace('0', "-1"), n(3), "p.jsonl:1: label -1 is outside 0 .. 2", true),
        (
            "q.jsonl",
            format!("{}\n{}", ok.replace('0', "\"a\""), ok.replace('0', "\"b\"")),
            n(1),
            "q.jsonl:2: label b is outside the 1 classes",
            true,
        ),
        (
            "r.jsonl",
            ok.replace('0', "\"maybe\""),
            known(),
            "r.jsonl:1: label maybe is outside the classes no, yes",
            true,
        ),
        (
            "number.jsonl",
            ok.into(),
            Options {
                labels: Some(LabelMap { names: vec!["1".into(), "2".into(), "3".into()] }),
                ..classify()
            },
            "number.jsonl:1: label 0 is outside the classes 1, 2, 3",
            true,
        ),
        ("s.jsonl", "{\"text\": \"x\"}".into(), classify(), "s.jsonl:1: `label` is missing", false),
        ("t.jsonl", "{\"text\": \"\"}".into(), sft(), "t.jsonl (rows: 1, the first: ", false),
        ("u.jsonl", "{\"text\": \"\\ud800\"}".into(), sft(), "u.jsonl:1: not valid JSON", false),
        ("v.jsonl", "{\"text\": \"x\"}".into(), Options { max_seq_len: 0, ..sft() }, "--max-seq-len", true),
    ];
    for (name, text, options, part, configuration) in cases {
        let path = write(dir.path(), name, text);
        let error = load(&[path], &options).err().unwrap_or_else(|| panic!("{name} loads"));
        let message = error.to_string();
        assert!(message.contains(part), "{name}: {message}");
        assert!(!message.contains('\n'), "{name}: {message}");
        assert_eq!(error.is_configuration(), configuration, "{name}: {message}");
    }
    let missing = load(&[dir.path().join("none.jsonl")], &sft()).unwrap_err().to_string();
    assert!(
        missing.contains("none.jsonl: entity not found") || missing.contains("No such file"),
        "{missing}"
    );
}

#[test]
fn labels_have_a_stable_order() {
    let dir = tempfile::tempdir().unwrap();
    let rows = |labels: &[Value]| -> String {
        labels.iter().map(|l| format!("{}\n", json!({"text": "x", "label": l}))).collect()
    };
    let check = |labels: &[Value], options: Options, names: &[&str], classes: &[u32]| {
        let path = write(dir.path(), "rows.jsonl", rows(labels));
        let corpus = load(&[path], &options).unwrap();
        assert_eq!(corpus.labels.unwrap().names, names, "{labels:?}");
        let ours: Vec<u32> = corpus.samples.iter().filter_map(|s| s.label).collect();
        assert_eq!(ours, classes, "{labels:?}");
        assert_eq!(corpus.counts.supervised, labels.len() as u64);
    };
    check(&[json!("b"), json!("a"), json!("b")], classify(), &["a", "b"], &[1, 0, 1]);
    check(&[json!(10), json!(9), json!(2.0)], classify(), &["2", "9", "10"], &[2, 1, 0]);
    check(&[json!(true), json!(false)], classify(), &["false", "true"], &[1, 0]);
    let four = Options { num_classes: Some(4), ..classify() };
    check(&[json!(3), json!(0)], four.clone(), &["0", "1", "2", "3"], &[3, 0]);
    check(&[json!("x")], four, &["x", "LABEL_1", "LABEL_2", "LABEL_3"], &[0]);
    let known = Options { labels: Some(LabelMap { names: vec!["no".into(), "yes".into()] }), ..classify() };
    check(&[json!("yes"), json!(0)], known, &["no", "yes"], &[1, 0]);
    let numbers =
        Options { labels: Some(LabelMap { names: vec!["1".into(), "2".into(), "3".into()] }), ..classify() };
    check(&[json!(3), json!("1"), json!(2)], numbers, &["1", "2", "3"], &[2, 0, 1]);
    check(&[json!("10"), json!(9)], classify(), &["9", "10"], &[1, 0]);
    check(&[json!("10"), json!("09")], classify(), &["09", "10"], &[1, 0]);
    let csv = write(dir.path(), "rows.csv", "text,label\nx,10\ny,9\n");
    assert_eq!(load(&[csv], &classify()).unwrap().labels.unwrap().names, ["9", "10"]);
}

#[test]
fn columns_are_renamed() {
    let dir = tempfile::tempdir().unwrap();
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    let a = write(dir.path(), "a.jsonl", r#"{"question": "q", "answer": "a", "text": "not this"}"#);
    let b = write(dir.path(), "b.jsonl", r#"{"prompt": "q", "completion": "a"}"#);
    let fields = vec![pair("prompt", "question"), pair("completion", "answer")];
    let typo = Options { fields: vec![pair("promt", "question")], ..Options::default() };
    let error = load(std::slice::from_ref(&b), &typo).unwrap_err();
    assert!(error.is_configuration() && error.to_string().contains("nearest is `prompt`"), "{error}");
    let renamed = load(&[a], &Options { fields, ..Options::default() }).unwrap();
    assert_eq!(renamed.samples, load(&[b], &Options::default()).unwrap().samples);
}

#[test]
fn tables_hold_conversations_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let talk = json!([{"role": "user", "content": "one, \"two\""}, {"role": "assistant", "content": "ok"}]);
    let cell = talk.to_string().replace('"', "\"\"");
    let csv = write(dir.path(), "rows.csv", format!("messages,text\n\"{cell}\",\n,plain\n"));
    let lines =
        write(dir.path(), "rows.jsonl", format!("{}\n{{\"text\": \"plain\"}}", json!({"messages": talk})));
    let broken = write(dir.path(), "broken.csv", "messages\n[{\n");
    let options = Options::default();
    assert_eq!(load(&[csv], &options).unwrap().samples, load(&[lines], &options).unwrap().samples);
    assert!(
        load(&[broken], &options)
            .unwrap_err()
            .to_string()
            .contains("broken.csv:2: `messages` is a text but not JSON")
    );
}

#[test]
fn limit_reads_only_the_needed_rows() {
    let dir = tempfile::tempdir().unwrap();
    let whole = load(&[write(dir.path(), "good.jsonl", many(9000))], &Options::default()).unwrap();
    for limit in [1, 3, 5000] {
        // rows after the limit are not read: this file is broken after them
        let text = format!("{}not json\n", many(limit));
        let path = write(dir.path(), "rows.jsonl", text);
        let corpus =
            load(&[path, "does-not-exist".into()], &Options { limit: Some(limit), ..Options::default() });
        let corpus = corpus.unwrap();
        assert_eq!(corpus.samples.len(), limit);
        assert!((0..limit).all(|i| corpus.samples.get(i).ids == whole.samples.get(i).ids));
    }
}

#[test]
fn max_rows_reads_the_first_rows_of_each_set() {
    let dir = tempfile::tempdir().unwrap();
    // Broken after the rows that are read; the second row of each set is dropped, and counts as read.
    let row = |i: usize| format!("{}\n", json!({"text": if i == 1 { "" } else { "some words" }}));
    let text = |n: usize| format!("{}not json\n", (0..n).map(row).collect::<String>());
    let [a, b, c] = [3, 5, 2].map(|n| write(dir.path(), &format!("{n}.jsonl"), text(n)));
    let one = write(dir.path(), "one.jsonl", row(0));
    let options = |max_rows| Options { max_rows: Some(max_rows), ..Options::default() };
    let sets = [vec![a, c.clone()], vec![one, b], vec![c]];
    let corpus = data::load_sets(&sets, &options(2), &tokenizer()).unwrap();
    assert_eq!((corpus.counts.rows, corpus.ends.as_slice()), (6, &[2, 4, 6][..]));
    assert_eq!(corpus.samples.iter().map(|sample| sample.row).collect::<Vec<_>>(), [0, 2, 3, 4]);
    let (train, eval) = corpus.clone().split(0.5, 1).unwrap();
    assert_eq!((train.ends, eval.ends), (corpus.ends.clone(), corpus.ends));
    let message = data::load_sets(&sets, &options(4), &tokenizer()).unwrap_err().to_string();
    assert!(message.contains("3.jsonl:4: not valid JSON"), "{message}");
}

#[test]
fn a_split_is_a_partition_keyed_by_the_seed() {
    let dir = tempfile::tempdir().unwrap();
    let path = [write(dir.path(), "rows.jsonl", many(200))];
    let corpus = load(&path, &Options::default()).unwrap();
    let rows = |c: &Corpus| c.samples.iter().map(|s| s.row).collect::<Vec<_>>();
    let (train, eval) = corpus.clone().split(0.05, 1).unwrap();
    assert_eq!(eval.samples.len(), 10);
    let mut all = [rows(&train), rows(&eval)].concat();
    all.sort_unstable();
    assert_eq!(all, rows(&corpus));
    for sample in eval.samples.iter().chain(train.samples.iter()) {
        let original = corpus.samples.get(sample.row as usize);
        assert_eq!(sample.ids, original.ids);
        assert!((0..sample.ids.len()).all(|i| sample.supervised(i) == original.supervised(i)));
    }
    assert_eq!(rows(&corpus.clone().split(0.05, 1).unwrap().1), rows(&eval));
    assert_ne!(rows(&corpus.clone().split(0.05, 2).unwrap().1), rows(&eval));
    assert_eq!(corpus.clone().split(0.0001, 2).unwrap().1.samples.len(), 1);
    for bad in [0.0, 1.0, -1.0, f64::NAN, 0.999] {
        assert!(corpus.clone().split(bad, 1).unwrap_err().is_configuration());
    }
}

#[test]
fn a_split_keeps_the_parts_of_a_row_together() {
    let dir = tempfile::tempdir().unwrap();
    let row = format!("{}\n", json!({ "text": " red".repeat(18) }));
    let path = [write(dir.path(), "rows.jsonl", row.repeat(8))];
    let parts = Options { long: LongRows::Split, max_seq_len: 6, ..Options::default() };
    let corpus = load(&path, &parts).unwrap();
    assert!(corpus.samples.len() > 16);
    let (train, eval) = corpus.split(0.2, 1).unwrap();
    let rows = |c: &Corpus| c.samples.iter().map(|s| s.row).collect::<std::collections::BTreeSet<_>>();
    assert!(rows(&train).is_disjoint(&rows(&eval)));
    assert_eq!(rows(&train).len() + rows(&eval).len(), 8);
    let one = [write(dir.path(), "one.jsonl", row)];
    let error = load(&one, &parts).unwrap().split(0.2, 1).unwrap_err().to_string();
    assert!(error.contains("leaves one side without rows"), "{error}");
}

#[test]
fn folders_are_sorted_into_parts() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("data")).unwrap();
    for name in [
        "data/train-00001-of-2.parquet",
        "data/train-00000-of-2.parquet",
        "data/validation.csv",
        "test.jsonl",
    ] {
        write(dir.path(), name, "");
    }
    write(dir.path(), "README.md", "");
    let folder = files::folder(dir.path()).unwrap();
    let names = |list: &[PathBuf]| -> Vec<String> {
        list.iter().map(|p| p.file_name().unwrap().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(names(&folder.train), ["train-00000-of-2.parquet", "train-00001-of-2.parquet"]);
    assert_eq!(names(&folder.eval), ["validation.csv"]);
    assert_eq!(names(&folder.test), ["test.jsonl"]);
    let empty = tempfile::tempdir().unwrap();
    assert!(files::folder(empty.path()).unwrap_err().to_string().contains("no train file"));
}

#[test]
fn previews_show_what_is_supervised() {
    let dir = tempfile::tempdir().unwrap();
    let row = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}"#;
    let corpus = load(&[write(dir.path(), "rows.jsonl", row)], &Options::default()).unwrap();
    let sample = corpus.samples.get(0);
    let pieces = data::preview::preview(&sample, 0..sample.ids.len(), &tokenizer()).unwrap();
    let shown: Vec<(&str, bool)> = pieces.iter().map(|p| (p.text.as_str(), p.supervised)).collect();
    assert_eq!(
        shown,
        [
            ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", false),
            ("yo<|im_end|>", true),
            ("\n", false)
        ]
    );
    assert_eq!(pieces.iter().map(|p| p.tokens).sum::<usize>(), corpus.samples.tokens(0));
}
