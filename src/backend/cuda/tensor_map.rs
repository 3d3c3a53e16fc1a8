//! Tensor maps, as the driver encodes them for the copy engine. CUDA 12.0 brought the call: it is looked up by name, so
//! that a driver without it is told, not a panic.

use super::TensorMap;
use cudarc::driver::sys::{
    self, CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use std::ffi::c_void;
use std::ptr::without_provenance_mut;

/// cuTensorMapEncodeTiled.
pub(super) type Encode = unsafe extern "C" fn(
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

/// The driver's call, where it has one. Only where the driver is known to be there.
pub(super) fn encode() -> Option<Encode> {
    // SAFETY: the library is loaded (cuInit went through) and never unloaded; the type is that of cuda.h.
    unsafe { sys::culib().get::<Encode>(b"cuTensorMapEncodeTiled").ok().map(|f| *f) }
}

/// A map as kernels take it; 16 bytes of alignment of address and rows are the driver's to check.
pub(super) fn encoded(encode: Encode, map: &TensorMap) -> Result<CUtensorMap, CUresult> {
    let mut out = CUtensorMap { opaque: [0; 16] };
    let (sizes, strides) = ([u64::from(map.cols), u64::from(map.rows)], [map.stride]);
    let (part, steps) = ([64, map.box_rows], [1, 1]);
    let address = usize::try_from(map.address).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: two dimensions, so two sizes, one stride and two edges; the driver reads them and writes `out`, which is
    // aligned as its type says. The address is only written down.
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
