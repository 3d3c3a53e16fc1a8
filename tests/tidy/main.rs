//! Rules for the repository: floors, sizes, absences, and names that must exist.
//!
//! Every checker is a pure function from text to findings, and has a test in which it fails. Exceptions from a rule are
//! in a list here, each with its reason; an entry that is no longer needed is a finding too, so the lists only shrink.

mod absences;
mod banned_words;
mod circles;
mod contracts;
mod floors;
mod links;
mod shape;
mod source;
mod variables;
mod verbs;

use source::Tree;

/// Banned words (`file:word`) that may stay.
const BANNED_WORDS: &[(&str, &str)] = &[(concat!("benches/ops.rs:tw", "in"), "an argument of the benchmark")];
/// Files that may be longer than 600 lines.
const LONG_FILES: &[(&str, &str)] = &[];
/// Functions (`file:name`) that may be longer than 60 lines.
const LONG_FUNCTIONS: &[(&str, &str)] =
    &[("tests/data_load.rs:bad_input_gets_one_line_with_file_and_line", "a table of cases")];
/// Functions (`file:name`) that may take more than 7 values besides self; the members of a tuple count.
const WIDE_FUNCTIONS: &[(&str, &str)] = &[
    ("kernels/ptx/gen/epilogue.rs:fill", "names of registers and sizes of a tile"),
    ("kernels/ptx/gen/epilogue_sm90a.rs:fill", "names of registers and sizes of a tile"),
    ("kernels/src/backend/cpu/attention/gradient.rs:square", "three gradients and two blocks of products"),
    ("kernels/src/backend/cpu/gemm/tiled.rs:tiles", "a tile's place and size with its factors"),
    ("kernels/src/backend/cpu/ops/head.rs:put_together", "four numbers that place a row"),
    ("kernels/src/backend/cpu/ops/norm.rs:grad", "slices of the op's operands"),
    ("kernels/src/backend/cuda/launches.rs:product", "operands of a product, and the file of its kernel"),
    ("kernels/src/backend/cuda/sm90a.rs:product_sm90a", "operands of a product"),
    ("kernels/src/backend/wgpu/products.rs:fast", "three addresses of a product's window"),
    ("src/forecast/team.rs:here", "a model is three references"),
    ("tests/wgpu_variants.rs:formula", "strides and sizes of a product"),
];
/// Functions of `src` (`file:name`) that may take a bool. Functions of tests may.
const BOOL_ARGUMENTS: &[(&str, &str)] = &[
    ("src/config/yaml.rs:visit_bool", "serde's own signature"),
    ("src/data/samples.rs:push_bit", "the bit is what is stored"),
    ("src/format/hub/mod.rs:error", "a field of the error, under its own name"),
    ("src/format/gguf/pretokenizer.rs:bytes", "a field of tokenizer.json, under its own name"),
];
/// The only files with `unsafe` in them.
const UNSAFE_FILES: &[(&str, &str)] = &[
    ("kernels/src/backend/cpu/attention/block.rs", "threads write disjoint heads of one output"),
    ("kernels/src/backend/cpu/attention/block_floats.rs", "threads write disjoint heads of one output"),
    ("kernels/src/backend/cpu/attention/block_pairs.rs", "calls of functions with target features"),
    ("kernels/src/backend/cpu/attention/forward.rs", "threads write disjoint heads of one output"),
    ("kernels/src/backend/cpu/attention/gradient.rs", "threads write disjoint heads of one output"),
    ("kernels/src/backend/cpu/gemm/avx512.rs", "vector loads and stores through pointers"),
    ("kernels/src/backend/cpu/gemm/avx512_bf16.rs", "vector loads and stores through pointers"),
    ("kernels/src/backend/cpu/gemm/gemv.rs", "threads write disjoint outputs"),
    ("kernels/src/backend/cpu/gemm/left_operand.rs", "a vector instruction behind detection"),
    ("kernels/src/backend/cpu/gemm/mod.rs", "the signatures of avx512_bf16.rs where there is no AVX-512"),
    ("kernels/src/backend/cpu/gemm/pair_tiles.rs", "vector instructions behind detection"),
    ("kernels/src/backend/cpu/gemm/product.rs", "threads write disjoint tiles of one output"),
    ("kernels/src/backend/cpu/gemm/product_plain.rs", "threads write disjoint rows of one output"),
    ("kernels/src/backend/cpu/gemm/product_tiles.rs", "threads write disjoint tiles of one output"),
    ("kernels/src/backend/cpu/gemm/tile.rs", "calls of functions with target features, behind detection"),
    ("kernels/src/backend/cpu/gemm/tile_avx2_neon.rs", "vector loads and stores through pointers"),
    ("kernels/src/backend/cpu/gemm/tiled.rs", "threads write disjoint tiles of one output"),
    (
        "kernels/src/backend/cpu/gemm/transpose.rs",
        "calls of functions with target features, behind detection",
    ),
    ("kernels/src/backend/cpu/gemm/transpose_avx512.rs", "vector loads and stores through pointers"),
    ("kernels/src/backend/cpu/operands.rs", "a prefetch, which is a hint"),
    ("kernels/src/backend/cpu/ops/adapter.rs", "threads write disjoint tiles of one output"),
    ("kernels/src/backend/cpu/ops/bf16_activations.rs", "a vector instruction behind detection"),
    ("kernels/src/backend/cpu/ops/delta_rule.rs", "threads write disjoint heads of one output"),
    ("kernels/src/backend/cpu/ops/peak.rs", "calls of a kernel that takes pointers"),
    ("kernels/src/backend/cpu/runtime/isa.rs", "calls of functions with target features, behind detection"),
    ("kernels/src/backend/cpu/runtime/threads.rs", "disjoint chunks of one slice for the tasks of a pool"),
    (
        "kernels/src/backend/cpu/weights/block_unpack.rs",
        "calls of functions with target features, behind detection",
    ),
    ("kernels/src/backend/cpu/weights/block_unpack_avx512.rs", "vector loads and stores through pointers"),
    ("kernels/src/backend/cpu/weights/decode.rs", "vector loads and stores through pointers"),
    ("kernels/src/backend/cpu/weights/simd.rs", "vector loads through pointers"),
    ("kernels/src/backend/cpu/weights/simd_avx2.rs", "vector intrinsics"),
    ("kernels/src/backend/cpu/weights/simd_avx512.rs", "vector intrinsics"),
    (
        "kernels/src/backend/cpu/weights/panel_unpack.rs",
        "calls of functions with target features, behind detection",
    ),
    ("kernels/src/backend/cpu/weights/panel_unpack_avx512.rs", "vector loads and stores through pointers"),
    ("kernels/src/backend/cpu/weights/panels.rs", "calls of functions with target features"),
    (
        "kernels/src/backend/wgpu/cache.rs",
        "drivers believe the bytes of their cache; they are checked before",
    ),
    ("kernels/src/backend/wgpu/glibc.rs", "exports two functions under their C names"),
    ("kernels/src/backend/wgpu/vulkan.rs", "asks Vulkan, which is C, for what wgpu does not pass on"),
    ("src/devices/environment.rs", "sets an environment variable while there is one thread"),
    ("kernels/src/backend/wgpu/checks.rs", "leaves out checks where tests prove that none is needed"),
    ("kernels/src/backend/wgpu/experimental.rs", "wgpu wants a signature before it hands out matrix units"),
    ("kernels/src/backend/cuda/graphs.rs", "calls of the NVIDIA driver"),
    ("kernels/src/backend/cuda/libcuda.rs", "calls of the NVIDIA driver"),
    ("kernels/src/backend/cuda/staging.rs", "pinned memory of the NVIDIA driver"),
    ("kernels/src/backend/cuda/waits.rs", "calls of the NVIDIA driver"),
    ("kernels/src/backend/cuda/tensor_map.rs", "a call of the NVIDIA driver that an older one lacks"),
    ("src/format/map.rs", "mmap, and a handler for the bus error of a file that was cut short"),
    ("kernels/src/support/end.rs", "ends the process without the handlers of drivers"),
    (
        "kernels/src/support/allocator.rs",
        "a global allocator is unsafe by its trait; it passes every call on",
    ),
    ("tests/wgsl/compiler.rs", "wgpu's own layer of Vulkan has no safe form"),
    ("tests/mutated_files/memory.rs", "a global allocator that counts"),
    ("tests/cluster_runs/tap.rs", "setns and TUNSETIFF have no safe form"),
    ("src/run/signals.rs", "asks the system whether a signal was ignored from the start"),
];

