//! The binary: everything happens in `cli`.

#[global_allocator]
static ALLOCATOR: finetune::numeric::allocator::Allocator = finetune::numeric::allocator::Allocator;

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
