//! Tokenized rows in flat arrays: 4 bytes and one bit per token, and about 24 bytes per row (28 with weights).

/// Tokenized rows, in the order of the data.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    ids: Vec<u32>,
    /// One bit per token: whether it is supervised.
    mask: Vec<u64>,
    /// End of row i in `ids`.
    ends: Vec<u64>,
    /// Position of row i in the input data.
    rows: Vec<u64>,
    targets: Vec<u32>,
    /// Class of each row; empty for rows without a class.
    labels: Vec<u32>,
    /// First token of the second answer of each pair, from the start of the pair; empty for rows that are no pairs.
    seconds: Vec<u32>,
    /// Weight of each row; empty if all are 1.
    weights: Vec<f32>,
    /// Numbers of each row, equally many of each; empty for rows without.
    values: Vec<f32>,
    /// Class of each token, else [`NO_CLASS`]; empty where words have no classes.
    classes: Vec<u32>,
}

/// The class of a token that has none.
pub const NO_CLASS: u32 = u32::MAX;

/// A tokenised row.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Position in the input data, from 0; dropped rows count, so the number identifies the row permanently.
    pub row: u64,
    /// Token ids.
    pub ids: &'a [u32],
    /// The class, for a classifier.
    pub label: Option<u32>,
    /// First token of the rejected answer's row, for a pair: the chosen one is before it.
    pub second: Option<usize>,
    /// Factor of the losses of its tokens.
    pub weight: f32,
    /// The numbers that a regression learns, or the margin of a pair of rewards.
    pub values: &'a [f32],
    /// The class of each token, else [`NO_CLASS`]; empty where words have no classes.
    pub classes: &'a [u32],
    mask: &'a [u64],
    start: usize,
    targets: u32,
}

impl Sample<'_> {
    /// Whether token i is supervised, that is, whether its prediction counts in the loss. The first token of a row has
    /// no predecessor, so it never counts, even if it is supervised.
    pub fn supervised(&self, i: usize) -> bool {
        debug_assert!(i < self.ids.len());
        bit(self.mask, self.start + i)
    }

    /// The rows: one, or the chosen and the rejected one of a pair.
    pub fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let (at, end) = (self.second.unwrap_or(0), self.ids.len());
        [0..at, at..end].into_iter().filter(|row| !row.is_empty())
    }

    /// Number of supervised tokens that have a predecessor in the row, or of tokens with a class.
    pub fn supervised_targets(&self) -> usize {
        self.targets as usize
    }
}

fn bit(mask: &[u64], i: usize) -> bool {
    mask[i / 64] >> (i % 64) & 1 == 1
}

/// The tokens of a row before they are stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// One bit per token: whether it is supervised.
    pub mask: Vec<bool>,
    /// First token of the second row of a pair; 0 for a single row.
    pub second: u32,
    /// What is suspicious about its reasoning.
    pub thought: Thought,
    /// Factor of the losses of its tokens.
    pub weight: f32,
    /// As in [`Sample`].
    pub values: Vec<f32>,
    /// As in [`Sample`].
    pub classes: Vec<u32>,
}

/// What is suspicious about a row's reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Thought {
    /// Whether an empty think block is supervised.
    pub empty: bool,
    /// Whether the template leaves out the reasoning of a supervised message.
    pub lost: bool,
}

impl Encoded {
    /// A single row.
    pub fn new(mask: Vec<bool>, ids: Vec<u32>) -> Self {
        let (thought, weight) = (Thought::default(), 1.0);
        Encoded { ids, mask, second: 0, thought, weight, values: Vec::new(), classes: Vec::new() }
    }

    /// Keeps the first `most` tokens, and releases the memory of the others.
    pub fn cut(&mut self, most: usize) {
        self.ids.truncate(most);
        self.mask.truncate(most);
        self.classes.truncate(most);
        self.ids.shrink_to_fit();
        self.mask.shrink_to_fit();
    }

    /// The parts of `most` tokens that have a supervised token.
    pub fn split(&self, most: usize) -> Vec<Encoded> {
        let parts = self.ids.chunks(most).zip(self.mask.chunks(most));
        let of = |(ids, mask): (&[u32], &[bool])| Encoded::new(mask.to_vec(), ids.to_vec());
        let parts = parts.map(|part| Encoded { weight: self.weight, ..of(part) });
        parts.filter(|part| part.targets() > 0).collect()
    }

    /// Number of supervised tokens that have a predecessor, or of tokens with a class.
    pub fn targets(&self) -> usize {
        if !self.classes.is_empty() {
            return self.classes.iter().filter(|class| **class != NO_CLASS).count();
        }
        let (first, second) = self.mask.split_at(self.second as usize);
        [first, second].iter().flat_map(|row| row.iter().skip(1)).filter(|&&m| m).count()
    }
}

