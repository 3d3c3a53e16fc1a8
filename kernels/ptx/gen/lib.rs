//! The generator of the kernels for products, attention and blocks. Its output is in kernels/ptx/generated;
//! `cargo run -p ptx-gen` writes it, `cargo run -p ptx-gen -- --check` compares.
//!
//! The generator has no dependencies. Its manifest is in a separate folder, because cargo omits a folder with a
//! manifest from the package `finetune-kernels`, which must contain these sources.

#![warn(clippy::unwrap_used)]

mod attention;
mod attention_grad;
mod attention_grad_sm80;
mod attention_grad_sm90a;
mod attention_sm80;
mod attention_sm90a;
mod attention_tile;
mod edge;
mod epilogue;
mod epilogue_sm90a;
mod flash;
mod flash_sm90a;
mod flow;
mod grad_scores_sm90a;
mod grad_sums_sm90a;
mod operand;
mod order;
mod product;
mod product_sm70;
mod product_sm90a;
mod registers;
mod skinny;
mod statement;
mod tensor;
mod text;
mod widen;
mod window;

pub use order::{Mark, Order};
use std::path::Path;
use text::{Text, Uses};

/// A generated file.
#[derive(Debug)]
pub struct File {
    /// Its name in kernels/ptx/generated.
    pub name: &'static str,
    /// PTX.
    pub text: String,
    /// The statements that order others, in the order of the text.
    pub marks: Vec<Mark>,
}

/// All files of kernels/ptx/generated, by name.
pub fn files() -> Vec<File> {
    let mut out = product::files();
    out.extend(attention::files());
    out.extend(tensor::files());
    out.extend(product_sm70::files());
    out.extend(skinny::files());
    out.extend(product_sm90a::files());
    out.extend(attention_grad::files());
    out.extend(attention_sm80::files());
    out.extend(attention_sm90a::files());
    out.extend(attention_grad_sm80::files());
    out.extend(attention_grad_sm90a::files());
    out.extend(widen::files());
    out.sort_by_key(|f| f.name);
    out
}

/// The differences between the generator's files and those of a folder, one line each.
pub fn differences(folder: &Path) -> Vec<String> {
    let files = files();
    let differs =
        |f: &&File| !std::fs::read_to_string(folder.join(f.name)).is_ok_and(|there| there == f.text);
    let written =
        files.iter().filter(differs).map(|f| format!("{} is not what the generator writes", f.name));
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    let strange = names.filter(|name| files.iter().all(|f| f.name != name));
    let strange = strange.map(|name| format!("{name} is written by no generator"));
    written.chain(strange).collect()
}
