//! GGUF files byte by byte, valid or invalid: every number in a file can be set.
#![allow(dead_code)] // Each test uses a part.

/// Metadata of the kinds that the tests need.
#[derive(Clone)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
    Ints(Vec<i32>),
    /// Type and raw bytes.
    Raw(u32, Vec<u8>),
}

/// A tensor table's entry: name, dimensions innermost first, ggml's type, offset.
#[derive(Clone)]
pub struct Entry(pub String, pub Vec<u64>, pub u32, pub u64);

#[derive(Clone)]
pub struct File {
    pub version: u32,
    pub pairs: Option<u64>,
    pub count: Option<u64>,
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<Entry>,
    pub data: usize,
}

fn text(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend(9u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

impl File {
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.pairs.unwrap_or(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            value.write(&mut out);
        }
        for Entry(name, dims, kind, offset) in &self.tensors {
            text(&mut out, name);
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32) + self.data, 0);
        out
    }

    pub fn set(mut self, key: &str, value: Meta) -> Self {
        self.metadata.retain(|(k, _)| k != key);
        self.metadata.push((key.into(), value));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.metadata.retain(|(k, _)| k != key);
        self
    }

    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        self.tensors.push(Entry(name.into(), dims.to_vec(), kind, offset));
        self
    }
}

impl Meta {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Meta::U32(n) => out.extend([4u32.to_le_bytes(), n.to_le_bytes()].concat()),
            Meta::F32(x) => out.extend([6u32.to_le_bytes(), x.to_le_bytes()].concat()),
            Meta::Bool(b) => {
                out.extend(7u32.to_le_bytes());
                out.push(u8::from(*b));
            }
            Meta::Text(s) => {
                out.extend(8u32.to_le_bytes());
                text(out, s);
            }
            Meta::Texts(all) => {
                array(out, 8, all.len());
                all.iter().for_each(|s| text(out, s));
            }
            Meta::Floats(all) => {
                array(out, 6, all.len());
                all.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            Meta::Ints(all) => {
                array(out, 5, all.len());
                all.iter().for_each(|i| out.extend(i.to_le_bytes()));
            }
            Meta::Raw(kind, bytes) => {
                out.extend(kind.to_le_bytes());
                out.extend(bytes);
            }
        }
    }
}

/// The smallest valid model: a Llama with one head of 4 over these tokens, which has an embedding only.
pub fn llama(tokens: &[String]) -> File {
    let v = tokens.len() as u64;
    let number = |key: &str, n| (format!("llama.{key}"), Meta::U32(n));
    let mut metadata = vec![
        ("general.architecture".to_owned(), Meta::Text("llama".into())),
        number("block_count", 1),
        number("context_length", 8),
        number("embedding_length", 4),
        number("feed_forward_length", 4),
        number("attention.head_count", 1),
        ("tokenizer.ggml.model".to_owned(), Meta::Text("gpt2".into())),
        ("tokenizer.ggml.pre".to_owned(), Meta::Text("smollm".into())),
        ("tokenizer.ggml.tokens".to_owned(), Meta::Texts(tokens.to_vec())),
        ("tokenizer.ggml.merges".to_owned(), Meta::Texts(vec![])),
    ];
    metadata.push(("llama.attention.layer_norm_rms_epsilon".to_owned(), Meta::F32(1e-5)));
    let tensors = vec![Entry("token_embd.weight".into(), vec![4, v], 0, 0)];
    File { version: 3, pairs: None, count: None, metadata, tensors, data: 16 * v as usize }
}
