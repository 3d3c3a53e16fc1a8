//! Trials of attention by wgmma: on the device itself, it must agree with attention of sm_80 and be faster. The two
//! directions are decided separately, each for heads of 64 and of 128 together. Tests run them on the
//! interpreter; an H200 passed them.

use super::attention_sm90a::{Flash, SIZES};
use super::trial::uniform;
use super::{Cuda, Driver, Memory, Tier, Tokens};
use crate::backend::{
    AttentionSaved, Backend, Checked, Fault, Heads, Qkv, QkvGrad, TokenRows, View, view, view_mut,
};
use std::time::Instant;

/// The requirements of a trial.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionTrial {
    /// Tokens of the row that is timed.
    pub timed: usize,
    /// Its query heads, and the key heads that they share: enough blocks to fill a card.
    pub heads: (usize, usize),
    /// The required speed relative to attention of sm_80.
    pub faster: f64,
}

impl Default for AttentionTrial {
    fn default() -> Self {
        AttentionTrial { timed: 4096, heads: (16, 4), faster: 1.03 }
    }
}

/// Packed rows that are compared. The first set has a row below a tile, a row of one token, and a row of three tiles
/// with an almost empty last one; all rings wrap except that of queries in heads of 64, which wraps in the timed row,
/// which is compared as well. The second set has fewer tokens than a box. The third is within a
/// window, in which blocks begin beyond their first tiles.
const COMPARED: [([u32; 4], Option<usize>); 3] =
    [([0, 3, 4, 263], None), ([0, 3, 4, 40], None), ([0, 3, 4, 263], Some(70))];
/// Heads of queries and of keys.
const HEADS: (usize, usize) = (2, 1);
/// Tolerances relative to a row's length in one head (probabilities are rounded to bf16, 2^-9, under different maxima)
/// and to the mean length of all rows, for gradients close to zero.
const ROUNDED: [f64; 2] = [1.0 / 128.0, 1e-3];
/// Tolerance of logsumexp, relative to its magnitude plus one: no part of it is rounded to bf16.
const EXACT: f64 = 1e-4;
/// Computations at a time, and rounds.
const TIMES: (u32, usize) = (4, 3);

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Forward,
    Backward,
}

/// The kernels that compute a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Mma,
    Wgmma,
}

impl Way {
    /// Wgmma in this direction alone, or nowhere.
    fn flash(self, by: By) -> Flash {
        let takes = |way| by == By::Wgmma && self == way;
        Flash { forward: takes(Way::Forward), backward: takes(Way::Backward) }
    }
}

/// Attention's inputs on the device.
struct Case {
    heads: Heads,
    rows: usize,
    tokens: Tokens,
    /// q, k, v, dout
    inputs: [Memory; 4],
    /// out and logsumexp, by sm_80.
    saved: Vec<Memory>,
}

impl Case {
    /// Columns of q, k, v and dout.
    fn cols(&self) -> [usize; 4] {
        let Heads { query, kv, size, .. } = self.heads;
        [query * size, kv * size, kv * size, query * size]
    }

    fn input(&self, which: usize) -> View<'_, Memory> {
        view(&self.inputs[which], self.rows, self.cols()[which])
    }

    fn qkv(&self) -> Qkv<'_, Memory> {
        Qkv { q: self.input(0), k: self.input(1), v: self.input(2) }
    }

    /// The lengths of a direction's outputs: out, logsumexp; dq, dk, dv.
    fn lengths(&self, way: Way) -> Vec<usize> {
        let [q, k, v, _] = self.cols();
        let cols = if way == Way::Forward { vec![q, self.heads.query] } else { vec![q, k, v] };
        cols.into_iter().map(|c| c * self.rows).collect()
    }

    /// Checks that two tiers computed the same, within the bounds of their roundings.
    fn same(&self, way: Way, old: &[Vec<f32>], new: &[Vec<f32>]) -> Result<(), String> {
        for (i, (old, new)) in old.iter().zip(new).enumerate() {
            let (exact, per) = ((way, i) == (Way::Forward, 1), self.heads.size);
            let off = if exact { apart(old, new) } else { apart_by_rows(per, old, new) };
            if let Some(at) = off {
                let (size, what) = (self.heads.size, ["out", "logsumexp", "dq", "dk", "dv"]);
                let name = what[i + if way == Way::Forward { 0 } else { 2 }];
                return Err(format!("wgmma: {name} {at} in heads of {size} is not mma's"));
            }
        }
        Ok(())
    }
}

