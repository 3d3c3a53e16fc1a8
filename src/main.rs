//! The binary: everything happens in `cli`.

#![warn(clippy::unwrap_used)]

#[global_allocator]
static ALLOCATOR: finetune::support::allocator::Allocator = finetune::support::allocator::Allocator;

fn main() {
    finetune::cli::main()
}
