//! Instruction set variants. A kernel is written once, over [`Lanes`], and compiled for each variant by
//! [`kernel!`]; which one runs is found out when it starts. The variant is part of the numeric class: with
//! fused multiply-add (AVX2, AVX-512, NEON) results differ from those without.
//!
//! Kernel bodies do not reorder sums by themselves, and neither does LLVM: wherever a sum is to be
//! vectorised, its body spells the sixteen partial sums.
//!
//! `FINETUNE_CPU` names the best variant that may be used ("avx512", "avx2", "generic"; on ARM "neon",
//! "generic"), to try here what another processor would run.

use std::sync::OnceLock;

/// How a multiply-add rounds.
pub trait Lanes {
    /// a * b + c
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Once: the hardware's fused multiply-add.
pub struct Once;
/// Twice, as every machine can.
pub struct Twice;

impl Lanes for Once {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}
impl Lanes for Twice {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// An instruction set variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2, FMA and F16C, which every processor with the first two has.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Avx2,
    /// NEON, which every 64-bit ARM has, with its fused multiply-add.
    Neon,
    /// What Rust compiles for by default.
    Generic,
}

/// The variable of the environment that names the best variant to use.
const LIMIT: &str = "FINETUNE_CPU";

/// The best variant that this processor has and [`LIMIT`] allows.
pub fn best() -> Isa {
    static BEST: OnceLock<Isa> = OnceLock::new();
    *BEST.get_or_init(|| limited(Isa::detect(), &limit()))
}

/// What [`LIMIT`] says; nothing where it is not there.
fn limit() -> String {
    std::env::var_os(LIMIT).map(|limit| limit.to_string_lossy().into_owned()).unwrap_or_default()
}

/// What is wrong with `FINETUNE_CPU`, if it names no variant of this architecture.
pub fn refused_limit() -> Option<String> {
    let name = limit();
    if name.is_empty() || Isa::NAMED.iter().any(|(known, _)| *known == name) {
        return None;
    }
    let known: Vec<_> = Isa::NAMED.iter().map(|(known, _)| *known).collect();
    Some(format!("{LIMIT}={name}: no instructions of that name: one of {}, or unset it", known.join(", ")))
}

/// What is left of `found`: nothing that it does not have.
fn limited(found: Isa, limit: &str) -> Isa {
    let named = Isa::NAMED.iter().find(|(known, _)| *known == limit).map(|&(_, isa)| isa);
    match (found, named) {
        (_, Some(Isa::Generic)) => Isa::Generic,
        (Isa::Avx512, Some(Isa::Avx2)) => Isa::Avx2,
        _ => found,
    }
}

impl Isa {
    /// What [`LIMIT`] may be.
    const NAMED: &[(&str, Isa)] = &[
        #[cfg(target_arch = "x86_64")]
        ("avx512", Isa::Avx512),
        #[cfg(target_arch = "x86_64")]
        ("avx2", Isa::Avx2),
        #[cfg(target_arch = "aarch64")]
        ("neon", Isa::Neon),
        ("generic", Isa::Generic),
    ];

    /// The best that this processor has.
    fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let fma = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if fma
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Isa::Avx512;
            }
            if fma {
                return Isa::Avx2;
            }
        }
        if cfg!(target_arch = "aarch64") { Isa::Neon } else { Isa::Generic }
    }

    /// Its part of the class string.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Generic => std::env::consts::ARCH,
        }
    }
}

/// What the instruction for dot products of bf16 is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub enum Bf16 {
    /// There is none.
    None,
    /// Half the f32 rate: 0.44 instructions a cycle measured on Emerald Rapids, where AMX is meant for the work.
    Slow,
    /// Twice the f32 rate: 226 against 113 GFLOP/s measured on a core of Zen 4.
    Fast,
}

/// Asks the processor. Its maker tells how fast it is: a measurement could answer otherwise the next time.
pub fn bf16() -> Bf16 {
    #[cfg(target_arch = "x86_64")]
    if best() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16") {
        let id = std::arch::x86_64::__cpuid(0);
        let name = [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat();
        return if name == b"AuthenticAMD" { Bf16::Fast } else { Bf16::Slow };
    }
    Bf16::None
}

/// Defines `fn name(isa, arguments)`, whose body is compiled once per variant with `L: Lanes`.
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$L:ident>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::backend::cpu::runtime::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$L: $crate::backend::cpu::runtime::isa::Lanes>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body::<$crate::backend::cpu::runtime::isa::Once>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body::<$crate::backend::cpu::runtime::isa::Once>($($arg),*)
                }
                use $crate::backend::cpu::runtime::isa::Isa;
                match isa {
                    // SAFETY: an Isa other than Generic comes out of `best`, or of a test that asked it
                    // first, so the processor has these instructions.
                    Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    Isa::Neon | Isa::Generic => {}
                }
            }
            // What Rust compiles for has NEON there.
            #[cfg(target_arch = "aarch64")]
            if isa == $crate::backend::cpu::runtime::isa::Isa::Neon {
                return body::<$crate::backend::cpu::runtime::isa::Once>($($arg),*);
            }
            let _ = isa;
            body::<$crate::backend::cpu::runtime::isa::Twice>($($arg),*)
        }
    };
}
pub(crate) use kernel;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_only_removes_instruction_sets() {
        for (found, limit, left) in [
            (Isa::Avx512, "", Isa::Avx512),
            (Isa::Avx512, "none of them", Isa::Avx512),
            (Isa::Generic, "generic", Isa::Generic),
            (Isa::Neon, "generic", Isa::Generic),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, "avx512", Isa::Avx512),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, "avx2", Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, "avx512", Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            (Isa::Generic, "avx2", Isa::Generic),
        ] {
            assert_eq!(limited(found, limit), left, "{found:?} {limit}");
        }
    }
}
