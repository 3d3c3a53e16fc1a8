//! Tables of every delimiter and line end; errors of faulty rows name the line, the cause and what to do.

use finetune::data::{self, Corpus, DataError, Options, Task, Tokenizer, files};
use serde_json::json;
use std::path::PathBuf;

fn tokenizer() -> Tokenizer {
    let json = std::fs::read_to_string("tests/golden/rows/bytes.json").unwrap();
    let config = json!({"eos_token": "<|im_end|>"});
    Tokenizer::new(&json, Some(&config), None, Some(data::template::CHATML)).unwrap()
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn load(&self, name: &str, text: impl AsRef<[u8]>, options: &Options) -> Result<Corpus, DataError> {
        data::load(&[self.write(name, text)], options, &tokenizer())
    }
}

fn classify() -> Options {
    Options { task: Task::Classify, ..Options::default() }
}

#[test]
fn commas_semicolons_and_tabs_separate_cells() {
    let dir = Folder::new();
    let rows = "text,label\ngood,pos\n\"bad, really\",neg\n";
    let first = dir.load("comma.csv", rows, &classify()).unwrap();
    for (name, text, delimiter) in [
        ("comma.csv", rows.to_string(), "comma"),
        ("semicolon.csv", "text;label\ngood;pos\nbad, really;neg\n".into(), "semicolon"),
        ("tab.csv", "text\tlabel\ngood\tpos\nbad, really\tneg\n".into(), "tab"),
        ("tab.tsv", "text\tlabel\r\ngood\tpos\r\nbad, really\tneg\r\n".into(), "tab"),
        ("quoted.csv", "\"text\",\"label\"\n\"good\",pos\n\"bad, really\",neg".into(), "comma"),
        ("more.csv", "text,\"a;b;c\",label\ngood,1,pos\n\"bad, really\",2,neg\n".into(), "comma"),
    ] {
        assert_eq!(dir.load(name, &text, &classify()).unwrap().samples, first.samples, "{name}");
        assert_eq!(files::delimiter(&dir.0.path().join(name)), Some(delimiter), "{name}");
    }
    assert_eq!(files::delimiter(&dir.write("rows.jsonl", "{}")), None);
    let one = dir.load("one.csv", "text\nonly, one column\n", &Options::default());
    assert!(
        one.unwrap_err()
            .to_string()
            .contains("one.csv:2: not a row of this table: cells of the header 1, of the row 2")
    );
}

#[test]
fn line_numbers_match_an_editor() {
    let dir = Folder::new();
    let table = "prompt,completion\n\na,b\n\"two\nlines\",c\n\n\nx,\"\"\n";
    for (end, text) in
        [("lf", table.to_string()), ("crlf", table.replace('\n', "\r\n")), ("cr", table.replace('\n', "\r"))]
    {
        for (more, line) in [("bad\n", 9), ("\n\nbad\n", 11)] {
            let text = match end {
                "lf" => format!("{text}{more}"),
                "crlf" => format!("{text}{}", more.replace('\n', "\r\n")),
                _ => format!("{text}{}", more.replace('\n', "\r")),
            };
            let error = dir.load("rows.csv", &text, &Options::default()).unwrap_err().to_string();
            assert!(error.contains(&format!("rows.csv:{line}: ")), "{end}: {error}");
        }
        let mut lines = Vec::new();
        let _ = files::read(&dir.write("rows.csv", &text), &mut |row| {
            lines.push(row.place.to_string().rsplit(':').next().unwrap().parse::<u64>().unwrap());
            Ok(files::Flow::Continue)
        });
        assert_eq!(lines, [3, 4, 8], "{end}");
    }
    let json = "{\"text\": \"x\"}\r\n\r\n{\"text\": 1}\r\n";
    let error = dir.load("rows.jsonl", json, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("rows.jsonl:3: "), "{error}");
}

#[test]
fn rows_with_an_empty_label_are_dropped_and_named() {
    let dir = Folder::new();
    let corpus = dir.load("rows.csv", "text,label\ngood,pos\nbad,\nsad,neg\nworse, \n", &classify()).unwrap();
    assert_eq!(corpus.labels.unwrap().names, ["neg", "pos"]);
    assert_eq!((corpus.counts.rows, corpus.counts.dropped), (4, 2));
    let first = corpus.counts.first_dropped.unwrap().to_string();
    assert!(first.ends_with("rows.csv:3: its label is empty"), "{first}");
    let known = data::LabelMap { names: vec!["".into(), "pos".into()] };
    let options = Options { labels: Some(known), ..classify() };
    assert_eq!(dir.load("rows.csv", "text,label\na,\nb,pos\n", &options).unwrap().counts.dropped, 0);
}

