//! The driver, libcuda, loaded at its first use; no toolkit is needed. Every failure has a name: no driver, a driver
//! too old for the kernels, no device, memory, a module that does not compile (with the driver's log), a launch, an
//! address. `unsafe` is limited to the calls of the C API.

use super::devices::{self, Absent};
use super::graphs::{self, Functions, Graphs, Unstarted};
use super::staging::Staging;
use super::tensor_map::{self, Arguments};
use super::waits::{self, Stop};
use super::{Cuda, Driver, Launch, List, Waiting, kernels};
use crate::backend::{Checked, Fault};
use crate::support::stderr::say;
use cudarc::driver::sys::{self, CUdevice_attribute, CUjit_option, CUresult};
use std::collections::{HashMap, HashSet};
use std::ffi::{CString, c_void};
use std::ptr::{null_mut, without_provenance_mut};

/// Bytes of the compiler's log that are kept.
const LOG: usize = 4096;
/// The allocation granularity of the driver: smaller buffers take as much.
pub(super) const GRANULARITY: usize = 512;
/// Copies and launches that are queued without a wait: with about 1,024 in its queue, a driver's calls block, also on a
/// card that never answers.
const AHEAD: usize = 512;

fn check(code: CUresult) -> Result<(), CUresult> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

/// Starts the driver. Returns its CUDA version: 12080 means 12.8.
pub(super) fn start() -> Result<i32, Absent> {
    // SAFETY: only tests whether the library can be loaded; without it every other call would panic.
    if !unsafe { sys::is_culib_present() } {
        return Err(Absent::Driver);
    }
    // SAFETY: cuInit may be called any number of times, from any thread.
    check(unsafe { sys::cuInit(0) }).map_err(|code| match code {
        CUresult::CUDA_ERROR_NO_DEVICE => Absent::Device,
        CUresult::CUDA_ERROR_STUB_LIBRARY => Absent::Stub,
        code => Absent::Start { reason: format!("{code:?}") },
    })?;
    let mut version = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }).map_err(refused)?;
    Ok(version)
}

fn refused(code: CUresult) -> Absent {
    Absent::Start { reason: format!("{code:?}") }
}

/// The number of devices that CUDA_VISIBLE_DEVICES leaves.
pub(super) fn count() -> Result<usize, Absent> {
    let mut n = 0;
    // SAFETY: writes one integer, after cuInit.
    check(unsafe { sys::cuDeviceGetCount(&mut n) }).map_err(refused)?;
    Ok(usize::try_from(n).unwrap_or(0))
}

/// Describes a device: name, compute capability, bytes of memory, whether the memory is the machine's, PCI address.
pub(super) fn describe(ordinal: usize) -> Result<devices::Device, Absent> {
    let refused = |code: CUresult| Absent::Card { ordinal, reason: format!("{code:?}") };
    let device = handle(ordinal).map_err(refused)?;
    let mut name = [0u8; 256];
    let mut pci = [0u8; 32];
    let mut memory = 0;
    let mut values = [0; 3];
    let asked = [
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
    ];
    // SAFETY: lengths are those of the buffers, and the device is one of cuDeviceGet.
    unsafe {
        check(sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device)).map_err(refused)?;
        check(sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as i32, device))
            .map_err(refused)?;
        check(sys::cuDeviceTotalMem_v2(&mut memory, device)).map_err(refused)?;
        for (out, attribute) in values.iter_mut().zip(asked) {
            check(sys::cuDeviceGetAttribute(out, attribute, device)).map_err(refused)?;
        }
    }
    let text = |x: &[u8]| String::from_utf8_lossy(x.split(|b| *b == 0).next().unwrap_or(x)).into_owned();
    let [major, minor, integrated] = values.map(|x| u32::try_from(x).unwrap_or(0));
    Ok(devices::Device {
        ordinal,
        name: text(&name),
        pci: text(&pci).to_lowercase(),
        memory: memory as u64,
        capability: (major, minor),
        integrated: integrated != 0,
    })
}

