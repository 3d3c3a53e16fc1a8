//! Tokenised rows in four flat arrays: what a million rows cost is 4 bytes and one bit a token, and about
//! 24 bytes a row.

/// Tokenised rows, in the order of the data.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Samples {
    ids: Vec<u32>,
    /// One bit a token: supervised.
    mask: Vec<u64>,
    /// Where row i ends in `ids`.
    ends: Vec<u64>,
    /// Position of row i in the data as it was read.
    rows: Vec<u64>,
    targets: Vec<u32>,
    /// Class of each row; empty where rows carry none.
    labels: Vec<u32>,
}

/// One row as tokens.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Position in the data as it was read, from 0: dropped rows count, so it names the row for good.
    pub row: u64,
    /// Token ids.
    pub ids: &'a [u32],
    /// The class, for classifiers.
    pub label: Option<u32>,
    mask: &'a [u64],
    start: usize,
    targets: u32,
}

impl Sample<'_> {
    /// Whether token i is supervised, that is, whether its own prediction counts in the loss.
    /// The first token of a row has no predecessor and never counts, whatever this says of it.
    pub fn supervised(&self, i: usize) -> bool {
        debug_assert!(i < self.ids.len());
        bit(self.mask, self.start + i)
    }

    /// Supervised tokens that have a predecessor in this row.
    pub fn supervised_targets(&self) -> usize {
        self.targets as usize
    }
}

fn bit(mask: &[u64], i: usize) -> bool {
    mask[i / 64] >> (i % 64) & 1 == 1
}

/// One row on its way into the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// One for each id.
    pub mask: Vec<bool>,
}

impl Encoded {
    /// Supervised tokens that have a predecessor.
    pub fn targets(&self) -> usize {
        self.mask.iter().skip(1).filter(|&&m| m).count()
    }
}

impl Samples {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// No rows.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Row i, which must be below `len`.
    pub fn get(&self, i: usize) -> Sample<'_> {
        let range = self.range(i);
        Sample {
            row: self.rows[i],
            ids: &self.ids[range.clone()],
            label: self.labels.get(i).copied(),
            mask: &self.mask,
            start: range.start,
            targets: self.targets[i],
        }
    }

    /// All rows in order.
    pub fn iter(&self) -> impl Iterator<Item = Sample<'_>> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// Tokens in row i.
    pub fn tokens(&self, i: usize) -> usize {
        self.range(i).len()
    }

    /// Tokens in all rows.
    pub fn total_tokens(&self) -> u64 {
        self.ids.len() as u64
    }

    /// Supervised targets in all rows.
    pub fn total_targets(&self) -> u64 {
        self.targets.iter().map(|&t| u64::from(t)).sum()
    }

    fn range(&self, i: usize) -> std::ops::Range<usize> {
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        start..self.ends[i] as usize
    }

    /// Adds a row at the end.
    pub(crate) fn push(&mut self, row: u64, encoded: &Encoded, label: Option<u32>) {
        for (k, &m) in encoded.mask.iter().enumerate() {
            self.push_bit(self.ids.len() + k, m);
        }
        self.ids.extend_from_slice(&encoded.ids);
        self.ends.push(self.ids.len() as u64);
        self.rows.push(row);
        self.targets.push(encoded.targets() as u32);
        self.labels.extend(label);
    }

    fn push_bit(&mut self, at: usize, m: bool) {
        if at / 64 == self.mask.len() {
            self.mask.push(0);
        }
        self.mask[at / 64] |= u64::from(m) << (at % 64);
    }

    /// Replaces labels by what `of` makes of them.
    pub(crate) fn relabel(&mut self, of: impl Fn(u32) -> u32) {
        self.labels.iter_mut().for_each(|l| *l = of(*l));
    }

    /// The rows for which `keep` says yes, by index.
    pub(crate) fn select(&self, keep: impl Fn(usize) -> bool) -> Samples {
        let mut out = Samples::default();
        for i in (0..self.len()).filter(|&i| keep(i)) {
            let sample = self.get(i);
            let mask = (0..sample.ids.len()).map(|k| sample.supervised(k)).collect();
            out.push(sample.row, &Encoded { ids: sample.ids.to_vec(), mask }, sample.label);
        }
        out.shrink();
        out
    }

    pub(crate) fn shrink(&mut self) {
        self.ids.shrink_to_fit();
        self.mask.shrink_to_fit();
        self.ends.shrink_to_fit();
    }

    /// blake3, in hex, over everything that training sees of the rows; equal hashes mean equal training data.
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
        hasher.finalize().to_hex().to_string()
    }

    /// How many rows repeat an earlier one token for token.
    pub fn duplicates(&self) -> u64 {
        let mut seen = std::collections::HashSet::with_capacity(self.len());
        let key = |s: Sample<'_>| {
            let hash = blake3::hash(bytemuck::cast_slice(s.ids));
            let mut head = [0; 16];
            head.copy_from_slice(&hash.as_bytes()[..16]);
            (u128::from_le_bytes(head), s.label)
        };
        self.iter().filter(|s| !seen.insert(key(*s))).count() as u64
    }
}
