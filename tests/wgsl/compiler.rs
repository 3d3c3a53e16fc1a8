//! Compiles kernels as wgpu does, without a card: through wgpu's own layer of Vulkan, with the options that it sets, on
//! Mesa's driver for AMD cards, which compiles for a named chip and runs nothing. wgpu itself does not open such a
//! device, because it has no memory.

use crate::{exact, parsed};
use finetune::backend::wgpu::{Checks, Entry, catalogue};
use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use std::borrow::Cow;
use wgpu::hal::{self, Adapter as _, Device as _, Instance as _, vulkan};

/// Whether a card runs this text: neither a kernel of software drivers, nor a fragment that no AMD card has.
fn is_for_cards(entry: &Entry) -> bool {
    let is = |name, values: &[u32]| entry.constant(name).is_none_or(|value| values.contains(&value));
    entry.stem() != "product_lanes"
        && is("LANES", &[0])
        && is("WIDTH", &[256])
        && is("SIDE", &[16])
        && is("FUSED", &[1])
}

/// Compiles texts for the chip that RADV_FORCE_FAMILY names: those with a word of RADV_TEXTS in their name, with all
/// run-time checks if RADV_CHECKS is set. RADV_SOURCE chooses who writes the SPIR-V: wgpu if it is not set, else [`words`].
/// Runs in a process of its own, to whose stderr the driver writes.
#[test]
fn texts_compile_for_a_named_chip() {
    if std::env::var_os("RADV_FORCE_FAMILY").is_none() {
        println!("skipped: RADV_FORCE_FAMILY names no chip");
        return;
    }
    let words = std::env::var("RADV_TEXTS").unwrap_or_default();
    let checks = match std::env::var_os("RADV_CHECKS") {
        Some(_) => Checks::Everywhere,
        None => Checks::WhereNotProved,
    };
    let source = std::env::var("RADV_SOURCE").ok();
    let (device, matrices) = opened();
    for entry in catalogue().0.iter().filter(|entry| is_for_cards(entry)) {
        let wanted = words.is_empty() || words.lines().any(|word| entry.name.contains(word));
        if wanted && (matrices || entry.constant("SIDE").is_none()) {
            eprintln!("\nkernel {}", entry.name);
            compile(&device, entry, (checks, source.as_deref()));
        }
    }
    eprintln!("\nkernel end");
}

/// The device, and whether it has cooperative matrices.
fn opened() -> (vulkan::Device, bool) {
    let descriptor = hal::InstanceDescriptor {
        name: "",
        flags: wgpu::InstanceFlags::ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER,
        memory_budget_thresholds: Default::default(),
        backend_options: Default::default(),
        telemetry: None,
        display: None,
    };
    let matrices = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    // SAFETY: these functions ask for nothing but their order, and that what they return outlives what is made of it:
    // the device holds its instance.
    unsafe {
        let instance = vulkan::Instance::init(&descriptor).unwrap();
        let exposed =
            instance.enumerate_adapters(None).into_iter().find(|a| a.info.driver == "radv").unwrap();
        let wanted = wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP | matrices;
        let (features, limits) = (exposed.features & wanted, &exposed.capabilities.limits);
        let open = exposed.adapter.open(features, limits, &wgpu::MemoryHints::Performance).unwrap();
        eprintln!("chip {} {}", exposed.info.name, exposed.info.driver_info);
        (open.device, features.contains(matrices))
    }
}

/// The bindings of a kernel, as kernels/src/backend/wgpu/pipelines.rs has them.
fn bindings(module: &naga::Module) -> Vec<wgpu::BindGroupLayoutEntry> {
    let entry = |(_, variable): (_, &naga::GlobalVariable)| {
        let binding = variable.binding?.binding;
        let ty = match variable.space {
            naga::AddressSpace::Storage { access } => {
                wgpu::BufferBindingType::Storage { read_only: !access.contains(naga::StorageAccess::STORE) }
            }
            _ => wgpu::BufferBindingType::Uniform,
        };
        let ty = wgpu::BindingType::Buffer { ty, has_dynamic_offset: binding == 0, min_binding_size: None };
        Some(wgpu::BindGroupLayoutEntry { binding, visibility: wgpu::ShaderStages::COMPUTE, ty, count: None })
    };
    module.global_variables.iter().filter_map(entry).collect()
}

/// SPIR-V as wgpu writes it for a kernel with run-time checks. If `kind` is `exact`, its arithmetic may not be contracted.
fn words(module: &naga::Module, info: &naga::valid::ModuleInfo, kind: &str) -> Vec<u32> {
    let places = module.global_variables.iter().filter_map(|(_, variable)| variable.binding);
    let target = |place: naga::ResourceBinding| spv::BindingInfo {
        descriptor_set: place.group,
        binding: place.binding,
        binding_array_size: None,
    };
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::empty(),
        binding_map: places.map(|place| (place, target(place))).collect(),
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        bounds_check_policies: BoundsCheckPolicies {
            index: BoundsCheckPolicy::Restrict,
            ..Default::default()
        },
        ..Default::default()
    };
    let words = spv::write_vec(module, info, &options, None).unwrap();
    if kind == "exact" { exact::decorated(&words) } else { words }
}

fn compile(device: &vulkan::Device, entry: &Entry, (checks, kind): (Checks, Option<&str>)) {
    let (module, info) = parsed(&entry.text).unwrap();
    let words = kind.map(|kind| words(&module, &info, kind));
    let entries = bindings(&module);
    let group = hal::BindGroupLayoutDescriptor {
        label: None,
        flags: hal::BindGroupLayoutFlags::empty(),
        entries: &entries,
    };
    let shader = hal::NagaShader { module: Cow::Owned(module), info, debug_source: None };
    let described = hal::ShaderModuleDescriptor { label: None, runtime_checks: checks.of(entry.stem()) };
    // SAFETY: as above; everything is destroyed once, in the opposite order.
    unsafe {
        let group = device.create_bind_group_layout(&group).unwrap();
        let layout = hal::PipelineLayoutDescriptor {
            label: None,
            flags: hal::PipelineLayoutFlags::empty(),
            bind_group_layouts: &[Some(&group)],
            immediate_size: 0,
        };
        let layout = device.create_pipeline_layout(&layout).unwrap();
        let input = words.as_deref().map_or(hal::ShaderInput::Naga(shader), hal::ShaderInput::SpirV);
        let module = device.create_shader_module(&described, input).unwrap();
        let stage = hal::ProgrammableStage {
            module: &module,
            entry_point: "main",
            constants: &Default::default(),
            zero_initialize_workgroup_memory: false,
        };
        let pipeline = hal::ComputePipelineDescriptor { label: None, layout: &layout, stage, cache: None };
        let pipeline =
            device.create_compute_pipeline(&pipeline).unwrap_or_else(|e| panic!("{}: {e}", entry.name));
        device.destroy_compute_pipeline(pipeline);
        device.destroy_shader_module(module);
        device.destroy_pipeline_layout(layout);
        device.destroy_bind_group_layout(group);
    }
}