/// Free bytes of a device.
pub(super) fn free(ordinal: usize) -> Option<u64> {
    let device = handle(ordinal).ok().filter(|device| waits::lost(*device).is_none())?;
    let (mut context, mut free, mut total) = (null_mut(), 0, 0);
    // SAFETY: outputs are a handle and two sizes; the context is released once, and the thread's own is put back.
    unsafe {
        let mut before = null_mut();
        sys::cuCtxGetCurrent(&mut before);
        check(sys::cuDevicePrimaryCtxRetain(&mut context, device)).ok()?;
        let asked = check(sys::cuCtxSetCurrent(context))
            .and_then(|()| check(sys::cuMemGetInfo_v2(&mut free, &mut total)));
        sys::cuCtxSetCurrent(before);
        sys::cuDevicePrimaryCtxRelease_v2(device);
        asked.ok()?;
    }
    Some(free as u64)
}

fn handle(ordinal: usize) -> Result<sys::CUdevice, CUresult> {
    let mut device = 0;
    // SAFETY: writes one integer; the driver returns an error for an invalid ordinal.
    check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) })?;
    Ok(device)
}

/// One device of the driver: its primary context and one stream.
pub struct Libcuda {
    name: String,
    capability: (u32, u32),
    variant: String,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    functions: Functions,
    modules: HashMap<&'static str, sys::CUmodule>,
    graphs: Graphs,
    staging: Staging,
    /// Allocated addresses, freed in drop: the context belongs to the process, so they would outlive this value.
    held: HashSet<u64>,
    /// The last entry or list that was launched, for the messages of device errors.
    last: String,
    /// Copies and launches since the last wait.
    queued: usize,
}

// SAFETY: handles of the driver belong to the process, and every method makes the context current first.
unsafe impl Send for Libcuda {}

impl Checked<Cuda<Libcuda>> {
    /// Opens the device with this ordinal, in the f32 class.
    pub fn open(ordinal: usize) -> Result<Self, Fault> {
        Libcuda::open(ordinal).map(Self::on)
    }
}

