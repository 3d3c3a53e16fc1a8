//! The generator of the kernels whose text follows from a tile: products, attention, blocks. Its output lies in
//! kernels/ptx/generated; `cargo run -p ptx-gen` writes it, `cargo run -p ptx-gen -- --check` compares.
//!
//! It has no dependencies. The manifest lies in a folder of its own, because cargo leaves a folder that has one out of the
//! package of `finetune`, which carries these sources.

mod attention;
mod attention_grad;
mod attention_grad_sm80;
mod attention_grad_sm90a;
mod attention_sm80;
mod attention_sm90a;
mod epilogue;
mod epilogue_sm90a;
mod flash;
mod flash_sm90a;
mod flow;
mod grad_scores_sm90a;
mod grad_sums_sm90a;
mod product;
mod product_sm70;
mod product_sm90a;
mod registers;
mod statement;
mod tensor;
mod text;
mod widen;

use std::path::Path;
use text::{Text, Uses};

/// All files of kernels/ptx/generated: name and text, by name.
pub fn files() -> Vec<(&'static str, String)> {
    let mut out = product::files();
    out.extend(attention::files());
    out.extend(tensor::files());
    out.extend(product_sm70::files());
    out.extend(product_sm90a::files());
    out.extend(attention_grad::files());
    out.extend(attention_sm80::files());
    out.extend(attention_sm90a::files());
    out.extend(attention_grad_sm80::files());
    out.extend(attention_grad_sm90a::files());
    out.extend(widen::files());
    out.sort_by_key(|f| f.0);
    out
}

/// What differs between the generator's files and those of a folder, a line each.
pub fn differences(folder: &Path) -> Vec<String> {
    let files = files();
    let differs = |(name, text): &&(&str, String)| {
        !std::fs::read_to_string(folder.join(name)).is_ok_and(|there| there == *text)
    };
    let written =
        files.iter().filter(differs).map(|(name, _)| format!("{name} is not what the generator writes"));
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    let strange = names.filter(|name| files.iter().all(|f| f.0 != name));
    let strange = strange.map(|name| format!("{name} is written by no generator"));
    written.chain(strange).collect()
}
