//! CUDA graphs of repeated lists of launches: a chain of kernel nodes, started by one call of the driver. A list with
//! the same kernels but other arguments (another length, other addresses) reuses the graph: only the nodes that differ
//! are updated. Starts that are already queued keep their arguments (CUDA driver API, cuGraphExecKernelNodeSetParams).
//! The first occurrence of a list is launched kernel by kernel: this compiles its kernels, and a list that occurs once
//! costs nothing. If more lists alternate than graphs are kept, most of the others are launched kernel by kernel. If
//! the driver refuses a graph, the caller launches kernel by kernel. An earlier error of the device is reported as such
//! and not as a refusal.

use super::list::Waiting;
use super::tensor_map::{Arguments, Sm90a};
use cudarc::driver::sys::{self, CUresult};
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::null_mut;

/// The first driver with all these calls, CUDA 12.0. Older drivers launch kernel by kernel.
const SINCE: u32 = 12_000;
/// The driver calls in use. A driver without one of them would end the process at its first call.
const CALLS: [&str; 7] = [
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];
/// Shorter lists gain nothing from a graph.
const LEAST: usize = 8;
/// Graphs that are kept. An evaluation, or a microbatch whose losses are computed in more parts, needs a list of its
/// own. The limit is low because every node takes device memory that is not counted in advance.
const KEPT: usize = 8;
/// Known lists that are launched kernel by kernel before one of them replaces a graph. If more lists alternate than
/// graphs are kept, this avoids building a graph for a single start.
const PATIENCE: u32 = 16;
/// Hashes of lists that are remembered.
const SEEN: usize = 64;

/// The driver's handles that launches need in addition to their arguments.
pub(super) struct Functions {
    /// By entry: the function, and its bytes of dynamic shared memory.
    pub entries: HashMap<String, (sys::CUfunction, u32)>,
    /// The encoder of tensor maps, if the device runs the kernels of sm_90a.
    pub sm90a: Option<Sm90a>,
}

/// A list that one call starts.
struct Graph {
    graph: sys::CUgraph,
    started: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
    /// The launches that its nodes hold now.
    list: Vec<Waiting>,
}

/// The graphs of one device.
pub(super) struct Graphs {
    /// In order of use, the most recent last.
    kept: Vec<Graph>,
    /// Hashes of lists, the latest last.
    seen: VecDeque<u64>,
    /// Known lists launched without a graph since the last replacement.
    without: u32,
    state: State,
}

/// Whether graphs are in use.
enum State {
    On,
    /// Off, for a reason that is not yet reported.
    Refused(String),
    Off,
}

/// Why a list was not started.
pub(super) enum Unstarted {
    /// The driver refuses graphs, for this reason. Launches kernel by kernel may continue.
    Refused(String),
    /// The device failed earlier: the call that reported the error, and the error.
    Failed(&'static str, CUresult),
}

impl From<String> for Unstarted {
    fn from(why: String) -> Self {
        Unstarted::Refused(why)
    }
}

/// Whether this is a sticky error of the device, which every later call returns again (CUDA driver API, CUresult).
pub(super) fn lasts(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
    )
}

fn check(call: &'static str, code: CUresult) -> Result<(), Unstarted> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code if lasts(code) => Err(Unstarted::Failed(call, code)),
        code => Err(Unstarted::Refused(format!("{call}: {code:?}"))),
    }
}

