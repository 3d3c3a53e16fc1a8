//! The PTX kernels without a GPU: every kernel assembles for every architecture within the budget of its head, and
//! computes correctly in an interpreter, which implements the driver's interface.

mod assemble;
mod attention_grad_sm90a;
mod attention_reference;
mod attention_sm80;
mod attention_sm90a;
mod bench;
#[path = "../parity/case.rs"]
mod case;
mod cases;
mod copies;
mod delta_rule;
mod device;
mod estimate;
mod files;
mod first_contact;
mod fused;
mod graphs;
mod graphs_sm90a;
mod machine_code;
mod marks;
mod model;
mod mutations;
mod mutations_flash_sm90a;
mod mutations_grad_sm90a;
mod mutations_sm90a;
#[path = "../op_cases/mod.rs"]
mod op_cases;
mod opcodes;
mod opcodes_sm70;
mod opcodes_sm90a;
mod profile;
mod skinny;
mod sm70;
mod sm90a;
mod standin;
mod step;
mod tensor;
mod timings;
#[path = "../parity/train.rs"]
mod train;
mod whole_tiles;
mod widen;

use ptx_interpreter as interpreter;
