//! Compiled kernels and their bind groups. Both are looked up by value: a kernel by its name and constants, a bind
//! group by its kernel and its bindings.

use super::checks::{self, Checks};
use super::faults::Faults;
use super::kernel::{Access, Constant, Kernel, PARAMS};
use std::collections::HashMap;
use std::num::NonZero;
use wgpu::{BindingType, BufferBindingType, ShaderStages};

/// Part of a buffer, as a kernel sees it.
#[derive(Debug, Clone)]
pub struct Slot {
    /// wgpu's handle.
    pub buffer: wgpu::Buffer,
    /// The buffer's number.
    pub id: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// A compiled kernel.
#[derive(Debug, Clone)]
pub struct Built {
    /// The pipeline.
    pub pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    number: u64,
}

/// The bindings of a group: the kernel's number, then buffer, offset and size of each.
type GroupKey = (u64, Vec<(u64, u64, u64)>);

/// Most bind groups that are kept: microbatches of one length need some thousands.
const GROUPS: usize = 32_768;

/// Compiled kernels and bind groups.
#[derive(Debug)]
pub struct Pipelines {
    /// Most bind groups that are kept.
    pub most: usize,
    /// Run-time checks of the kernels that are compiled.
    pub checks: Checks,
    built: HashMap<(&'static str, Vec<Constant>), Built>,
    groups: HashMap<GroupKey, wgpu::BindGroup>,
    /// The driver's own cache, if it has one.
    pub cache: Option<wgpu::PipelineCache>,
    /// Bind groups made so far.
    pub groups_made: u64,
}

impl Default for Pipelines {
    fn default() -> Self {
        let (built, groups) = (HashMap::new(), HashMap::new());
        Pipelines { most: GROUPS, checks: Checks::default(), built, groups, cache: None, groups_made: 0 }
    }
}

impl Pipelines {
    /// Number of bind groups that are kept now.
    pub fn groups_kept(&self) -> usize {
        self.groups.len()
    }

    /// Finds or compiles a kernel.
    pub fn kernel(
        &mut self,
        device: &wgpu::Device,
        faults: &Faults,
        kernel: &Kernel,
        constants: &[Constant],
    ) -> Option<Built> {
        let key = (kernel.name, constants.to_vec());
        if let Some(built) = self.built.get(&key) {
            return Some(built.clone());
        }
        let module = checks::module(device, kernel, constants, self.checks);
        let built = compile(device, kernel, &module, (self.built.len() as u64, self.cache.as_ref()));
        if faults.raised() {
            return None;
        }
        self.built.insert(key, built.clone());
        Some(built)
    }

    /// Number of kernels compiled so far.
    pub fn compiled(&self) -> usize {
        self.built.len()
    }

    /// The bind group of a kernel with these slots.
    pub fn group(
        &mut self,
        device: &wgpu::Device,
        built: &Built,
        params: &wgpu::Buffer,
        slots: &[Slot],
    ) -> wgpu::BindGroup {
        let key = (built.number, slots.iter().map(|s| (s.id, s.offset, s.size)).collect());
        if let Some(group) = self.groups.get(&key) {
            return group.clone();
        }
        let size = NonZero::new(PARAMS as u64);
        let params = wgpu::BufferBinding { buffer: params, offset: 0, size };
        let mut entries =
            vec![wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(params) }];
        entries.extend(slots.iter().zip(1..).map(|(s, binding)| {
            let part =
                wgpu::BufferBinding { buffer: &s.buffer, offset: s.offset, size: NonZero::new(s.size) };
            wgpu::BindGroupEntry { binding, resource: wgpu::BindingResource::Buffer(part) }
        }));
        let layout = &built.layout;
        let group =
            device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &entries });
        self.groups_made += 1;
        // Microbatches of ever different lengths leave bind groups behind; those still in use are made again.
        if self.groups.len() >= self.most {
            self.groups.clear();
        }
        self.groups.insert(key, group.clone());
        group
    }

    /// Drops the bind groups of buffers that no longer exist.
    pub fn forget(&mut self, dropped: &[u64]) {
        if !dropped.is_empty() {
            self.groups.retain(|(_, slots), _| !slots.iter().any(|(id, ..)| dropped.contains(id)));
        }
    }
}

fn entry(binding: u32, ty: BufferBindingType, dynamic: Option<NonZero<u64>>) -> wgpu::BindGroupLayoutEntry {
    let ty = BindingType::Buffer { ty, has_dynamic_offset: dynamic.is_some(), min_binding_size: dynamic };
    wgpu::BindGroupLayoutEntry { binding, visibility: ShaderStages::COMPUTE, ty, count: None }
}

fn compile(
    device: &wgpu::Device,
    kernel: &Kernel,
    module: &wgpu::ShaderModule,
    (number, cache): (u64, Option<&wgpu::PipelineCache>),
) -> Built {
    let mut entries = vec![entry(0, BufferBindingType::Uniform, NonZero::new(PARAMS as u64))];
    entries.extend(kernel.buffers.iter().zip(1..).map(|(access, binding)| {
        entry(binding, BufferBindingType::Storage { read_only: *access == Access::Read }, None)
    }));
    let label = Some(kernel.name);
    let layout =
        device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries });
    let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label,
        bind_group_layouts: &[Some(&layout)],
        immediate_size: 0,
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label,
        layout: Some(&pipeline_layout),
        module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache,
    });
    Built { pipeline, layout, number }
}
