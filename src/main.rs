//! The binary: everything happens in `cli`.

mod allocator;

#[global_allocator]
static ALLOCATOR: allocator::OrLine = allocator::OrLine;

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
