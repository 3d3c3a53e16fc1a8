//! Assembles every kernel with ptxas, for every architecture on which it may run, and with the versions of ptxas that
//! drivers contain. No GPU is needed: ptxas is in the wheels nvidia-cuda-nvcc-cu12 and nvidia-cuda-nvcc, cuobjdump and
//! nvdisasm in triton's (tests/run.sh installs all). FINETUNE_CUDA_TOOLS names their folder; without them these tests
//! print `skipped`, unless FINETUNE_REQUIRE_PTXAS is set.

use crate::files::{self, File};
use crate::machine_code::{self, Entry};
use crate::mutations::of_entry;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Architectures from Volta to Blackwell.
const ARCHITECTURES: [&str; 9] = ["70", "75", "80", "86", "89", "90", "100", "120", "121"];

/// Architectures for the other versions, one of each kind of machine code; 12.8 is the first version that knows 12.0.
const OF_VERSIONS: [&str; 3] = ["80", "90", "120"];
/// Devices of other capabilities do not run this file. The disassembler does not support 7.0.
const OF_TURING: (&str, &str) = ("product_sm70.ptx", "75");

fn tool(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("FINETUNE_CUDA_TOOLS").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda-tools"));
    let found = Some(folder.join(name)).filter(|p| p.exists());
    if found.is_none() {
        assert!(std::env::var_os("FINETUNE_REQUIRE_PTXAS").is_none(), "{name} must be there, and is not");
        println!("skipped: no {name}");
    }
    found
}

/// Assembles; returns the lines of `-v`.
fn assemble(ptxas: &Path, source: &Path, arch: &str, out: &Path) -> String {
    let arch = format!("-arch=sm_{arch}");
    let run = Command::new(ptxas).args(["-v", &arch, "-o"]).arg(out).arg(source).output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{} for {arch}:\n{said}", source.display());
    said
}

/// Whether it assembles.
fn assembles(ptxas: &Path, source: &Path, arch: &str, out: &Path) -> bool {
    let arch = format!("-arch=sm_{arch}");
    Command::new(ptxas).arg(&arch).arg("-o").arg(out).arg(source).output().unwrap().status.success()
}

/// The number before a word in a line of `-v`.
fn before(line: &str, word: &str) -> usize {
    let words: Vec<&str> = line.split([' ', ',']).filter(|w| !w.is_empty()).collect();
    let at = words.windows(2).position(|w| w[1].starts_with(word) && w[0].parse::<usize>().is_ok());
    at.map_or(0, |i| words[i].parse().unwrap())
}

/// The violations of the budget in a report of ptxas.
fn over_budget(report: &str, file: &File) -> Vec<String> {
    let mut found = Vec::new();
    let mut entry = "";
    for line in report.lines() {
        entry = line.split('\'').nth(1).filter(|_| line.contains("Compiling entry")).unwrap_or(entry);
        if line.contains("spill stores") && !line.contains("0 bytes spill stores, 0 bytes spill loads") {
            found.push(format!("{} {entry}: {}", file.name, line.trim()));
        }
        // ptxas inserts a wait after each wgmma if its sums are moved while they are pending.
        if line.contains("are serialized") {
            found.push(format!("{} {entry}: {}", file.name, line.trim()));
        }
        // Warpgroups that divide the registers would wait for ever if the kernel had fewer.
        let (used, divides) = (before(line, "registers"), file.text.contains("setmaxnreg"));
        if line.contains("Used ") && (used > file.registers || divides && used != file.registers) {
            found.push(format!("{} {entry}: {used} registers", file.name));
        }
        let shared = smem(line);
        if shared > file.shared {
            found.push(format!("{} {entry}: {shared} bytes of shared memory", file.name));
        }
    }
    found
}

/// `8704 bytes smem`
fn smem(line: &str) -> usize {
    let words: Vec<&str> = line.split([' ', ',']).filter(|w| !w.is_empty()).collect();
    words.windows(3).find(|w| w[1] == "bytes" && w[2] == "smem").map_or(0, |w| w[0].parse().unwrap())
}

