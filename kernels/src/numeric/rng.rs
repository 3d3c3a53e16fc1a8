//! Counter-based random numbers: a value is a pure function of its key, so neither the distribution of the work nor the
//! order of evaluation changes it.
//!
//! All operations are 32-bit multiply, xor and shift, so that WGSL and PTX compute the same integers. The mixer is the
//! finaliser of MurmurHash3 (Austin Appleby, public domain), chained over the words of the key.

/// Adds a word to a running hash; the result is well mixed and can be used directly.
#[inline]
pub const fn mix(hash: u32, word: u32) -> u32 {
    let mut x = hash ^ word.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
    x = x.rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64);
    x ^= x >> 16;
    x = x.wrapping_mul(0x85eb_ca6b);
    x ^= x >> 13;
    x = x.wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// The hash of a key; each 64-bit word is added as two 32-bit words, low half first.
pub fn hash(key: &[u64]) -> u32 {
    key.iter().fold(0x9747_b28c, |h, &word| mix(mix(h, word as u32), (word >> 32) as u32))
}

/// A stream of random numbers for one key: number `i` is `mix(hash(key), i)`.
#[derive(Clone, Debug)]
pub struct Stream {
    base: u32,
    next: u32,
}

impl Stream {
    /// The stream of `key`.
    pub fn new(key: &[u64]) -> Self {
        Stream { base: hash(key), next: 0 }
    }

    /// The next 32 uniform bits.
    pub fn bits(&mut self) -> u32 {
        let x = mix(self.base, self.next);
        self.next = self.next.wrapping_add(1);
        x
    }

    /// A uniform f32 in [0, 1) with 24 bits, exactly representable.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// A uniform integer in 0..n, n > 0 (Lemire's multiplication with rejection, which has no bias).
    pub fn below(&mut self, n: u32) -> u32 {
        let threshold = n.wrapping_neg() % n;
        loop {
            let m = u64::from(self.bits()) * u64::from(n);
            if m as u32 >= threshold {
                return (m >> 32) as u32;
            }
        }
    }
}

/// The permutation of 0..n for `key` (Fisher-Yates from the top).
pub fn permutation(n: usize, key: &[u64]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..n as u32).collect();
    let mut stream = Stream::new(key);
    for i in (1..n).rev() {
        order.swap(i, stream.below(i as u32 + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_is_complete_and_keyed() {
        for n in [0, 1, 2, 17, 1000] {
            let mut p = permutation(n, &[7, 3]);
            assert_eq!(p, permutation(n, &[7, 3]));
            p.sort_unstable();
            assert_eq!(p, (0..n as u32).collect::<Vec<_>>());
        }
        assert_ne!(permutation(100, &[7, 3]), permutation(100, &[7, 4]));
    }

    /// The key of a dropout mask from docs/explain/protocol.md: seed, step, row, module, token; then channels.
    #[test]
    fn dropout_key_gives_the_bits_of_the_protocol() {
        let base = hash(&[7, 1, 42, 3, 0]);
        assert_eq!(base, 0x3cdc_d1d1);
        assert_eq!([0, 1, 2].map(|channel| mix(base, channel)), [0x2dbd_e9b6, 0xc7e3_f053, 0x4cbc_f2eb]);
    }

    #[test]
    fn random_numbers_are_uniform_in_every_bit() {
        let n = 1 << 16;
        let mut ones = [0u32; 32];
        for i in 0..n {
            let x = hash(&[1, 2, i]);
            ones.iter_mut().enumerate().for_each(|(b, c)| *c += x >> b & 1);
        }
        // 6 standard deviations of a fair coin
        let bound = 6.0 * (n as f64).sqrt() / 2.0;
        assert!(ones.iter().all(|&c| (f64::from(c) - n as f64 / 2.0).abs() < bound), "{ones:?}");
    }
}
