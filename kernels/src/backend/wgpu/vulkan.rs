//! Facts of Vulkan that wgpu does not expose: whether a loader exists, a card's UUID, and its free memory. None of them
//! is needed to compute: an unavailable answer is `None`.
//!
//! Unsafe, because Vulkan is a C API: handles are used only while their adapter lives, structures are ash's own, and
//! nothing but those structures is created, destroyed or written.

use super::adapters::Memory;
use ash::vk;

/// Why the loader cannot be used, in its own words; `None` if it can.
pub fn loader_missing() -> Option<String> {
    // SAFETY: loads a system library, as wgpu does, and calls nothing in it.
    unsafe { ash::Entry::load() }.err().map(|e| e.to_string())
}

/// The card's UUID, which is equal for two drivers of one card.
pub fn uuid(adapter: &wgpu::Adapter) -> Option<[u8; 16]> {
    // SAFETY: the guard keeps the adapter and its instance alive during the query.
    let hal = unsafe { adapter.as_hal::<wgpu::hal::vulkan::Api>() }?;
    if hal.shared_instance().instance_api_version() < vk::API_VERSION_1_1
        || hal.physical_device_capabilities().properties().api_version < vk::API_VERSION_1_1
    {
        return None;
    }
    let mut id = vk::PhysicalDeviceIDProperties::default();
    let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut id);
    // SAFETY: Vulkan 1.1 has this call; the chain is ash's own and outlives it.
    unsafe {
        hal.shared_instance()
            .raw_instance()
            .get_physical_device_properties2(hal.raw_physical_device(), &mut all);
    }
    (id.device_uuid != [0; 16]).then_some(id.device_uuid)
}

/// Memory of the largest device-local heap.
pub fn memory(adapter: &wgpu::Adapter) -> Option<Memory> {
    // SAFETY: as above.
    let hal = unsafe { adapter.as_hal::<wgpu::hal::vulkan::Api>() }?;
    if hal.shared_instance().instance_api_version() < vk::API_VERSION_1_1 {
        return None;
    }
    let says_budget = hal.physical_device_capabilities().supports_extension(ash::ext::memory_budget::NAME);
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut all = vk::PhysicalDeviceMemoryProperties2::default();
    if says_budget {
        all = all.push_next(&mut budget);
    }
    // SAFETY: Vulkan 1.1 has this call; the chain is ash's own and outlives it.
    unsafe {
        hal.shared_instance()
            .raw_instance()
            .get_physical_device_memory_properties2(hal.raw_physical_device(), &mut all);
    }
    let properties = all.memory_properties;
    let heaps = properties.memory_heaps.iter().take(properties.memory_heap_count as usize).enumerate();
    let own = heaps.filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
    let (at, heap) = own.max_by_key(|(_, heap)| heap.size)?;
    let free = says_budget.then(|| budget.heap_budget[at].saturating_sub(budget.heap_usage[at]));
    Some(Memory { total: heap.size, free: free.unwrap_or(heap.size).min(heap.size) })
}
