//! OLMo 3: an OLMo 2 with three sliding layers to each full one; only full layers have scaled rotary frequencies.

use super::{Family, OLMO2, WINDOW, Windows};

/// OLMo 3.
pub const OLMO3: Family = Family {
    name: "Olmo3",
    releases: &["OLMo 3"],
    model_type: "olmo3",
    // llama.cpp stores it as an OLMo 2 with windows.
    gguf_mark: Some(WINDOW),
    gguf_lists_windows: true,
    windows: Windows::Pattern(4, 4096),
    rope_theta: 500_000.0,
    local_rope_theta: Some("rope_theta"),
    ..OLMO2
};