impl Libcuda {
    /// Opens the device with this ordinal: its primary context and a stream.
    pub fn open(ordinal: usize) -> Result<Self, Fault> {
        let fault = |reason: String| Fault::Device { device: format!("cuda:{ordinal}"), reason };
        let all = devices::devices().map_err(|e| fault(e.to_string()))?;
        let of = |d: &devices::Device| d.ordinal == ordinal;
        let broken = all.broken.iter().find(|(n, _)| *n == ordinal).map(|(_, why)| why.to_string());
        let Some(found) = all.devices.into_iter().find(of) else {
            let none = "there is no such device: `finetune devices` lists them";
            return Err(fault(broken.unwrap_or_else(|| none.into())));
        };
        if let Some(reason) = found.unusable() {
            return Err(fault(reason));
        }
        let variant = slug(&format!("{} {}", found.name, devices::build(all.driver)));
        let name = format!("cuda:{ordinal} ({})", found.name);
        let fault = |code: CUresult| Fault::Device { device: name.clone(), reason: format!("{code:?}") };
        let device = handle(ordinal).map_err(fault)?;
        if let Some(why) = waits::lost(device) {
            let reason = format!("lost, because earlier in this process: {why}");
            return Err(Fault::Device { device: name, reason });
        }
        let (mut context, mut stream) = (null_mut(), null_mut());
        // SAFETY: outputs are handles, the device is valid; the context is released once, here or in drop.
        let staging = unsafe {
            // Where the driver waits by itself, the thread sleeps and leaves its core to a CPU device
            // (CU_CTX_SCHED_BLOCKING_SYNC). An existing context keeps its flags.
            sys::cuDevicePrimaryCtxSetFlags_v2(device, 4);
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device)).map_err(fault)?;
            let made = check(sys::cuCtxSetCurrent(context))
                .and_then(|()| check(sys::cuStreamCreate(&mut stream, 1)))
                .and_then(|()| Staging::new());
            made.map_err(|code| {
                if !stream.is_null() {
                    sys::cuStreamDestroy_v2(stream);
                }
                sys::cuDevicePrimaryCtxRelease_v2(device);
                fault(code)
            })?
        };
        let (capability, graphs) = (found.capability, Graphs::new(all.driver));
        let sm90a = tensor_map::sm90a(device, capability, devices::ptx_version(all.driver));
        let functions = Functions { entries: HashMap::new(), sm90a };
        let (modules, held) = (HashMap::new(), HashSet::new());
        let last = "start".into();
        Ok(Libcuda {
            name,
            capability,
            variant,
            device,
            context,
            stream,
            functions,
            modules,
            graphs,
            staging,
            held,
            last,
            queued: 0,
        })
    }

    /// The same device without graphs, for a comparison.
    pub fn kernel_by_kernel(mut self) -> Self {
        self.graphs.off();
        self
    }

    fn fault(&self, what: &str, stop: impl Into<Stop>) -> Fault {
        let stop = stop.into();
        let reason = format!("{what}: {stop}, at or before {}", self.last);
        if stop.lasts() {
            waits::lose(self.device, &reason);
        }
        self.device(reason)
    }

    /// Waits until all work is done.
    fn wait(&mut self) -> Result<(), Fault> {
        self.queued = 0;
        self.staging.waits.stream(self.stream).map_err(|stop| self.fault("wait", stop))
    }

    /// Counts a copy or a launch that follows.
    fn queue(&mut self) -> Result<(), Fault> {
        self.queued += 1;
        if self.queued > AHEAD { self.wait() } else { Ok(()) }
    }

    fn device(&self, reason: String) -> Fault {
        Fault::Device { device: self.name.clone(), reason }
    }

    fn current(&self) -> Result<(), Fault> {
        if let Some(why) = waits::lost(self.device) {
            return Err(self.device(why));
        }
        // SAFETY: the context lives as long as self.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }).map_err(|code| self.fault("context", code))
    }

    /// The function of an entry. Compiles its file for this device at the first use.
    fn function(&mut self, file: &'static str, entry: &str) -> Result<(sys::CUfunction, u32), Fault> {
        if let Some(f) = self.functions.entries.get(entry) {
            return Ok(*f);
        }
        let module = match self.modules.get(file) {
            Some(m) => *m,
            None => {
                // The driver may wait for all work before it loads code.
                self.wait()?;
                let module = self.compile(file)?;
                self.modules.insert(file, module);
                module
            }
        };
        let mut function = null_mut();
        let name = CString::new(entry).unwrap_or_default();
        // SAFETY: the module lives until drop, the name ends with 0.
        check(unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) })
            .map_err(|code| self.fault(&format!("{file}: entry {entry}"), code))?;
        let shared = kernels::find(file).map_or(0, kernels::Source::dynamic);
        if shared > 0 {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is the module's, which lives until drop.
            check(unsafe { sys::cuFuncSetAttribute(function, most, shared as i32) })
                .map_err(|code| self.fault(&format!("{entry}: {shared} bytes of shared memory"), code))?;
        }
        tensor_map::divides(file, function).map_err(|why| self.device(format!("{entry}: {why}")))?;
        self.functions.entries.insert(entry.into(), (function, shared));
        Ok((function, shared))
    }

    fn compile(&self, file: &'static str) -> Result<sys::CUmodule, Fault> {
        let text = CString::new(kernels::source(file).unwrap_or_default()).unwrap_or_default();
        let mut log = vec![0u8; LOG];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver takes a size in place of a pointer.
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), without_provenance_mut(LOG)];
        let mut module = null_mut();
        // SAFETY: the text ends with 0; the log outlives the call and has the length that is passed.
        let code = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, options, values)
        };
        check(code).map_err(|code| {
            let said = log.split(|b| *b == 0).next().unwrap_or_default();
            let said = String::from_utf8_lossy(said).split_whitespace().collect::<Vec<_>>().join(" ");
            self.device(format!("{file} does not compile: {code:?}: {said}"))
        })?;
        Ok(module)
    }
}

impl Driver for Libcuda {
    fn name(&self) -> &str {
        &self.name
    }

    fn capability(&self) -> (u32, u32) {
        self.capability
    }

    fn sm90a(&self) -> Option<u32> {
        self.functions.sm90a.map(|s| s.processors)
    }

    fn granularity(&self) -> usize {
        GRANULARITY
    }

