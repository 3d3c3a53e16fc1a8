//! The meaning of a line of PTX, determined once when a kernel is read: execution does not parse text.

use super::wmma::Wmma;

/// A 32-lane value as bits; narrower types use the low bits.
pub type Lanes = [u64; 32];

/// Computes all lanes: one call for a statement, with a loop that the compiler can vectorise.
pub type Each<const N: usize> = Box<dyn Fn([&Lanes; N]) -> Lanes + Send + Sync>;

/// One statement.
pub struct Ins {
    /// Line of the file, from 1.
    pub line: usize,
    /// `@%p` or `@!%p`: the register, and the value with which the statement is executed.
    pub guard: Option<(usize, bool)>,
    pub op: Op,
    pub args: Vec<Arg>,
}

/// The address space of a load or store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    Param,
    Global,
    Shared,
}

/// How `shfl.sync` selects the lane that it reads.
#[derive(Debug, Clone, Copy)]
pub enum Shuffle {
    Butterfly,
    Index,
    Down,
    Up,
}

pub enum Op {
    /// dst = f(a)
    One(Each<1>),
    /// dst = f(a, b)
    Two(Each<2>),
    /// dst = f(a, b, c)
    Three(Each<3>),
    /// `mov.b32 %r, {%a, %b}`: parts of the given bits to one register.
    Pack(u32),
    /// `mov.b32 {%a, %b}, %r`
    Unpack(u32),
    /// Bytes per element; a vector if the first argument is one.
    Load(Space, usize),
    /// `ld.global.nc`: the memory is constant while the kernel runs.
    LoadConstant(usize),
    /// Bytes per element.
    Store(Space, usize),
    Shuffle(Shuffle),
    Barrier,
    WarpBarrier,
    Branch,
    Exit,
    /// Matrices, transposed.
    LoadMatrix(usize, bool),
    /// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`
    Multiply,
    /// `wmma` m16n16k16, f16 factors and f32 sums.
    Wmma(Wmma),
    /// Bytes copied to shared memory asynchronously.
    CopyAsync(usize),
    CommitGroup,
    /// Waits until at most this number of groups is pending.
    WaitGroup,
    /// mbarriers: initialize, make visible to the copy engine, arrive (with expected bytes), test whether a phase is
    /// complete.
    BarrierInit,
    BarrierFence,
    Arrive,
    ArriveExpect,
    TryWait,
    /// `setmaxnreg`: whether it increases the number.
    Registers(bool),
    /// `cp.async.bulk.tensor.2d` to shared memory.
    CopyBox,
    /// `wgmma.mma_async` m64nNk16, its fence, its commit and its wait.
    MultiplyAsync(usize),
    MultiplyFence,
    MultiplyCommit,
    MultiplyWait,
}

impl Op {
    /// Opcodes by which warps wait for each other or for the copy engine, without barriers.
    pub fn orders(&self) -> bool {
        use Op::{Arrive, ArriveExpect, BarrierFence, BarrierInit, Registers, TryWait};
        matches!(self, BarrierInit | BarrierFence | Arrive | ArriveExpect | TryWait | Registers(_))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Thread,
    Threads,
    Block(usize),
    Blocks(usize),
    Lane,
}

#[derive(Debug)]
pub enum Arg {
    Reg(usize),
    Imm(u64),
    Special(Special),
    /// `[base + offset]`
    Address(Box<Arg>, i64),
    /// `[name]` of a parameter: its index.
    Param(usize),
    Vector(Vec<Arg>),
    /// Index of a statement.
    Label(usize),
    /// `[map, {column, row}]`
    Tensor(Box<Arg>, Vec<Arg>),
    /// `_`: discarded.
    Sink,
}

/// One parameter of an entry.
#[derive(Debug)]
pub struct Param {
    pub name: String,
    pub bytes: usize,
}

/// One `.entry`.
pub struct Kernel {
    /// The name of the entry.
    pub name: String,
    /// In the order of a launch's arguments.
    pub params: Vec<Param>,
    /// Their names.
    pub registers: Vec<String>,
    /// Bytes of `.shared` declarations.
    pub shared: usize,
    /// It has `.extern .shared`, with the size of the launch.
    pub dynamic: bool,
    /// `.reqntid`: threads of a block.
    pub threads: u32,
    /// Its statements.
    pub body: Vec<Ins>,
}
