//! A base with rows for added tokens in its embedding, and in a head of its own. Each new row is the mean of the rows in
//! the file, as transformers begins them (Hewitt 2021, <https://nlp.stanford.edu/~johnhew/vocab-expansion.html>) but for the noise,
//! rounded to the type of the matrix. The same file gives the same rows on every machine.

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
    /// The number of rows that the matrix `name` lacks, and its columns.
    fn lacks(&self, name: &str) -> Result<Option<(usize, usize)>, String> {
        if !["embed_tokens.weight", "lm_head.weight"].iter().any(|end| name.ends_with(end)) {
            return Ok(None);
        }
        let shape = self.base.about(name)?.map(|about| about.shape).unwrap_or_default();
        let [rows, cols] = self.own;
        Ok((shape == [rows, cols]).then(|| (self.rows - rows, cols)))
    }

    /// The mean of the rows of `cols` values that `widen` gives by their numbers.
    fn mean(
        &self,
        name: &str,
        (rows, cols): (usize, usize),
        widen: impl Fn(usize) -> Vec<f32> + Sync,
    ) -> Vec<f32> {
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
        let of_column = |col: usize| sums.iter().map(|sum| sum[col]).sum::<f64>() / rows.max(1) as f64;
        let mean: Vec<f32> = (0..cols).map(|col| of_column(col) as f32).collect();
        means().insert(name.to_owned(), mean.clone());
        mean
    }
}

impl Tensors for Enlarged {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some((more, cols)) = self.lacks(name)? else { return self.base.tensor(name) };
        if let Some(blocks) = self.blocks(name)? {
            let mut values = vec![0.0; blocks.rows * blocks.cols];
            blocks.block.widen(&mut values, &blocks.bytes);
            let bytes = Dtype::F32.narrow(&values).into();
            return Ok(Some(Tensor { shape: vec![blocks.rows, cols], dtype: Dtype::F32, bytes }));
        }
        let Some(Tensor { shape, dtype, bytes }) = self.base.tensor(name)? else { return Ok(None) };
        let size = cols * dtype.size();
        if shape[..] != [self.rows - more, cols] || bytes.len() != shape[0] * size {
            return Err(format!("a tensor of shape {shape:?} and {} bytes gets no rows", bytes.len()));
        }
        let row = |row: usize| dtype.widen(&bytes[row * size..(row + 1) * size]);
        let mean = dtype.narrow(&self.mean(name, (shape[0], cols), row));
        let mut all = bytes.into_owned();
        (0..more).for_each(|_| all.extend(&mean));
        Ok(Some(Tensor { shape: vec![self.rows, cols], dtype, bytes: all.into() }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        match self.lacks(name)? {
            None => self.base.blocks(name),
            Some(_) => Ok(self.block_parts(name)?.and_then(Blocks::joined)),
        }
    }

    fn block_parts(&self, name: &str) -> Result<Option<Vec<Blocks>>, String> {
        let Some((more, cols)) = self.lacks(name)? else { return self.base.block_parts(name) };
        let Some(mut parts) = self.base.block_parts(name)? else { return Ok(None) };
        let Some(whole) = Blocks::joined(parts.clone()) else { return Ok(None) };
        let row = |row: usize| {
            let mut values = vec![0.0; cols];
            whole.block.widen(&mut values, whole.row(row));
            values
        };
        let mean = self.mean(name, (whole.rows, cols), row);
        let bytes = quantise(whole.block, &mean).map(|row| row.repeat(more));
        let new = bytes.and_then(|bytes| Blocks::new((more, cols), whole.block, bytes.into()));
        parts.push(new.ok_or_else(|| format!("a row of {cols} values is not whole blocks"))?);
        Ok(Some(parts))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let about = self.base.about(name)?;
        let Some((_, cols)) = self.lacks(name)? else { return Ok(about) };
        Ok(about.map(|about| About { shape: vec![self.rows, cols], ..about }))
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
    use crate::numeric::block::Block;
    use crate::numeric::block::Encoding;

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
