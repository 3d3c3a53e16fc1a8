//! Every kernel under kernels/wgsl, with every set of constants that a device may get, goes through naga as wgpu does
//! it: parsed, validated, translated for Vulkan and for Metal. The SPIR-V is valid (spirv.rs), kernels without run-time
//! checks are proved to need none (proofs.rs), and RADV compiles for AMD cards (radv.rs). No device is needed.

#[cfg(target_os = "linux")]
mod budgets;
#[cfg(target_os = "linux")]
mod compiler;
#[cfg(target_os = "linux")]
mod exact;
mod linear;
mod proofs;
#[cfg(target_os = "linux")]
mod radv;
mod ranges;
mod spirv;

use finetune::backend::wgpu::{Entry, catalogue};
use naga::back::{msl, spv};
use naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};

/// A text and its module, as a driver gets it.
fn parsed(text: &str) -> Result<(naga::Module, naga::valid::ModuleInfo), String> {
    let module = naga::front::wgsl::parse_str(text).map_err(|error| error.emit_to_string(text))?;
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
    validator.subgroup_stages(ShaderStages::COMPUTE).subgroup_operations(SubgroupOperationSet::all());
    let info = validator.validate(&module).map_err(|error| error.emit_to_string(text))?;
    Ok((module, info))
}

/// The reason why some driver would refuse a kernel, if any.
fn rejection(text: &str) -> Option<String> {
    let (module, info) = match parsed(text) {
        Ok(parsed) => parsed,
        Err(why) => return Some(why),
    };
    let options = spv::Options { lang_version: (1, 6), ..Default::default() };
    if let Err(error) = spv::write_vec(&module, &info, &options, None) {
        return Some(format!("SPIR-V: {error}"));
    }
    let options = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
    if let Err(error) = msl::write_string(&module, &info, &options, &Default::default()) {
        return Some(format!("MSL: {error}"));
    }
    storage_buffers(&module).or_else(|| workgroup_memory(&module))
}

/// The number of storage buffers, if it exceeds the 8 that WebGPU guarantees.
fn storage_buffers(module: &naga::Module) -> Option<String> {
    let storage = |v: &naga::GlobalVariable| matches!(v.space, naga::AddressSpace::Storage { .. });
    let count = module.global_variables.iter().filter(|(_, v)| storage(v)).count();
    (count > 8).then(|| format!("{count} storage buffers"))
}

/// The workgroup memory, if it exceeds the 16 KiB that WebGPU guarantees.
fn workgroup_memory(module: &naga::Module) -> Option<String> {
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).unwrap();
    let shared = module.global_variables.iter().filter(|(_, v)| v.space == naga::AddressSpace::WorkGroup);
    let bytes: u32 = shared.map(|(_, v)| layouter[v.ty].size).sum();
    (bytes > 16_384).then(|| format!("{bytes} bytes of workgroup memory"))
}

/// Asserts that `complaints` finds nothing in any kernel, on a thread for each processor.
fn assert_fine<C: IntoIterator<Item = String>>(entries: &[Entry], complaints: impl Fn(&Entry) -> C + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let look = |part: &[Entry]| part.iter().flat_map(&complaints).collect::<Vec<_>>();
    let bad: Vec<String> = std::thread::scope(|scope| {
        let parts = entries.chunks(entries.len().div_ceil(threads));
        let handles: Vec<_> = parts.map(|part| scope.spawn(|| look(part))).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    });
    assert!(bad.is_empty(), "{} of {} kernels:\n{}", bad.len(), entries.len(), bad.join("\n"));
}

#[test]
fn every_kernel_with_every_constant_is_translated() {
    let (entries, _) = catalogue();
    assert!(entries.len() > 100, "{} kernels", entries.len());
    assert_fine(&entries, |entry| rejection(&entry.text).map(|why| format!("{}: {why}", entry.name)));
}

#[test]
fn every_kernel_file_is_used() {
    let (_, pieces) = catalogue();
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/wgsl");
    let mut missing = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        if !pieces.contains(&text.as_str()) {
            missing.push(path.display().to_string());
        }
    }
    assert!(missing.is_empty(), "no kernel is made of {}", missing.join(", "));
}

#[test]
fn invalid_kernels_are_detected() {
    let buffers = |count: u32| -> String {
        (0..count)
            .map(|i| format!("@group(0) @binding({i}) var<storage, read> b{i}: array<f32>;\n"))
            .collect()
    };
    let head = "@compute @workgroup_size(64) fn main(@builtin(local_invocation_index) lane: u32)";
    let cases = [
        (format!("{head} {{ let x = lane; }}"), true),
        (format!("{head} {{ let x = ; }}"), false),
        (format!("{head} {{ let x: f32 = lane; }}"), false),
        (format!("{} {head} {{ let x = lane; }}", buffers(8)), true),
        (format!("{} {head} {{ let x = lane; }}", buffers(9)), false),
        (format!("var<workgroup> tile: array<f32, 5000>; {head} {{ tile[lane] = 1.0; }}"), false),
    ];
    for (text, good) in cases {
        assert_eq!(rejection(&text).is_none(), good, "{text}: {:?}", rejection(&text));
    }
}
