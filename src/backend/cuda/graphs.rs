//! Lists of launches that a device has seen before are graphs: a chain of kernel nodes, started by one call of the
//! driver. A list of the same kernels on other numbers (another length, other addresses) is the same graph, of which
//! the nodes that differ are told so; what was started before keeps its own numbers (CUDA driver API,
//! cuGraphExecKernelNodeSetParams). The first time a list comes it is launched kernel by kernel: that compiles what it
//! needs, and what comes only once costs nothing. Where more lists take turns than graphs are kept, the others go kernel
//! by kernel, but for a few. Whatever a driver refuses here, the caller launches kernel by kernel.
//! What the device did wrong before is told as it is, and not taken for a refusal.

use super::list::Waiting;
use super::tensor_map::{Arguments, Sm90a};
use cudarc::driver::sys::{self, CUresult};
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::null_mut;

/// The driver whose calls these are, CUDA 12.0: an older one launches kernel by kernel.
const SINCE: u32 = 12_000;
/// What is called. A driver that lacks one of them would end the process at its first call.
const CALLS: [&str; 7] = [
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];
/// Shorter lists are as fast without.
const LEAST: usize = 8;
/// Graphs that are kept: a microbatch whose losses are computed in more parts is a list of its own, and so is an evaluation.
/// No more, because each takes memory of the device for every node, which nobody counts beforehand.
const KEPT: usize = 8;
/// Lists that go kernel by kernel, though they are known, before one takes the place of a graph: where more of them take
/// turns than graphs are kept, one in so many is built, and not each for a single start.
const PATIENCE: u32 = 16;
/// Lists that are known again.
const SEEN: usize = 64;

/// What launches need of a device beside their numbers.
pub(super) struct Functions {
    /// By entry: the function, and the bytes of shared memory that a launch gives it.
    pub entries: HashMap<String, (sys::CUfunction, u32)>,
    /// What encodes tensor maps, where it runs the kernels of sm_90a.
    pub sm90a: Option<Sm90a>,
}

/// A list that can be started at once.
struct Graph {
    graph: sys::CUgraph,
    started: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
    /// What its nodes do now.
    list: Vec<Waiting>,
}

/// The graphs of one device.
pub(super) struct Graphs {
    /// The one that was used last is the last one.
    kept: Vec<Graph>,
    /// Hashes of lists, the latest last.
    seen: VecDeque<u64>,
    /// Lists that were known and went without, since one was built in the place of another.
    without: u32,
    state: State,
}

/// Whether there may be graphs.
enum State {
    On,
    /// Not, for a reason that nobody has heard yet.
    Refused(String),
    Off,
}

/// Why a list was not started.
pub(super) enum Unstarted {
    /// Graphs are refused, in words: kernel by kernel it may go on.
    Refused(String),
    /// The device has failed before: the call that told, and how.
    Failed(&'static str, CUresult),
}

impl From<String> for Unstarted {
    fn from(why: String) -> Self {
        Unstarted::Refused(why)
    }
}

/// Whether it is an error of the device, which every later call tells again, whatever it asks (CUDA driver API, CUresult).
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
    /// Of a driver of that CUDA version, which is loaded.
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

    /// Starts a list on `stream` where it is or becomes a graph. False where it has to be launched kernel by kernel;
    /// an error where from now on all have to be, for that reason, which is said once, or where the device has failed.
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
            Err(_) => self.free(),
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

    /// Whether a list comes for the second time, at least.
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

    /// Makes room for one more, where it is time for it.
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

    /// Whether there are any.
    pub fn any(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Gives all back; the context that they were made in is current.
    pub fn free(&mut self) {
        self.kept.drain(..).for_each(Graph::free);
    }
}

impl Graph {
    /// A chain of nodes, each behind the one before it.
    fn new(list: &[Waiting], functions: &Functions) -> Result<Self, Unstarted> {
        let mut it = Graph { graph: null_mut(), started: null_mut(), nodes: Vec::new(), list: list.to_vec() };
        match it.build(functions) {
            Ok(()) => Ok(it),
            Err(why) => {
                it.free();
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

    /// Tells nodes that differ what they do from now on.
    fn become_like(&mut self, list: &[Waiting], functions: &Functions) -> Result<(), Unstarted> {
        for ((node, old), new) in self.nodes.iter().zip(&mut self.list).zip(list) {
            if old == new {
                continue;
            }
            let told = with_params(new, functions, |params| {
                // SAFETY: the node is one of the graph that was instantiated; the driver copies the parameters.
                unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.started, *node, params) }
            })?;
            check("cuGraphExecKernelNodeSetParams", told)?;
            old.clone_from(new);
        }
        Ok(())
    }

    fn free(self) {
        // SAFETY: each is given back once; what has been started goes on.
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

/// A launch as a node has it, for the length of a call.
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
        // The current one.
        ctx: null_mut(),
    }))
}
