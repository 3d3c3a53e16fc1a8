//! A base with rows for added tokens in its embedding, and in a head of its own. Each new row is the mean of the rows in
//! the file (Hewitt 2021, <https://nlp.stanford.edu/~johnhew/vocab-expansion.html>), rounded to the type of the matrix.
//! transformers adds noise to that mean; here the same file gives the same rows on every machine.

use super::config::Config;
use crate::numeric::block::{Blocks, quantise};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors, Use};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Rows whose sum is one task. The sums of tasks are added in ascending order, so that threads change no bit.
const TASK: usize = 1 << 10;

/// Most rows that a base gets.
const MOST: usize = 1 << 16;

/// The base cannot have that many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "an embedding of {own} rows cannot have {asked}: up to {MOST} rows are added, and none is taken away"
)]
pub struct NoRoom {
    own: usize,
    asked: usize,
}

/// Gives a base `rows` rows in its embedding and in a head of its own.
pub fn enlarge(base: Arc<dyn Tensors>, config: &mut Config, rows: usize) -> Result<Arc<dyn Tensors>, NoRoom> {
    let own = std::mem::replace(&mut config.vocab, rows);
    match rows.checked_sub(own) {
        Some(0) => Ok(base),
        Some(1..=MOST) => {
            let own = [own, config.hidden];
            Ok(Arc::new(Enlarged { base, own, rows, means: Mutex::default() }))
        }
        _ => Err(NoRoom { own, asked: rows }),
    }
}

/// A base with more rows.
struct Enlarged {
    base: Arc<dyn Tensors>,
    /// Shape of the matrices in the file. Another one is a fault of the file, which its reader reports.
    own: [usize; 2],
    /// Rows of the embedding and the head.
    rows: usize,
    /// The mean row of each matrix that was read.
    means: Mutex<BTreeMap<String, Vec<f32>>>,
}

impl Enlarged {
    /// Whether the matrix `name` gets rows.
    fn grows(&self, name: &str) -> Result<bool, String> {
        let of_tokens = ["embed_tokens.weight", "lm_head.weight"].iter().any(|end| name.ends_with(end));
        Ok(of_tokens && self.base.about(name)?.is_some_and(|about| about.shape == self.own))
    }

    /// Number of rows that it gets.
    fn more(&self) -> usize {
        self.rows - self.own[0]
    }

    /// The mean of the rows, which `widen` gives by their numbers.
    fn mean(&self, name: &str, widen: impl Fn(usize) -> Vec<f32> + Sync) -> Vec<f32> {
        let [rows, cols] = self.own;
        let means = || self.means.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mean) = means().get(name) {
            return mean.clone();
        }
        // Not under the lock: a thread that waits for tasks may begin another one that comes here.
        let sum = |task: usize| {
            let mut sum = vec![0f64; cols];
            for row in task * TASK..rows.min((task + 1) * TASK) {
                sum.iter_mut().zip(widen(row)).for_each(|(sum, x)| *sum += f64::from(x));
            }
            sum
        };
        let sums: Vec<Vec<f64>> = (0..rows.div_ceil(TASK)).into_par_iter().map(sum).collect();
        let of_column = |col: usize| sums.iter().map(|sum| sum[col]).sum::<f64>() / rows as f64;
        let mean: Vec<f32> = (0..cols).map(|col| of_column(col) as f32).collect();
        means().insert(name.to_owned(), mean.clone());
        mean
    }
}