/// Files whose threads load the next step before they multiply, and store tiles of outputs.
const AHEAD: [&str; 6] = [
    "matmul.ptx",
    "linear.ptx",
    "linear_grad.ptx",
    "product_sm70.ptx",
    "product_sm80.ptx",
    "lora_linear_sm80.ptx",
];
/// The other files that store tiles of outputs.
const OTHERS: [&str; 9] = [
    "product_sm90a.ptx",
    "lora_linear_sm90a.ptx",
    "attention.ptx",
    "attention_grad.ptx",
    "attention_sm80.ptx",
    "attention_grad_sm80.ptx",
    "attention_grad_wide_sm80.ptx",
    "attention_sm90a.ptx",
    "attention_grad_sm90a.ptx",
];

/// An entry that only prepares operands: no products and no tiles.
fn prepares(entry: &str) -> bool {
    ["narrow", "narrow_whole", "attention_grad_delta", "attention_grad_sm80_delta"].contains(&entry)
}

/// The slow patterns in an entry's machine code.
fn patterns(file: &File, entry: &Entry) -> Vec<String> {
    let ahead = AHEAD.contains(&&*file.name);
    let mut found = Vec::from_iter(machine_code::serialised(entry));
    if (ahead || OTHERS.contains(&&*file.name)) && !prepares(&entry.name) {
        let (from, to) = of_entry(&file.text, &entry.name);
        found
            .extend(machine_code::epilogue_faults(entry, file.text[from..to].matches("st.global.v").count()));
        // Known and left: of a in f32 some loads are rounded before the first product (docs/journal/2026-11-ptxas.md).
        if ahead && !(entry.name.starts_with("product_sm70") && entry.name.ends_with("f32")) {
            found.extend(machine_code::loop_faults(entry));
        }
    }
    found
}

/// The version of the ptxas that is in the folder itself.
const OWN: &str = "12.9.86";

/// Assembles every file with one version of ptxas, for `archs` of those that this version knows and the file runs on.
fn check_version(version: &str, archs: &[&str]) {
    let name = if version == OWN { "ptxas".into() } else { format!("{version}/ptxas") };
    let (Some(ptxas), Some(nvdisasm)) = (tool(&name), tool("nvdisasm")) else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.cubin");
    let help = Command::new(&ptxas).arg("--help").output().unwrap();
    let names = String::from_utf8_lossy(&help.stdout);
    let knows = |arch: &str| names.contains(&format!("sm_{arch}"));
    assert!(help.status.success() && knows("90a"), "ptxas {version} --help: {}, says {names:?}", help.status);
    let number = |arch: &str| arch.trim_end_matches('a').parse::<u32>().unwrap();
    let mut found = Vec::new();
    for file in files::all() {
        let exact = file.target.ends_with('a');
        let turing = file.name == OF_TURING.0;
        let archs = if turing && version != OWN { &[OF_TURING.1] } else { archs };
        let of_file = archs.iter().copied().filter(|a| !exact && number(a) >= number(&file.target));
        let of_file: Vec<&str> = of_file.chain(exact.then_some(&*file.target)).filter(|a| knows(a)).collect();
        assert!(!of_file.is_empty(), "{}: target {}", file.name, file.target);
        for arch in of_file {
            let report = assemble(&ptxas, &files::path(&file.name), arch, &out);
            assert!(report.contains("Compiling entry"), "{}: ptxas said nothing of an entry", file.name);
            let mut faults = over_budget(&report, &file);
            let shows = if turing { arch == OF_TURING.1 } else { exact || arch == "80" };
            if shows && (AHEAD.contains(&&*file.name) || OTHERS.contains(&&*file.name)) {
                let dump = Command::new(&nvdisasm).arg("-c").arg(&out).output().unwrap();
                let entries = machine_code::entries(&String::from_utf8_lossy(&dump.stdout));
                assert!(!entries.is_empty(), "{}: nvdisasm said nothing", file.name);
                faults.extend(entries.iter().flat_map(|entry| patterns(&file, entry)));
            }
            found.extend(faults.into_iter().map(|f| format!("ptxas {version} sm_{arch} {f}")));
        }
    }
    assert!(found.is_empty(), "over budget, or slow:\n{}", found.join("\n"));
}

