//! The binary: everything happens in `cli`.

use finetune::numeric::allowance::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