impl Samples {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Row i; i must be below `len`.
    pub fn get(&self, i: usize) -> Sample<'_> {
        let range = self.range(i);
        Sample {
            row: self.rows[i],
            ids: &self.ids[range.clone()],
            label: self.labels.get(i).copied(),
            second: self.seconds.get(i).map(|&at| at as usize),
            weight: self.weights.get(i).copied().unwrap_or(1.0),
            values: &self.values[i * self.width()..][..self.width()],
            classes: self.classes.get(range.clone()).unwrap_or_default(),
            mask: &self.mask,
            start: range.start,
            targets: self.targets[i],
        }
    }

    /// Numbers of each row.
    pub fn width(&self) -> usize {
        self.values.len() / self.len().max(1)
    }

    /// Whether tokens have classes.
    pub fn have_classes(&self) -> bool {
        !self.classes.is_empty()
    }

    /// All rows in order.
    pub fn iter(&self) -> impl Iterator<Item = Sample<'_>> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// Number of tokens in row i.
    pub fn tokens(&self, i: usize) -> usize {
        self.range(i).len()
    }

    /// Number of tokens in all rows.
    pub fn total_tokens(&self) -> u64 {
        self.ids.len() as u64
    }

    /// Number of supervised targets in all rows.
    pub fn total_targets(&self) -> u64 {
        self.targets.iter().map(|&t| u64::from(t)).sum()
    }

    /// Number of rows before a position in the input data.
    pub fn before(&self, row: u64) -> usize {
        self.rows.partition_point(|&r| r < row)
    }

    fn range(&self, i: usize) -> std::ops::Range<usize> {
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        start..self.ends[i] as usize
    }

    /// Whether any row has a weight other than 1.
    fn are_weighted(&self) -> bool {
        !self.weights.is_empty()
    }

    /// Appends a row.
    pub(crate) fn push(&mut self, row: u64, encoded: &Encoded, label: Option<u32>) {
        for (k, &m) in encoded.mask.iter().enumerate() {
            self.push_bit(self.ids.len() + k, m);
        }
        if encoded.weight != 1.0 && self.weights.is_empty() {
            self.weights.resize(self.len(), 1.0);
        }
        let weighted = encoded.weight != 1.0 || self.are_weighted();
        self.weights.extend(weighted.then_some(encoded.weight));
        self.values.extend_from_slice(&encoded.values);
        self.classes.extend_from_slice(&encoded.classes);
        self.ids.extend_from_slice(&encoded.ids);
        self.ends.push(self.ids.len() as u64);
        self.rows.push(row);
        self.targets.push(encoded.targets() as u32);
        self.labels.extend(label);
        self.seconds.extend((encoded.second > 0).then_some(encoded.second));
    }

    fn push_bit(&mut self, at: usize, m: bool) {
        if at / 64 == self.mask.len() {
            self.mask.push(0);
        }
        self.mask[at / 64] |= u64::from(m) << (at % 64);
    }

    /// Replaces each label `l` by `of(l)`.
    pub(crate) fn relabel(&mut self, of: impl Fn(u32) -> u32) {
        let classes = self.classes.iter_mut().filter(|class| **class != NO_CLASS);
        self.labels.iter_mut().chain(classes).for_each(|l| *l = of(*l));
    }

    /// The rows whose index `keep` accepts.
    pub(crate) fn select(&self, keep: impl Fn(usize) -> bool) -> Samples {
        let mut out = Samples::default();
        for i in (0..self.len()).filter(|&i| keep(i)) {
            let sample = self.get(i);
            let mask = (0..sample.ids.len()).map(|k| sample.supervised(k)).collect();
            let second = sample.second.unwrap_or(0) as u32;
            let (weight, values, classes) = (sample.weight, sample.values.to_vec(), sample.classes.to_vec());
            let encoded =
                Encoded { second, weight, values, classes, ..Encoded::new(mask, sample.ids.to_vec()) };
            out.push(sample.row, &encoded, sample.label);
        }
        out.shrink();
        out
    }

    pub(crate) fn shrink(&mut self) {
        self.ids.shrink_to_fit();
        self.mask.shrink_to_fit();
        self.ends.shrink_to_fit();
        self.weights.shrink_to_fit();
        self.values.shrink_to_fit();
        self.classes.shrink_to_fit();
    }

    /// The blake3 hash, in hex, of all row data that training uses; equal hashes mean equal training data.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut part = |name: &str, bytes: &[u8]| {
            hasher.update(name.as_bytes());
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part("ids", bytemuck::cast_slice(&self.ids));
        part("mask", bytemuck::cast_slice(&self.mask));
        part("ends", bytemuck::cast_slice(&self.ends));
        part("rows", bytemuck::cast_slice(&self.rows));
        part("labels", bytemuck::cast_slice(&self.labels));
        if !self.seconds.is_empty() {
            part("seconds", bytemuck::cast_slice(&self.seconds));
        }
        if !self.weights.is_empty() {
            part("weights", bytemuck::cast_slice(&self.weights));
        }
        if !self.values.is_empty() {
            part("values", bytemuck::cast_slice(&self.values));
        }
        if !self.classes.is_empty() {
            part("classes", bytemuck::cast_slice(&self.classes));
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Number of rows that equal an earlier row.
    pub fn duplicates(&self) -> u64 {
        self.repeated().into_iter().filter(|again| *again).count() as u64
    }

    /// Whether each row equals an earlier one: in tokens, what of them is supervised, label, numbers and weight.
    pub fn repeated(&self) -> Vec<bool> {
        let mut seen = std::collections::HashSet::with_capacity(self.len());
        let key = |s: Sample<'_>| {
            let mut hash = blake3::Hasher::new();
            hash.update(bytemuck::cast_slice(s.ids)).update(bytemuck::cast_slice(s.classes));
            let mask: Vec<u8> = (0..s.ids.len()).map(|i| u8::from(s.supervised(i))).collect();
            hash.update(&mask);
            let mut head = [0; 16];
            head.copy_from_slice(&hash.finalize().as_bytes()[..16]);
            let values: Vec<u32> = s.values.iter().chain([&s.weight]).map(|v| v.to_bits()).collect();
            (u128::from_le_bytes(head), s.label, s.second, values)
        };
        self.iter().map(|s| !seen.insert(key(s))).collect()
    }
}
