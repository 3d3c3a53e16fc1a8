//! Sliding windows of attention. With a window of w, a query at place i sees the keys at the places j of its row with
//! 0 <= i - j < w. The host gives 2^30 for no window: no row is as long, and sums of places and windows stay below 2^32.

use crate::{Text, Uses};

/// The parameter of all kernels.
pub const PARAM: (&str, &str) = ("u32", "window");

/// `%j0` = the first key that the query at place `{place}` of its row sees, rounded down to a multiple of `step`.
pub fn first_tile(t: &mut Text, place: &str, step: usize) {
    let uses = Uses { reads: &format!(".u32 %window, {place}"), changes: ".u32 %j0", scratch: ".u32 %x, %y" };
    let t = &mut t.part("first_tile", &uses);
    t.code(format!(
        "add.u32 %x, {place}, 1; min.u32 %y, %window, %x; sub.u32 %j0, %x, %y; and.b32 %j0, %j0, -{step}"
    ));
}

/// `%end` = the token after the last query that sees a key of this block.
pub fn last_query(t: &mut Text) {
    let uses = Uses { reads: ".u32 %window, %first, %count, %stop", changes: ".u32 %end", ..Uses::default() };
    let t = &mut t.part("last_query", &uses);
    t.code(
        "add.u32 %end, %first, %count; sub.u32 %end, %end, 1; add.u32 %end, %end, %window; min.u32 %end, %end, %stop",
    );
}