/// Folders whose entries use one another in a circle.
const CIRCLES: &[(&str, &str)] = &[
    ("crate::backend::cuda", "copies, launches, frozen weights and tiers extend one device"),
    (
        "crate::backend::wgpu",
        "adapters explain their absence through Vulkan; block encodings are kernel constants",
    ),
    ("crate::cluster::coordinator", "the events of a round name its tasks"),
    ("crate::cluster::worker", "the queue of a device holds the reports of the device that reads it"),
    ("crate::model", "decoder, blocks, weights and the estimate of memory name one another"),
    ("crate::train", "errors and checkpoints, events and the best step, evaluation and sums name each other"),
];

#[track_caller]
fn check(rule: &str, findings: Vec<String>) {
    assert!(findings.is_empty(), "{rule}:\n  {}\n", findings.join("\n  "));
}

#[test]
fn arrows_between_floors_go_down_only() {
    check("floors (docs/explain/architecture.md)", floors::check(&Tree::read()));
}

#[test]
fn no_files_of_a_folder_form_a_circle() {
    check("circles (files that name one another)", circles::circles(&Tree::read(), CIRCLES));
}

#[test]
fn files_and_functions_stay_small() {
    let tree = Tree::read();
    let mut found = shape::long_files(&tree, LONG_FILES);
    found.extend(shape::long_functions(&tree, LONG_FUNCTIONS));
    found.extend(shape::wide_functions(&tree, WIDE_FUNCTIONS));
    found.extend(shape::bool_arguments(&tree, BOOL_ARGUMENTS));
    check(
        "files of 600 lines, functions of 60 with 7 values as arguments (use a struct), no bool (use an enum)",
        found,
    );
}

