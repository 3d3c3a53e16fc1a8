//! Arguments of a launch in the driver's form, and tensor maps for the copy engine. CUDA 12.0 introduced the encoding
//! call: it is looked up by name, so that an older driver is detected instead of causing a panic.

use super::{Arg, TensorMap, kernels};
use cudarc::driver::sys::{
    self, CUdevice_attribute, CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill,
    CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use std::ffi::c_void;
use std::ptr::without_provenance_mut;

/// cuTensorMapEncodeTiled.
type Encode = unsafe extern "C" fn(
    *mut CUtensorMap,
    CUtensorMapDataType,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    CUtensorMapInterleave,
    CUtensorMapSwizzle,
    CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill,
) -> CUresult;

/// Properties of a device that runs the kernels of sm_90a.
#[derive(Clone, Copy)]
pub(super) struct Sm90a {
    encode: Encode,
    /// Multiprocessors.
    pub processors: u32,
}

/// The properties of a device of this capability, with a driver that reads PTX up to `reads`. Needs cuInit only.
pub(super) fn sm90a(device: sys::CUdevice, capability: (u32, u32), reads: u32) -> Option<Sm90a> {
    if !kernels::find("product_sm90a.ptx")?.runs_on(capability, reads) {
        return None;
    }
    let (mut n, asked) = (0, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    // SAFETY: writes one integer, the device is one of cuDeviceGet. The library is loaded and never unloaded; the type
    // of the symbol, which may be missing, is that of cuda.h.
    let (code, encode) = unsafe {
        let code = sys::cuDeviceGetAttribute(&mut n, asked, device);
        (code, sys::culib().get::<Encode>(b"cuTensorMapEncodeTiled").ok().map(|f| *f))
    };
    let processors = u32::try_from(n).ok().filter(|n| *n > 0 && code == CUresult::CUDA_SUCCESS)?;
    Some(Sm90a { encode: encode?, processors })
}

/// Checks that a function whose warpgroups redistribute registers was compiled for the number in its head. With another
/// number the warpgroups would wait for registers for ever.
pub(super) fn divides(file: &str, function: sys::CUfunction) -> Result<(), String> {
    let Some(wanted) = kernels::find(file).and_then(kernels::Source::divided) else { return Ok(()) };
    let (mut has, asked) = (0, sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
    // SAFETY: writes one integer; the function is that of a module which lives.
    match unsafe { sys::cuFuncGetAttribute(&mut has, asked, function) } {
        CUresult::CUDA_SUCCESS if u32::try_from(has) == Ok(wanted) => Ok(()),
        CUresult::CUDA_SUCCESS => Err(format!("compiled for {has} registers, and it divides {wanted}")),
        code => Err(format!("registers: {code:?}")),
    }
}

/// The arguments of a launch in the driver's form, and a pointer to each.
pub(super) struct Arguments {
    pointers: Vec<*mut c_void>,
    _words: Vec<u64>,
    _maps: Vec<CUtensorMap>,
}

impl Arguments {
    /// Encodes the maps. The error is the driver's.
    pub fn of(sm90a: Option<Sm90a>, args: &[Arg]) -> Result<Self, CUresult> {
        let map = |arg: &Arg| if let Arg::Tensor(map) = arg { Some(*map) } else { None };
        let device = || sm90a.ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        let encoded = args.iter().filter_map(map).map(|map| encoded(device()?.encode, &map));
        let mut maps = encoded.collect::<Result<Vec<_>, _>>()?;
        let mut words: Vec<u64> = args.iter().map(|a| bits(*a)).collect();
        let mut pointers: Vec<*mut c_void> = words.iter_mut().map(|w| (w as *mut u64).cast()).collect();
        let tensors = args.iter().zip(&mut pointers).filter(|(a, _)| matches!(a, Arg::Tensor(_)));
        for ((_, pointer), map) in tensors.zip(&mut maps) {
            *pointer = (map as *mut CUtensorMap).cast();
        }
        Ok(Arguments { pointers, _words: words, _maps: maps })
    }

    /// One pointer per parameter, to at least its bytes (low bytes first), valid as long as this value.
    pub fn pointers(&mut self) -> *mut *mut c_void {
        self.pointers.as_mut_ptr()
    }
}

/// An argument in the low bytes of a word.
fn bits(arg: Arg) -> u64 {
    match arg {
        Arg::Address(x) => x,
        Arg::U32(x) => u64::from(x).to_le(),
        Arg::F32(x) => u64::from(x.to_bits()).to_le(),
        // `Beyond` is refused before the launch; a tensor is passed as a map.
        Arg::Beyond(_) | Arg::Tensor(_) => 0,
    }
}

/// A map as kernels take it. The driver checks that address and row stride are multiples of 16 bytes.
fn encoded(encode: Encode, map: &TensorMap) -> Result<CUtensorMap, CUresult> {
    let mut out = CUtensorMap { opaque: [0; 16] };
    let (sizes, strides) = ([u64::from(map.cols), u64::from(map.rows)], [map.stride]);
    let (part, steps) = ([64, map.box_rows], [1, 1]);
    let address = usize::try_from(map.address).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: two dimensions, so two sizes, one stride and two edges; the driver reads them and writes `out`, which is
    // aligned as its type says. The address is stored and not read.
    let code = unsafe {
        encode(
            &mut out,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            without_provenance_mut(address),
            sizes.as_ptr(),
            strides.as_ptr(),
            part.as_ptr(),
            steps.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    if code == CUresult::CUDA_SUCCESS { Ok(out) } else { Err(code) }
}
