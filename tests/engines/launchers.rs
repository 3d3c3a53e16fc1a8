//! Launchers of MPI, and processes with the variables of torchrun.

use crate::cli_fixture::Bench;
use crate::cluster::{RUN, bench, launcher, said};
use std::net::TcpListener;
use std::process::{Command, Stdio};

/// A port that is free now.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn alone(bench: &Bench) {
    bench.ok(&format!("{RUN} --gpus cpu -q -o alone"));
}

#[test]
fn tasks_of_mpirun_give_the_bytes_of_one_process() {
    let programs = [
        ("mpirun.openmpi", "mpirun", "--allow-run-as-root --oversubscribe --bind-to none"),
        ("mpiexec.hydra", "mpiexec", ""),
    ];
    for (program, name, options) in programs {
        let found =
            Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_err() {
            assert!(std::env::var_os("FINETUNE_NEED_MPI").is_none(), "{program} must be installed here");
            println!("skipped: no {program}");
            continue;
        }
        let bench = bench();
        alone(&bench);
        let run = format!("\"$FINETUNE\" {RUN} --role auto --gpus cpu --bind 127.0.0.1:{} -o out", port());
        let out = launcher(&bench, &format!("{program} {options} -n 3 {run}")).output().unwrap();
        let said = said(&out);
        assert!(out.status.success(), "{said}");
        assert!(said.contains(&format!("{name}, task 2 of 3: works for 127.0.0.1:")), "{said}");
        bench.same_adapter("alone", "out");
    }
}

/// Task 0 replaces the word by a number, which the command line of the others does not have.
#[test]
fn tasks_accept_what_task_0_computes_from_their_options() {
    let bench = bench();
    let (port, run) = (port(), RUN.replace("--micro-batch-tokens 64", "--micro-batch-tokens auto"));
    let start = |rank: &str| {
        let run = format!("exec \"$FINETUNE\" {run} --role auto --gpus cpu --max-steps 1 -o out");
        let mut command = launcher(&bench, &run.replace("--max-steps 8", ""));
        command.env("RANK", rank).env("WORLD_SIZE", "2").env("MASTER_ADDR", "localhost");
        command.env("MASTER_PORT", (port - 1).to_string());
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for task in [start("0"), start("1")] {
        let out = task.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
    }
}

/// The coordinator is killed and started again by its launcher; so is a worker.
#[test]
fn restarted_tasks_of_torchrun_join_again() {
    let bench = bench();
    alone(&bench);
    let port = port();
    let start = |rank: usize| {
        let run = format!("exec \"$FINETUNE\" {RUN} --role auto --gpus cpu -o out --resume");
        let torch = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3)];
        let mut command = launcher(&bench, &run);
        command.envs(torch.map(|(name, value)| (name, value.to_string())));
        command.env("TORCHELASTIC_RUN_ID", "t").env("MASTER_PORT", (port - 1).to_string());
        command.env("MASTER_ADDR", "localhost").env("FINETUNE_INJECT", "slow=20");
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    // A worker starts before there is a token.
    let mut tasks: Vec<_> = [2, 1, 0].into_iter().map(start).collect();
    let steps = |count: usize| {
        let log = || std::fs::read_to_string(bench.path("out/metrics.jsonl")).unwrap_or_default();
        let began = std::time::Instant::now();
        while log().matches("\"event\":\"step\"").count() < count {
            assert!(began.elapsed().as_secs() < 300, "no step {count}: {}", log());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    for (steps_before, task, rank) in [(2, 1, 1), (4, 2, 0)] {
        steps(steps_before);
        tasks[task].kill().unwrap();
        tasks[task].wait().unwrap();
        tasks[task] = start(rank);
    }
    for (mut task, rank) in tasks.into_iter().zip([2, 1, 0]) {
        assert!(task.wait().unwrap().success(), "task {rank}");
    }
    bench.same_adapter("alone", "out");
}