#[test]
fn unsafe_stands_only_where_it_is_named() {
    check("unsafe", absences::unsafe_outside(&Tree::read(), UNSAFE_FILES));
}

#[test]
fn what_must_not_be_there_is_not() {
    let tree = Tree::read();
    check("module names that say nothing", absences::vague_names(&tree));
    check("unfinished markers and ignored tests", absences::markers(&tree));
    check("paths of one machine", absences::machine_paths(&tree));
    check("macros that panic on a closed output", absences::prints(&tree));
}

#[test]
fn sentences_and_names_contain_no_banned_word() {
    check("banned words (CONTRIBUTING.md)", banned_words::banned_words(&Tree::read(), BANNED_WORDS));
}

#[test]
fn every_verb_of_a_backend_is_tested() {
    check("verbs without a test", verbs::untested(&Tree::read()));
}

#[test]
fn every_variable_that_is_named_is_known() {
    use finetune::config::variables::{OTHERS, is_known, is_of_a_service};
    let tree = Tree::read();
    check(
        "environment variables (src/config/variables.rs)",
        variables::unknown(&tree, |name| is_known(name) || is_of_a_service(name)),
    );
    check("variables in the guide", variables::undocumented(&tree, OTHERS.iter().map(|(name, _)| *name)));
}

#[test]
fn every_test_that_is_named_exists() {
    let tree = Tree::read();
    check("contracts", contracts::check_contracts(&tree));
    check("invariants of docs/explain/architecture.md", contracts::check_invariants(&tree));
}

#[test]
fn every_link_and_named_document_exists() {
    let exists = |path: &str| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists();
    check("links and paths of documents", links::check(&Tree::read(), exists));
}
