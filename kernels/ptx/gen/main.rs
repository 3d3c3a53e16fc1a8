//! `ptx-gen [--check] [FOLDER]`: writes the generated kernels, or compares them, in kernels/ptx/generated unless a folder
//! is given.

#![warn(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: ptx-gen [--check] [FOLDER]    FOLDER: kernels/ptx/generated unless given";

fn main() -> ExitCode {
    let (flags, folders): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|a| a.starts_with('-'));
    let check = flags == ["--check"];
    if !(check || flags.is_empty()) || folders.len() > 1 {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    }
    let folder = PathBuf::from(folders.first().map_or("kernels/ptx/generated", |f| f));
    if !folder.is_dir() {
        eprintln!(
            "ptx-gen: no folder {}: run it in the repository's root, or name the folder",
            folder.display()
        );
        return ExitCode::from(2);
    }
    if !check {
        for file in ptx_gen::files() {
            if let Err(e) = std::fs::write(folder.join(file.name), file.text) {
                eprintln!("ptx-gen: {}: {e}", file.name);
                return ExitCode::FAILURE;
            }
        }
    }
    let differences = ptx_gen::differences(&folder);
    differences.iter().for_each(|d| eprintln!("ptx-gen: {d}"));
    if differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
