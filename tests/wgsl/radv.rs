//! What the compiler of Mesa's driver for AMD cards makes of the kernels, without a card (tests/wgsl/compiler.rs):
//! registers, spills and workgroup memory within budgets, and the instructions of inner loops.

use crate::budgets::{BUDGETS, CHIP, INNER, MESA};
use std::process::Command;

/// A compiled kernel.
#[derive(Debug, Clone, PartialEq)]
struct Built {
    name: String,
    /// Vector registers of a lane.
    registers: u32,
    /// Spilled registers, vector and scalar.
    spilled: u32,
    /// Bytes of workgroup memory.
    memory: u32,
    /// Multiply-adds with one rounding in the machine code.
    fused: usize,
    /// Instructions, and multiply-adds among them, of the basic blocks with at least 8, a third of the instructions: the
    /// inner loops.
    loops: Vec<(usize, usize)>,
}

/// The driver's file; `None` if it is not installed.
fn driver() -> Option<String> {
    let found = std::fs::read_dir("/usr/share/vulkan/icd.d").into_iter().flatten().flatten();
    let mut paths = found.map(|entry| entry.path().display().to_string());
    let path = paths.find(|path| path.contains("/radeon_icd") && path.ends_with(".json"));
    if path.is_none() {
        assert!(std::env::var_os("FINETUNE_NEED_RADV").is_none(), "no Vulkan driver RADV");
        println!("skipped: no Vulkan driver RADV");
    }
    path
}

/// The kernels with a word of `texts` in their name, compiled for [`CHIP`]; all if there is no word. `None`, with a line, if
/// there is no driver or it is not the measured one. `debug` is what the driver writes, `variable` one of those of
/// tests/wgsl/compiler.rs.
fn built(texts: &[&str], (debug, variable): (&str, Option<(&str, &str)>)) -> Option<Vec<Built>> {
    let driver = driver()?;
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "compiler::texts_compile_for_a_named_chip", "--nocapture"]);
    child.env("RADV_FORCE_FAMILY", CHIP).env("RADV_DEBUG", debug).env("RADV_TEXTS", texts.join("\n"));
    child.env("VK_DRIVER_FILES", &driver).env("VK_ICD_FILENAMES", &driver);
    child.envs(variable);
    let done = child.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    let found = said.lines().find(|line| line.starts_with("chip ")).unwrap_or_default();
    if !found.ends_with(MESA) {
        println!("skipped: the budgets are those of {MESA}, not of {found}");
        return None;
    }
    assert!(done.status.success(), "{said}");
    let mut all: Vec<&str> = said.split("\nkernel ").skip(1).collect();
    assert_eq!(all.pop().map(str::trim_end), Some("end"), "{said}");
    Some(all.into_iter().map(read).collect())
}

/// Reads what the driver wrote of a kernel, behind its name.
fn read(said: &str) -> Built {
    let name = said.lines().next().unwrap_or_default().trim().to_string();
    let number = |key: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
        line.and_then(|text| text.parse::<u32>().ok()).unwrap_or_else(|| panic!("{name}: no {key}: {said}"))
    };
    let spilled = number("Spilled VGPRs") + number("Spilled SGPRs");
    let (registers, memory) = (number("VGPRs"), number("LDS size"));
    let listing = said.split_once("\ndisasm:").map_or("", |(_, listing)| listing);
    let blocks: Vec<(usize, usize)> = listing.split("\nBB").map(counted).collect();
    let fused = blocks.iter().map(|(_, fused)| fused).sum();
    let loops = blocks.into_iter().filter(|(all, fused)| *fused >= 8 && fused * 3 >= *all).collect();
    Built { registers, spilled, memory, fused, loops, name }
}

/// The instructions of a block of a listing, and the multiply-adds among them.
fn counted(block: &str) -> (usize, usize) {
    let opcodes = block.lines().filter_map(|line| line.strip_prefix('\t')?.split_whitespace().next());
    let is_fused = |code: &str| {
        ["v_fma", "v_pk_fma", "v_dual_fma", "v_mad_f", "v_mac_f", "v_wmma"]
            .iter()
            .any(|p| code.starts_with(p))
    };
    opcodes.fold((0, 0), |(all, fused), code| (all + 1, fused + usize::from(is_fused(code))))
}

/// Whether a row of a table is about this kernel: its stem, and each of its constants.
fn is_of(name: &str, row: &str) -> bool {
    row.split(' ').all(|word| name.split(' ').any(|part| part == word))
}

#[test]
fn kernels_stay_within_registers_and_memory_of_an_amd_card() {
    let Some(all) = built(&[], ("shaderstats,nocache", None)) else { return };
    assert!(all.len() > 500, "{} kernels", all.len());
    let mut bad = Vec::new();
    for kernel in &all {
        let Some(&(row, registers, memory)) = BUDGETS.iter().find(|(row, ..)| is_of(&kernel.name, row))
        else {
            bad.push(format!("{}: no budget", kernel.name));
            continue;
        };
        if kernel.spilled > 0 || kernel.registers > registers || kernel.memory > memory {
            bad.push(format!("{kernel:?}: budget `{row}`: no spills, {registers} registers, {memory} bytes"));
        }
    }
    assert!(bad.is_empty(), "{} of {}:\n{}", bad.len(), all.len(), bad.join("\n"));
    let unused = BUDGETS.iter().filter(|(row, ..)| !all.iter().any(|k| is_of(&k.name, row)));
    assert_eq!(unused.map(|(row, ..)| *row).collect::<Vec<_>>(), [""; 0], "budgets of nothing");
}