    fn alloc(&mut self, bytes: usize) -> Result<u64, Fault> {
        self.current()?;
        let mut address = 0;
        // SAFETY: writes one address.
        let asked = |address: &mut u64| unsafe { sys::cuMemAlloc_v2(address, bytes) };
        let mut code = asked(&mut address);
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY && self.graphs.any() {
            // The memory of graphs is in no budget, so graphs are freed first, after those that run have ended.
            self.wait()?;
            self.graphs.free();
            code = asked(&mut address);
        }
        match code {
            CUresult::CUDA_SUCCESS => {
                self.held.insert(address);
                Ok(address)
            }
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(Fault::OutOfMemory { device: self.name.clone(), needed: bytes as u64 })
            }
            code => Err(self.fault("memory", code)),
        }
    }

    fn free(&mut self, address: u64) {
        // cuMemFree waits for the users of the memory, without a deadline.
        if self.held.remove(&address) && self.current().is_ok() && self.wait().is_ok() {
            // SAFETY: the address is one of alloc, is freed once, and has no users any more.
            unsafe { sys::cuMemFree_v2(address) };
        }
    }

    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.current()?;
        self.queue()?;
        self.staging.write(to, bytes, self.stream).map_err(|stop| self.fault("upload", stop))
    }

    fn read(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.read_all(&mut [(from, out)])
    }

    fn read_all(&mut self, parts: &mut [(u64, &mut [u8])]) -> Result<(), Fault> {
        self.current()?;
        self.queued = 0;
        self.staging.read(parts, self.stream).map_err(|stop| self.fault("read", stop))
    }

    fn variant(&self) -> String {
        self.variant.clone()
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), Fault> {
        self.current()?;
        self.queue()?;
        let (function, shared) = self.function(launch.file, launch.entry)?;
        let mut arguments = Arguments::of(self.functions.sm90a, launch.args)
            .map_err(|code| self.fault(&format!("{}: tensor map", launch.entry), code))?;
        let [x, y, z] = launch.grid;
        // SAFETY: one pointer for every parameter, to at least its bytes (low bytes first); the driver copies them.
        let code = unsafe {
            let (args, none) = (arguments.pointers(), null_mut());
            sys::cuLaunchKernel(function, x, y, z, launch.threads, 1, 1, shared, self.stream, args, none)
        };
        // An earlier call failed, and its error is named.
        if !graphs::lasts(code) {
            self.last = launch.entry.into();
        }
        check(code).map_err(|code| self.fault("launch", code))
    }

    fn start(&mut self, list: &List) -> Result<u64, Fault> {
        self.current()?;
        self.queue()?;
        let launches = list.launches();
        match self.graphs.start(launches, &self.functions, self.stream) {
            Ok(true) => {
                let entry = |at: Option<&Waiting>| at.map_or(String::new(), |w| w.launch().entry.into());
                let (first, last) = (entry(launches.first()), entry(launches.last()));
                self.last = format!("a graph of {} launches, {first} to {last}", launches.len());
                Ok(1)
            }
            Ok(false) => list.one_by_one(self),
            Err(Unstarted::Failed(call, code)) => Err(self.fault(call, code)),
            Err(Unstarted::Refused(why)) => {
                say!("{}: {why}: a microbatch is launched kernel by kernel, not as one graph", self.name);
                list.one_by_one(self)
            }
        }
    }
}

/// A text as part of a class name.
fn slug(text: &str) -> String {
    let word = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { ' ' };
    text.chars().map(word).collect::<String>().split_whitespace().collect::<Vec<_>>().join("-")
}

impl Drop for Libcuda {
    /// A lost card is left as it is: every call would fail or block.
    fn drop(&mut self) {
        if self.current().is_err() || self.wait().is_err() {
            return;
        }
        // SAFETY: each handle is freed once, after all its users; the context was retained once, in open.
        unsafe {
            self.held.iter().for_each(|address| {
                sys::cuMemFree_v2(*address);
            });
            self.graphs.free();
            self.modules.values().for_each(|m| {
                sys::cuModuleUnload(*m);
            });
            self.staging.free();
            sys::cuStreamDestroy_v2(self.stream);
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
