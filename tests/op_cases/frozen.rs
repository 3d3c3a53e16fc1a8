//! Frozen matrices of cases: in every dtype and every block type, with the values that they represent.

use crate::op_cases::Mat;
use finetune::backend::{Backend, Frozen};
use finetune::numeric::block::{Block, Blocks};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;
use std::rc::Rc;

/// How a frozen matrix is stored.
#[derive(Debug, Clone, Copy)]
pub enum Stored {
    /// f32 numbers of which most are no bf16 numbers.
    Fine,
    /// Numbers that every dtype represents exactly.
    Coarse(Dtype),
    Blocks(Block),
}

/// A frozen matrix on the host.
pub struct Matrix {
    pub values: Rc<Mat>,
    bytes: Vec<u8>,
    stored: Stored,
}

impl Matrix {
    pub fn draw(rows: usize, cols: usize, key: u64, stored: Stored) -> Matrix {
        let (values, bytes) = match stored {
            Stored::Fine => plain(Mat::random(rows, cols, key), Dtype::F32),
            Stored::Coarse(dtype) => plain(Mat::random(rows, cols, key).coarse(), dtype),
            Stored::Blocks(block) => {
                let blocks = random_blocks(block, rows, cols);
                (
                    Mat { rows, cols, v: widened(&blocks).into_iter().map(f64::from).collect() },
                    blocks.bytes.to_vec(),
                )
            }
        };
        Matrix { values: Rc::new(values), bytes, stored }
    }

    pub fn on<B: Backend>(&self, backend: &mut B) -> B::Weight {
        let (rows, cols) = (self.values.rows, self.values.cols);
        let dtype = match self.stored {
            Stored::Fine => Dtype::F32,
            Stored::Coarse(dtype) => dtype,
            Stored::Blocks(block) => {
                let blocks = Blocks::new((rows, cols), block, self.bytes.clone().into()).unwrap();
                return backend.weight_of_blocks(&blocks).unwrap();
            }
        };
        backend.weight(Frozen { rows, cols, dtype, bytes: &self.bytes[1..] }).unwrap()
    }
}

/// A matrix of a test on a backend.
pub fn weight<B: Backend>(backend: &mut B, w: &Mat, dtype: Dtype) -> B::Weight {
    let bytes = &frozen(&w.f32s(), dtype)[1..];
    backend.weight(Frozen { rows: w.rows, cols: w.cols, dtype, bytes }).unwrap()
}

/// The matrix, and its bytes in a file, from an odd address on.
fn plain(values: Mat, dtype: Dtype) -> (Mat, Vec<u8>) {
    let bytes = frozen(&values.f32s(), dtype);
    (values, bytes)
}

/// The bytes of a file, at an odd address.
pub fn frozen(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let mut bytes = vec![0u8];
    match dtype {
        Dtype::F32 => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
        Dtype::F16 => values.iter().for_each(|&x| bytes.extend(half::f16::from_f32(x).to_le_bytes())),
        Dtype::Bf16 => values.iter().for_each(|&x| bytes.extend(half::bf16::from_f32(x).to_le_bytes())),
    }
    bytes
}

/// Byte offsets of a block's scales, which are half-precision numbers.
fn scales(block: Block) -> &'static [usize] {
    match block {
        Block::Q8_0 | Block::Q4_0 | Block::Q5_0 => &[0],
        Block::Q4_1 | Block::Q5_1 | Block::Q4_K | Block::Q5_K => &[0, 2],
        Block::Q2_K => &[80, 82],
        Block::Q3_K => &[108],
        Block::Q6_K => &[208],
        Block::NF4 | Block::MXFP4 => &[],
    }
}

/// Random bits, with scales of a sensible size.
pub fn random_blocks(block: Block, rows: usize, cols: usize) -> Blocks {
    let mut draws = Stream::new(&[77, rows as u64, cols as u64]);
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / block.elements() {
        let mut one: Vec<u8> = (0..block.bytes()).map(|_| draws.bits() as u8).collect();
        for &at in scales(block) {
            let scale = half::f16::from_f32((draws.unit() - 0.5) / 64.0);
            one[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if block == Block::NF4 {
            one[..4].copy_from_slice(&(draws.unit() / 4.0).to_le_bytes());
        }
        if block == Block::MXFP4 {
            one[0] = 118 + draws.bits() as u8 % 4;
        }
        bytes.extend(one);
    }
    Blocks::new((rows, cols), block, bytes.into()).unwrap()
}

/// The numbers that blocks represent.
pub fn widened(blocks: &Blocks) -> Vec<f32> {
    let mut values = vec![0.0; blocks.rows * blocks.cols];
    blocks.block.widen(&mut values, &blocks.bytes);
    values
}