#[test]
fn every_kernel_assembles_everywhere_within_its_budget() {
    check_version(OWN, &ARCHITECTURES);
}

/// In drivers R525; R535 has 12.2.
#[test]
fn ptxas_12_0_neither_spills_nor_serialises() {
    check_version("12.0.140", &OF_VERSIONS);
}

/// In drivers R550.
#[test]
fn ptxas_12_4_neither_spills_nor_serialises() {
    check_version("12.4.131", &OF_VERSIONS);
}

/// In drivers R570.
#[test]
fn ptxas_12_8_neither_spills_nor_serialises() {
    check_version("12.8.93", &OF_VERSIONS);
}

/// In drivers R580.
#[test]
fn ptxas_13_0_neither_spills_nor_serialises() {
    check_version("13.0.88", &OF_VERSIONS);
}

#[test]
fn ptxas_13_5_neither_spills_nor_serialises() {
    check_version("13.5.37", &OF_VERSIONS);
}

#[test]
fn kernels_of_an_exact_target_run_on_no_other() {
    let Some(ptxas) = tool("ptxas") else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.cubin");
    for file in files::all().into_iter().filter(|f| f.target.ends_with('a')) {
        let refused = |arch: &&str| !assembles(&ptxas, &files::path(&file.name), arch, &out);
        assert!(["90", "100", "100a", "120"].iter().all(refused), "{} runs on its target alone", file.name);
    }
}

#[test]
fn tensor_cores_are_used_where_promised() {
    let (Some(ptxas), Some(cuobjdump)) = (tool("ptxas"), tool("cuobjdump")) else { return };
    let folder = tempfile::tempdir().unwrap();
    for file in files::all().iter().filter(|f| !f.promises.is_empty()) {
        let out = folder.path().join("out.cubin");
        // The disassembler does not support 7.0.
        let arch = if file.target == "70" { "75" } else { &file.target };
        assemble(&ptxas, &files::path(&file.name), arch, &out);
        let dump = Command::new(&cuobjdump).arg("-sass").arg(&out).output().unwrap();
        let text = String::from_utf8_lossy(&dump.stdout).into_owned();
        let entries: Vec<&str> = text.split("Function : ").skip(1).collect();
        assert!(!entries.is_empty(), "{}: cuobjdump said nothing", file.name);
        // An entry that only prepares has no products.
        let plain =
            |e: &&&str| ["narrow", "attention_grad_sm80_delta"].iter().all(|name| !e.starts_with(name));
        for entry in entries.iter().filter(plain) {
            let name = entry.lines().next().unwrap();
            for word in &file.promises {
                assert!(entry.contains(word.as_str()), "{} {name}: no {word} in its machine code", file.name);
            }
        }
    }
}

#[test]
fn report_over_budget_is_rejected() {
    let file = File {
        name: "x.ptx".into(),
        text: String::new(),
        target: "70".into(),
        registers: 40,
        shared: 1000,
        promises: vec![],
    };
    let report = |spill: &str, used: &str| {
        format!(
            "ptxas info : Compiling entry function 'f' for 'sm_70'\n    0 bytes stack frame, {spill}\n\
             ptxas info : Used {used}, 380 bytes cmem[0]\n"
        )
    };
    let fine = "0 bytes spill stores, 0 bytes spill loads";
    let cases = [
        (report(fine, "40 registers, used 1 barriers, 1000 bytes smem"), 0),
        (report(fine, "41 registers, used 1 barriers, 1000 bytes smem"), 1),
        (report(fine, "40 registers, used 1 barriers, 1001 bytes smem"), 1),
        (report("8 bytes spill stores, 8 bytes spill loads", "40 registers"), 1),
        (
            report(fine, "40 registers")
                + "Potential Performance Loss: wgmma.mma_async instructions are serialized",
            1,
        ),
    ];
    for (text, want) in cases {
        assert_eq!(over_budget(&text, &file).len(), want, "{text}");
    }
    let divides = File { text: "setmaxnreg.inc".into(), ..file };
    for (used, want) in [("40 registers", 0), ("41 registers", 1), ("39 registers", 1)] {
        assert_eq!(over_budget(&report(fine, used), &divides).len(), want, "{used}");
    }
}