/// The number of instructions for a multiply-add in the worst inner loop, and in that with run-time checks.
#[test]
fn inner_loops_have_no_run_time_checks() {
    let texts: Vec<&str> = INNER.iter().map(|(name, _)| *name).collect();
    let debug = "shaders,shaderstats,nocache";
    let Some(without) = built(&texts, (debug, None)) else { return };
    let with = built(&texts, (debug, Some(("RADV_CHECKS", "everywhere")))).unwrap();
    assert_eq!(without.len(), texts.len(), "{without:?}");
    let worst = |kernel: &Built| {
        kernel.loops.iter().map(|(all, adds)| *all as f64 / *adds as f64).fold(0.0, f64::max)
    };
    for (without, with) in without.iter().zip(&with) {
        let (most, before) = (INNER.iter().find(|(name, _)| *name == without.name).unwrap().1, worst(with));
        let now = worst(without);
        println!("{}: {now:.3} instructions for a multiply-add, {before:.3} with checks", without.name);
        assert!(
            now > 1.0 && now <= most && now < before,
            "{}: {now}, budget {most}, with checks {before}",
            with.name
        );
    }
}

/// Blocks whose numbers are a product and a minimum: Q4_1, Q5_1, Q2_K, Q4_K, Q5_K. The product is exact, of 11 bits by at most
/// 6 by at most 5, so that a driver that contracts both changes no bit.
const WITH_MINIMUM: [&str; 5] = ["ENCODING=5", "ENCODING=7", "ENCODING=8", "ENCODING=10", "ENCODING=11"];

/// Kernels with products that the portable class runs too, under their own names.
const OF_BOTH_KINDS: [&str; 4] = ["head_subtract", "shrink_rows", "scale_rows", "embed"];

/// The driver makes no multiply-add of a product and a sum that a text of the portable class keeps apart: if nothing may be
/// contracted, there are as many. Of the tiles of a product the largest
/// is compiled.
#[test]
fn portable_kernels_are_not_contracted() {
    let own = |name: &&str| {
        name.starts_with("portable_")
            && (!name.contains(" BM=") || name.contains(" LEFT_ACROSS=0 ") && name.contains(" BM=64 BN=64"))
            || OF_BOTH_KINDS.iter().any(|stem| is_of(name, stem))
    };
    let entries = finetune::backend::wgpu::catalogue().0;
    let names: Vec<&str> = entries.iter().map(|entry| &*entry.name).filter(own).collect();
    let built = |source| built(&names, ("shaders,shaderstats,nocache", Some(("RADV_SOURCE", source))));
    let Some(plain) = built("plain") else { return };
    let exact = built("exact").unwrap();
    assert_eq!(plain.len(), exact.len());
    let mut seen = 0;
    for (plain, exact) in plain.iter().zip(&exact) {
        let counts = format!("{}: {} multiply-adds, exact {}", plain.name, plain.fused, exact.fused);
        if WITH_MINIMUM.iter().any(|row| is_of(&plain.name, row)) {
            assert!(plain.fused >= exact.fused, "{counts}");
            seen += usize::from(plain.fused > exact.fused);
        } else {
            assert_eq!(plain.fused, exact.fused, "{counts}");
        }
    }
    assert!(plain.len() > 80 && seen >= 10, "{} kernels, {seen} of them contracted", plain.len());
}

#[test]
fn numbers_of_the_driver_are_read() {
    let said = "flash SIZE=64 \nBB0:\n\tv_fma_f32 v0\ndisasm:\nBB0:\n\ts_mov_b32 s0\nBB1:\n\tv_fma_f32 v0, v1 ; c8\n\tv_fmac_f32 v0\n\tv_fmac_f32_e32 v0\n\tv_fma_f32 v1\n\tv_pk_fma_f16 v0\n\tv_fma_f32 v0\n\tv_fma_f32 v0\n\tv_fma_f32 v0\n\tds_read_b128 v1\n\ts_endpgm\n*** SHADER STATS ***\nVGPRs: 88\nSpilled SGPRs: 1\nSpilled VGPRs: 2\nLDS size: 12288\n";
    let want = Built {
        name: "flash SIZE=64".into(),
        registers: 88,
        spilled: 3,
        memory: 12_288,
        fused: 8,
        loops: vec![(10, 8)],
    };
    assert_eq!(read(said), want);
    assert!(
        is_of("flash SIZE=64 PART=0", "flash SIZE=64") && !is_of("flash_grad_q SIZE=64", "flash SIZE=64")
    );
}