impl Graphs {
    /// The graphs of a loaded driver with this CUDA version.
    pub fn new(cuda: u32) -> Self {
        // SAFETY: only looks a name up; nothing of that type is called.
        let missing =
            |name: &&&str| unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()).is_err() };
        let state = match CALLS.iter().find(missing) {
            _ if cuda < SINCE => {
                let (major, minor) = (cuda / 1000, cuda % 1000 / 10);
                State::Refused(format!("the driver is that of CUDA {major}.{minor}, and graphs need 12.0"))
            }
            Some(name) => State::Refused(format!("the driver has no {name}")),
            None => State::On,
        };
        Graphs { kept: Vec::new(), seen: VecDeque::new(), without: 0, state }
    }

    /// Every list is launched kernel by kernel.
    pub fn off(&mut self) {
        self.free();
        self.state = State::Off;
    }

    /// Starts a list on `stream` if a graph exists or is built for it. Returns false if the caller must launch it
    /// kernel by kernel. Returns an error if the device failed, or, once, with the reason why all later lists are
    /// launched kernel by kernel.
    pub fn start(
        &mut self,
        list: &[Waiting],
        functions: &Functions,
        stream: sys::CUstream,
    ) -> Result<bool, Unstarted> {
        if list.len() < LEAST {
            return Ok(false);
        }
        let started = match std::mem::replace(&mut self.state, State::Off) {
            State::Off => return Ok(false),
            State::Refused(why) => Err(why.into()),
            State::On => self.known(list, functions, stream),
        };
        match started {
            Ok(_) => self.state = State::On,
            Err(Unstarted::Refused(_)) => self.free(),
            // Nothing is freed on a lost card.
            Err(Unstarted::Failed(..)) => {}
        }
        started
    }

    fn known(
        &mut self,
        list: &[Waiting],
        functions: &Functions,
        stream: sys::CUstream,
    ) -> Result<bool, Unstarted> {
        let same = |graph: &Graph| {
            graph.list.len() == list.len() && graph.list.iter().zip(list).all(|(a, b)| a.like(b))
        };
        let mut graph = match self.kept.iter().position(same) {
            Some(i) => self.kept.remove(i),
            None if self.again(list) && self.room() => Graph::new(list, functions)?,
            None => return Ok(false),
        };
        let done = graph.become_like(list, functions).and_then(|()| {
            // SAFETY: graph and stream live.
            check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.started, stream) })
        });
        self.kept.push(graph);
        done.map(|()| true)
    }

    /// Whether the list occurred before; remembers it if not.
    fn again(&mut self, list: &[Waiting]) -> bool {
        let mut hasher = DefaultHasher::new();
        list.iter().for_each(|waiting| waiting.launch().entry.hash(&mut hasher));
        let hash = hasher.finish();
        let known = self.seen.contains(&hash);
        if !known {
            self.seen.push_back(hash);
            if self.seen.len() > SEEN {
                self.seen.pop_front();
            }
        }
        known
    }

    /// Makes room for one more graph. Returns false if it is too early to replace one.
    fn room(&mut self) -> bool {
        if self.kept.len() < KEPT {
            return true;
        }
        self.without += 1;
        let time = self.without > PATIENCE;
        if time {
            self.without = 0;
            self.kept.remove(0).free();
        }
        time
    }

    pub fn any(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Frees all graphs. Their context must be current.
    pub fn free(&mut self) {
        self.kept.drain(..).for_each(Graph::free);
    }
}

impl Graph {
    /// Builds a chain of nodes, each after the one before it.
    fn new(list: &[Waiting], functions: &Functions) -> Result<Self, Unstarted> {
        let mut it = Graph { graph: null_mut(), started: null_mut(), nodes: Vec::new(), list: list.to_vec() };
        match it.build(functions) {
            Ok(()) => Ok(it),
            Err(why) => {
                if matches!(why, Unstarted::Refused(_)) {
                    it.free();
                }
                Err(why)
            }
        }
    }

    fn build(&mut self, functions: &Functions) -> Result<(), Unstarted> {
        // SAFETY: outputs are handles of this value, which gives back what it has in `free`.
        check("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut self.graph, 0) })?;
        for waiting in &self.list {
            let mut node = null_mut();
            let before = self.nodes.last().map_or(&[][..], std::slice::from_ref);
            let added = with_params(waiting, functions, |params| {
                // SAFETY: the node before is one of this graph; the driver copies the parameters.
                unsafe {
                    sys::cuGraphAddKernelNode_v2(&mut node, self.graph, before.as_ptr(), before.len(), params)
                }
            })?;
            check("cuGraphAddKernelNode", added)?;
            self.nodes.push(node);
        }
        // SAFETY: as above.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut self.started, self.graph, 0) };
        check("cuGraphInstantiate", made)
    }

    /// Updates the nodes that differ.
    fn become_like(&mut self, list: &[Waiting], functions: &Functions) -> Result<(), Unstarted> {
        for ((node, old), new) in self.nodes.iter().zip(&mut self.list).zip(list) {
            if old == new {
                continue;
            }
            let updated = with_params(new, functions, |params| {
                // SAFETY: the node is one of the graph that was instantiated; the driver copies the parameters.
                unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.started, *node, params) }
            })?;
            check("cuGraphExecKernelNodeSetParams", updated)?;
            old.clone_from(new);
        }
        Ok(())
    }

    fn free(self) {
        // SAFETY: each handle is freed once; work that was started continues.
        unsafe {
            if !self.started.is_null() {
                sys::cuGraphExecDestroy(self.started);
            }
            if !self.graph.is_null() {
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

/// Calls `f` with the node parameters of a launch.
fn with_params(
    waiting: &Waiting,
    functions: &Functions,
    call: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> CUresult,
) -> Result<CUresult, String> {
    let launch = waiting.launch();
    let known = functions.entries.get(launch.entry);
    let (func, shared) = *known.ok_or_else(|| format!("{} was never launched", launch.entry))?;
    let mut arguments = Arguments::of(functions.sm90a, launch.args)
        .map_err(|code| format!("{}: tensor map: {code:?}", launch.entry))?;
    let [grid_x, grid_y, grid_z] = launch.grid;
    Ok(call(&sys::CUDA_KERNEL_NODE_PARAMS {
        func,
        gridDimX: grid_x,
        gridDimY: grid_y,
        gridDimZ: grid_z,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        kernelParams: arguments.pointers(),
        extra: null_mut(),
        kern: null_mut(),
        // The current context.
        ctx: null_mut(),
    }))
}
