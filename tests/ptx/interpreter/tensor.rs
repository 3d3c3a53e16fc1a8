//! ldmatrix and mma.sync with the fragment layouts of the PTX manual (sections on m8n8 and on m16n8k16).

use super::ins::Lanes;
use super::memory::{Region, Who};

/// Matrices of 8 rows of 8 16-bit numbers: lane 8 i + r has the address of row r of matrix i; lane l gets the pair (row
/// l / 4, columns 2 (l % 4) and the next) of each matrix, or of the transposed matrix.
pub fn load_matrix(
    (count, transposed): (usize, bool),
    addresses: &Lanes,
    shared: &mut Region,
    who: impl Fn(u32) -> Who,
) -> Result<Vec<Lanes>, String> {
    let mut out = Vec::new();
    for i in 0..count {
        let mut rows = [[0u16; 8]; 8];
        for (r, row) in rows.iter_mut().enumerate() {
            let lane = 8 * i + r;
            let who = who(lane as u32);
            let bits = shared.read(addresses[lane], 16, who);
            let bits = bits.map_err(|e| format!("thread {}: {e}", who.thread))?;
            *row = std::array::from_fn(|c| (bits >> (16 * c)) as u16);
        }
        out.push(std::array::from_fn(|l| {
            let (r, c) = (l / 4, 2 * (l % 4));
            let (low, high) =
                if transposed { (rows[c][r], rows[c + 1][r]) } else { (rows[r][c], rows[r][c + 1]) };
            u64::from(low) | u64::from(high) << 16
        }));
    }
    Ok(out)
}

/// m16n8k16, bf16 inputs, f32 sums: d = a b + c. Products and their sum are exact here and rounded once; a real device
/// truncates in between, which the bounds of tests allow.
pub fn multiply(a: &[Lanes], b: &[Lanes], c: &[Lanes]) -> Result<Vec<Lanes>, String> {
    if (a.len(), b.len(), c.len()) != (4, 2, 4) {
        return Err("fragments of 4, 2 and 4 registers are expected".into());
    }
    let half = |x: u64, i: usize| f64::from(f32::from_bits(((x >> (16 * i)) as u32) << 16));
    let (mut ma, mut mb, mut mc) = ([[0.0; 16]; 16], [[0.0; 8]; 16], [[0.0; 8]; 16]);
    for l in 0..32 {
        let (group, pair) = (l / 4, 2 * (l % 4));
        for (r, a) in a.iter().enumerate() {
            for i in 0..2 {
                ma[group + 8 * (r % 2)][pair + i + 8 * (r / 2)] = half(a[l], i);
            }
        }
        for (r, b) in b.iter().enumerate() {
            for i in 0..2 {
                mb[pair + i + 8 * r][group] = half(b[l], i);
            }
        }
        for (r, c) in c.iter().enumerate() {
            mc[group + 8 * (r / 2)][pair + r % 2] = f64::from(f32::from_bits(c[l] as u32));
        }
    }
    for (row, out) in ma.iter().zip(&mut mc) {
        for (n, out) in out.iter_mut().enumerate() {
            *out += (0..16).map(|k| row[k] * mb[k][n]).sum::<f64>();
        }
    }
    let element = |r: usize, l: usize| mc[l / 4 + 8 * (r / 2)][2 * (l % 4) + r % 2] as f32;
    Ok((0..4).map(|r| std::array::from_fn(|l| u64::from(element(r, l).to_bits()))).collect())
}
