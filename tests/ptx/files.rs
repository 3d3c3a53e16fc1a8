//! The kernel files of the tree, and the promises of their heads.

use std::path::PathBuf;

/// One file of kernels/ptx.
pub struct File {
    pub name: String,
    pub text: String,
    /// `.target`, without `sm_`.
    pub target: String,
    /// `budget: N registers, N bytes of shared memory`.
    pub registers: usize,
    pub shared: usize,
    /// `promises: HMMA`: opcodes that the machine code must contain.
    pub promises: Vec<String>,
}

/// kernels/ptx/by_hand and kernels/ptx/generated.
fn folders() -> [PathBuf; 2] {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx");
    let here = if manifest.exists() { manifest } else { PathBuf::from("kernels/ptx") };
    ["by_hand", "generated"].map(|folder| here.join(folder))
}

/// Whether the generator writes a file of that name.
pub fn is_generated(name: &str) -> bool {
    let [by_hand, _] = folders();
    !by_hand.join(name).exists()
}

/// The path of the file of that name.
pub fn path(name: &str) -> PathBuf {
    let [by_hand, generated] = folders();
    if is_generated(name) { generated.join(name) } else { by_hand.join(name) }
}

/// All of them, by name.
pub fn all() -> Vec<File> {
    let entries = folders().into_iter().flat_map(|folder| std::fs::read_dir(folder).unwrap().flatten());
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names.iter().map(|name| read(name)).collect()
}

pub fn read(name: &str) -> File {
    let text = std::fs::read_to_string(path(name)).unwrap();
    parse(name, text)
}

fn parse(name: &str, text: String) -> File {
    let after = |word: &str| {
        let line = text.lines().find_map(|l| l.trim_start_matches("// ").strip_prefix(word));
        line.unwrap_or("").trim().to_string()
    };
    let numbers: Vec<usize> = after("budget:").split_whitespace().filter_map(|w| w.parse().ok()).collect();
    assert_eq!(numbers.len(), 2, "{name}: the head states `budget: N registers, N bytes of shared memory`");
    let target = after(".target").trim_start_matches("sm_").to_string();
    let promises = after("promises:").split_whitespace().map(String::from).collect();
    File { name: name.into(), target, registers: numbers[0], shared: numbers[1], promises, text }
}

#[test]
fn generated_files_are_what_the_generator_writes() {
    let [_, generated] = folders();
    let differences = ptx_gen::differences(&generated);
    assert!(differences.is_empty(), "{}\ncargo run -p ptx-gen writes them", differences.join("\n"));
}

#[test]
fn heads_say_what_they_must() {
    let files = all();
    assert!(!files.is_empty(), "there are kernels");
    for f in files {
        let head = f.text.split(".version").next().unwrap();
        assert!(
            head.lines().filter(|l| l.starts_with("//")).count() > 3,
            "{}: pseudo-code at the head",
            f.name
        );
        assert!(
            head.contains("launch:") && head.contains("registers:"),
            "{}: launch and register plan",
            f.name
        );
        let stem = f.name.trim_end_matches(".ptx");
        assert!(
            f.text.contains(&format!(".entry {}", stem.split('.').next().unwrap())),
            "{}: the stem",
            f.name
        );
    }
}

/// ptxas does not know the shared memory of a launch; the launch must give what the head states.
#[test]
fn shared_memory_of_a_launch_is_the_budgets() {
    use finetune::backend::cuda::kernels::find;
    for f in all() {
        let outside = f.text.contains(".extern .shared");
        let given = find(&f.name).map(|s| s.dynamic() as usize);
        assert_eq!(given, Some(if outside { f.shared } else { 0 }), "{}", f.name);
        // The limit of a block of compute capability 9.0.
        assert!(f.shared <= 232_448, "{}", f.name);
    }
}

#[test]
fn binary_carries_exactly_the_kernels_of_the_tree() {
    use finetune::backend::cuda::kernels::{SOURCES, source};
    let carried: Vec<&str> = SOURCES.iter().map(|s| s.file).collect();
    let files = all();
    assert_eq!(carried, files.iter().map(|f| f.name.as_str()).collect::<Vec<_>>());
    assert!(files.iter().all(|f| source(&f.name) == Some(f.text.as_str())));
    for s in SOURCES {
        assert_eq!(s.version(), if s.exact() { 80 } else { 70 }, "{}: CUDA 11.0 reads PTX 7.0", s.file);
    }
}
