//! The binary: everything happens in `cli`.

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