/// (file, text, task, parts of the message)
type Case<'a> = (&'a str, String, Task, &'a str);

fn check(dir: &Folder, cases: &[Case]) {
    for (name, text, task, parts) in cases {
        let options = Options { task: *task, max_seq_len: 8, ..Options::default() };
        let message = dir.load(name, text, &options).unwrap_err().to_string();
        for part in parts.split(" .. ") {
            assert!(message.contains(part), "{name}: {part:?} in {message}");
        }
    }
}

#[test]
fn errors_of_faulty_lines_give_advice() {
    let dir = Folder::new();
    let (sft, clf) = (Task::Sft, Task::Classify);
    check(
        &dir,
        &[
            (
                "a.jsonl",
                "{\"text\": \"x\"}\n{\"prompt\": \"x\", \n".into(),
                sft,
                "a.jsonl:2: not valid JSON .. (column 15) .. ends too early .. one line",
            ),
            (
                "b.jsonl",
                "{\"text\": x}".into(),
                sft,
                "b.jsonl:1: not valid JSON .. (column 10) .. one JSON object on one line",
            ),
            (
                "c.jsonl",
                "{\"prompt\": null, \"completion\": \"x\"}".into(),
                sft,
                "c.jsonl:1: `prompt` is null .. leave the row out",
            ),
            ("d.jsonl", "{\"text\": \"x\", \"label\": null}".into(), clf, "d.jsonl:1: `label` is null"),
            (
                "i.jsonl",
                "{\"prompt\": \"aaaaaaaaaaaaaaaa\", \"completion\": \"x\"}".into(),
                sft,
                "i.jsonl:1: its first 8 tokens (--max-seq-len) hold no answer",
            ),
            (
                "j.json",
                "[{\"text\": \"x\"}, {\"text\" 1}]".into(),
                sft,
                "j.json row 2: not valid JSON .. one list of JSON objects",
            ),
            (
                "k.csv",
                "text,b\nx,1\ny\n".into(),
                sft,
                "k.csv:3: not a row of this table: cells of the header 2, of the row 1 .. quotes",
            ),
        ],
    );
    let utf16: Vec<u8> = "{\"text\": 1}\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let error = dir.load("l.jsonl", utf16, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("text in UTF-8"), "{error}");
}

#[test]
fn errors_of_unrecognised_rows_give_advice() {
    let dir = Folder::new();
    let talk = |role: &str, content: &str| {
        let user = "{\"role\": \"user\", \"content\": \"q\"}";
        format!("{{\"messages\": [{user}, {{\"role\": \"{role}\", \"content\": {content}}}]}}\n")
    };
    let (sft, clf) = (Task::Sft, Task::Classify);
    check(
        &dir,
        &[
            (
                "e.csv",
                "review,sentiment\ngood,pos\n".into(),
                clf,
                "e.csv:2: `text` is missing .. the columns are review, sentiment .. --data-fields text=COLUMN,label=COLUMN",
            ),
            (
                "f.csv",
                "review,sentiment\ngood,pos\n".into(),
                sft,
                "f.csv:2: no known form .. [review, sentiment] .. text, label (with --task classify)",
            ),
            (
                "g.jsonl",
                talk("assistant", "null"),
                sft,
                "g.jsonl:1: chat template .. message 2 (role assistant) has no content",
            ),
            (
                "h.jsonl",
                talk("gpt", "\"a\""),
                sft,
                "nothing is supervised .. h.jsonl:1: no message has the role assistant (the roles are user, gpt)",
            ),
        ],
    );
    let twice = vec![("prompt".to_string(), "a".to_string()), ("prompt".into(), "b".into())];
    let options = Options { fields: twice, ..Options::default() };
    let error = dir.load("m.jsonl", "{}", &options).unwrap_err();
    assert!(error.is_configuration(), "{error}");
    assert!(error.to_string().contains("`prompt` is given twice (a, b)"), "{error}");
}
