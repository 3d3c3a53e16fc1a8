//! `hypot` and `hypotf` for programs linked to glibc. glibc's own have symbol version 2.35, so the program would not
//! start on RHEL 9 and its relatives (2.34). Only `naga` needs them: it evaluates `asinh` of a constant through the
//! standard library. No kernel of this folder has such a constant, so no result depends on these functions.

/// sqrt(x^2 + y^2), as in C.
#[unsafe(no_mangle)]
pub extern "C" fn hypot(x: f64, y: f64) -> f64 {
    libm::hypot(x, y)
}

/// The same in f32.
#[unsafe(no_mangle)]
pub extern "C" fn hypotf(x: f32, y: f32) -> f32 {
    libm::hypotf(x, y)
}