impl Tensors for Enlarged {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        if !self.grows(name)? {
            return self.base.tensor(name);
        }
        let [rows, cols] = self.own;
        let shape = vec![self.rows, cols];
        if let Some(blocks) = self.blocks(name)? {
            let bytes = Dtype::F32.narrow(&blocks.first(blocks.rows)).into();
            return Ok(Some(Tensor { shape, dtype: Dtype::F32, bytes }));
        }
        let Some(Tensor { dtype, bytes, .. }) = self.base.tensor(name)? else { return Ok(None) };
        let size = cols * dtype.size();
        if bytes.len() != rows * size {
            return Err(format!("a tensor of {rows} rows of {cols} has {} bytes", bytes.len()));
        }
        let mean = self.mean(name, |row| dtype.widen(&bytes[row * size..(row + 1) * size]));
        let mut all = bytes.into_owned();
        all.extend(dtype.narrow(&mean).repeat(self.more()));
        Ok(Some(Tensor { shape, dtype, bytes: all.into() }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        match self.grows(name)? {
            false => self.base.blocks(name),
            true => Ok(self.block_parts(name)?.and_then(Blocks::joined)),
        }
    }

    fn block_parts(&self, name: &str) -> Result<Option<Vec<Blocks>>, String> {
        let parts = self.base.block_parts(name)?;
        if !self.grows(name)? {
            return Ok(parts);
        }
        let Some(mut parts) = parts else { return Ok(None) };
        let Some(whole) = Blocks::joined(parts.clone()) else { return Ok(None) };
        let mean = self.mean(name, |row| whole.range(row..row + 1).first(1));
        let bytes = quantise(whole.block, &mean).map(|row| row.repeat(self.more()));
        let new = bytes.and_then(|bytes| Blocks::new((self.more(), whole.cols), whole.block, bytes.into()));
        parts.push(new.ok_or_else(|| format!("a row of {} values is not whole blocks", whole.cols))?);
        Ok(Some(parts))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let about = self.base.about(name)?;
        match self.grows(name)? {
            false => Ok(about),
            true => Ok(about.map(|about| About { shape: vec![self.rows, self.own[1]], ..about })),
        }
    }

    fn names(&self) -> Vec<String> {
        self.base.names()
    }

    fn advise(&self, name: &str, when: Use) {
        self.base.advise(name, when);
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.base.file_of(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::block::{Block, Encoding};

    /// An embedding of 5 rows of 256 values, plain or in blocks, and a norm.
    struct Base(Option<Block>);

    fn value(row: usize, col: usize) -> f32 {
        ((row * 37 + col * 11) % 64) as f32 / 16.0 - 1.5
    }

    fn values() -> Vec<f32> {
        (0..5 * 256).map(|i| value(i / 256, i % 256)).collect()
    }

    impl Tensors for Base {
        fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
            let shape = if name.ends_with("norm.weight") { vec![5] } else { vec![5, 256] };
            let n = shape.iter().product();
            let bytes = Dtype::Bf16.narrow(&values()[..n]).into();
            Ok(Some(Tensor { shape, dtype: Dtype::Bf16, bytes }))
        }

        fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
            let block = self.0.filter(|_| !name.ends_with("norm.weight"));
            let bytes = |block| quantise(block, &values()).unwrap().into();
            Ok(block.and_then(|block| Blocks::new((5, 256), block, bytes(block))))
        }

        fn about(&self, name: &str) -> Result<Option<About>, String> {
            let Tensor { shape, dtype, .. } = self.tensor(name)?.unwrap();
            let encoding = self.blocks(name)?.map(|blocks| Encoding::Blocks(blocks.block));
            Ok(Some(About { shape, encoding: encoding.unwrap_or(Encoding::Plain(dtype)) }))
        }

        fn names(&self) -> Vec<String> {
            ["model.embed_tokens.weight", "model.norm.weight"].map(String::from).to_vec()
        }
    }

    fn config() -> Config {
        let json = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 5, "hidden_size": 256, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        });
        Config::from_json(&json).unwrap()
    }

    #[test]
    fn new_rows_are_the_mean_of_the_others_in_every_type() {
        let name = "model.embed_tokens.weight";
        for block in [None, Some(Block::Q8_0), Some(Block::Q4_K), Some(Block::NF4)] {
            let mut config = config();
            let large = enlarge(Arc::new(Base(block)), &mut config, 8).unwrap();
            assert_eq!(config.vocab, 8);
            assert_eq!(large.about(name).unwrap().unwrap().shape, [8, 256]);
            let tensor = large.tensor(name).unwrap().unwrap();
            assert_eq!(tensor.shape, [8, 256]);
            let all = tensor.dtype.widen(&tensor.bytes);
            let (own, new) = all.split_at(5 * 256);
            let mean = |col: usize| (0..5).map(|row| own[row * 256 + col]).sum::<f32>() / 5.0;
            // The step of NF4 and Q4_K is a quarter and a fifteenth of the range of a block.
            let off = match block {
                None => 0.01,
                Some(Block::Q8_0) => 0.02,
                Some(_) => 0.35,
            };
            for row in new.chunks(256) {
                assert!(row.iter().enumerate().all(|(col, x)| (x - mean(col)).abs() < off), "{block:?}");
                assert_eq!(row, &new[..256]);
            }
            if block.is_none() {
                assert_eq!(own, &values()[..]);
            }
            let parts = large.block_parts(name).unwrap();
            assert_eq!(parts.map(|parts| parts.len()), block.map(|_| 2));
            let stored = Base(block).blocks(name).unwrap();
            let joined = large.blocks(name).unwrap();
            assert_eq!(
                joined.map(|joined| joined.bytes[..joined.bytes.len() * 5 / 8].to_vec()),
                stored.map(|stored| stored.bytes.to_vec())
            );
            assert_eq!(large.tensor("model.norm.weight").unwrap().unwrap().shape, [5]);
        }
    }

    #[test]
    fn a_file_with_other_rows_than_its_configuration_gets_none() {
        let mut config = Config { vocab: 6, ..config() };
        let large = enlarge(Arc::new(Base(None)), &mut config, 8).unwrap();
        assert_eq!(large.tensor("model.embed_tokens.weight").unwrap().unwrap().shape, [5, 256]);
    }

    #[test]
    fn rows_are_neither_taken_away_nor_added_without_bound() {
        let rows = |rows| enlarge(Arc::new(Base(None)), &mut config(), rows).map(|_| ());
        assert_eq!(rows(5), Ok(()));
        assert_eq!(rows(5 + MOST), Ok(()));
        for wrong in [4, 6 + MOST, usize::MAX] {
            assert_eq!(rows(wrong), Err(NoRoom { own: 5, asked: wrong }));
        }
    }
}