/// The first number that differs by more than [`EXACT`]; NaN is reported as well.
fn apart(old: &[f32], new: &[f32]) -> Option<usize> {
    let off = |(a, b): (&f32, &f32)| f64::from((a - b).abs()) / (1.0 + f64::from(a.abs()));
    old.iter().zip(new).position(|x| !off(x).le(&EXACT))
}

/// The first row of `per` numbers that differs by more than [`ROUNDED`]; NaN is reported as well.
fn apart_by_rows(per: usize, old: &[f32], new: &[f32]) -> Option<usize> {
    let length = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let mean = length(&mut old.iter().copied()) / ((old.len() / per) as f64).sqrt();
    let rows = old.chunks(per).zip(new.chunks(per));
    let off = |(a, b): (&[f32], &[f32])| {
        let bound = ROUNDED[0] * length(&mut a.iter().copied()) + ROUNDED[1] * mean;
        length(&mut a.iter().zip(b).map(|(a, b)| a - b)) / bound
    };
    rows.map(off).position(|x| !x.le(&1.0))
}

impl<D: Driver> Checked<Cuda<D>> {
    /// The same device with attention by wgmma, in each direction that agrees and is faster; otherwise unchanged, and
    /// [`Cuda::attention_below`] says why. Without the bf16 class, or on another capability than 9.0, there is no
    /// trial.
    pub fn attention_sm90a(mut self, trial: AttentionTrial) -> Self {
        if self.driver.sm90a().is_none() || self.tier != Tier::Sm80 || self.fault.is_some() {
            return self;
        }
        self.undecided = false;
        let mut why = Vec::new();
        let mut takes = |device: &mut Self, way, name| {
            let said = device.tried(|d| d.attends(way).and_then(|()| d.attends_faster(way, trial)));
            why.extend(said.as_ref().err().map(|e| format!("{name}: {e}")));
            said.is_ok()
        };
        let forward = takes(&mut self, Way::Forward, "forward");
        let backward = takes(&mut self, Way::Backward, "gradient");
        // Without enough memory neither direction is decided: another device on the card would use other kernels.
        self.flash = if self.undecided { Flash::default() } else { Flash { forward, backward } };
        self.attention_below = (!why.is_empty()).then(|| why.join("; "));
        self
    }
}

impl<D: Driver> Cuda<D> {
    /// Why attention, or a direction of it, stays with sm_80 on a device that could run it by wgmma.
    pub fn attention_below(&self) -> Option<&str> {
        self.attention_below.as_deref()
    }

    fn attends(&mut self, way: Way) -> Result<(), String> {
        for (size, (bounds, window)) in SIZES.into_iter().flat_map(|size| COMPARED.map(|rows| (size, rows))) {
            let heads = Heads { window, ..Heads::new(HEADS.0, HEADS.1, size) };
            let case = self.attention_case(&bounds, heads);
            let mut computed = |by| {
                let mut outs = self.attention_outs(&case, way);
                self.attended(&case, way, (by, &mut outs));
                self.outs(&case, way, &outs)
            };
            let (old, new) = (computed(By::Mma)?, computed(By::Wgmma)?);
            case.same(way, &old, &new)?;
        }
        Ok(())
    }

    fn attends_faster(&mut self, way: Way, trial: AttentionTrial) -> Result<(), String> {
        let AttentionTrial { timed, heads, faster } = trial;
        for size in SIZES {
            let bounds = [0, timed as u32];
            let case = self.attention_case(&bounds, Heads::new(heads.0, heads.1, size));
            let mut outs = [(); 2].map(|()| self.attention_outs(&case, way));
            let mut least = [f64::INFINITY; 2];
            for turn in 0..2 * TIMES.1 {
                let outs = ([By::Mma, By::Wgmma][turn % 2], &mut outs[turn % 2][..]);
                let seconds = self.seconds_of(&case, way, outs).map_err(|e| e.to_string())?;
                least[turn % 2] = seconds.min(least[turn % 2]);
            }
            let [old, new] = outs.each_ref().map(|outs| self.outs(&case, way, outs));
            case.same(way, &old?, &new?)?;
            let gain = least[0] / least[1];
            if gain < faster {
                return Err(format!(
                    "wgmma: {gain:.2} times as fast as mma at {timed} tokens in heads of {size}, and {faster:.2} is asked"
                ));
            }
        }
        Ok(())
    }

    /// Times some calls, after one that compiles and wakes the device.
    fn seconds_of(&mut self, case: &Case, way: Way, (by, outs): (By, &mut [Memory])) -> Result<f64, Fault> {
        self.attended(case, way, (by, outs));
        self.fetched(&outs[0], 1)?;
        let began = Instant::now();
        for _ in 0..TIMES.0 {
            self.attended(case, way, (by, outs));
            // The list is too short to become a graph, which would be timed and kept.
            self.send();
        }
        self.fetched(&outs[0], 1)?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Computes one direction, by wgmma or not.
    fn attended(&mut self, case: &Case, way: Way, (by, outs): (By, &mut [Memory])) {
        self.flash = way.flash(by);
        let (rows, [wide, narrow, ..]) = (case.rows, case.cols());
        match outs {
            [out, lse] => {
                let outs = (view_mut(out, rows, wide), view_mut(lse, rows, case.heads.query));
                self.attention(outs.0, outs.1, case.qkv(), case.heads, &case.tokens);
            }
            [dq, dk, dv] => {
                let (dq, of) = (view_mut(dq, rows, wide), |m| view_mut(m, rows, narrow));
                let grad: QkvGrad<Memory> = QkvGrad { dq, dk: of(dk), dv: of(dv) };
                let [out, lse] = &case.saved[..] else { return };
                let (out, logsumexp) = (view(out, rows, wide), view(lse, rows, case.heads.query));
                let saved = AttentionSaved { qkv: case.qkv(), out, logsumexp };
                self.attention_grad(grad, case.input(3), saved, case.heads, &case.tokens);
            }
            _ => {}
        }
    }

    fn outs(&mut self, case: &Case, way: Way, outs: &[Memory]) -> Result<Vec<Vec<f32>>, String> {
        let all = outs.iter().zip(case.lengths(way));
        all.map(|(out, len)| self.fetched(out, len)).collect::<Result<_, _>>().map_err(|e| e.to_string())
    }

    /// Memory for a direction's outputs. It starts as random numbers, so that an unwritten output is detected.
    fn attention_outs(&mut self, case: &Case, way: Way) -> Vec<Memory> {
        case.lengths(way).into_iter().map(|len| self.numbers(len, 5)).collect()
    }

    fn attention_case(&mut self, bounds: &[u32], heads: Heads) -> Case {
        let Heads { query, kv, size, .. } = heads;
        let rows = *bounds.last().unwrap_or(&0) as usize;
        let tokens = self.tokens(TokenRows { ids: &vec![0; rows], bounds, past: 0, short: u32::MAX });
        let lengths = [query, kv, kv, query].map(|heads| rows * heads * size);
        let inputs = [1, 2, 3, 4].map(|key| {
            // Larger scores, so that the softmax is not flat.
            let by = if key == 1 { 4.0 } else { 1.0 };
            let numbers: Vec<f32> = uniform(lengths[key as usize - 1], key).iter().map(|x| by * x).collect();
            let memory = self.take(4 * numbers.len());
            self.write(memory.at(0), bytemuck::cast_slice(&numbers));
            memory
        });
        let mut case = Case { heads, rows, tokens, inputs, saved: Vec::new() };
        let mut saved = self.attention_outs(&case, Way::Forward);
        self.attended(&case, Way::Forward, (By::Mma, &mut saved));
        case.saved = saved;
        case
    }
}
