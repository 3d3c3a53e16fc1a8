//! Environments of every engine, as they were read from it or as its documents give them.

use super::launch::{first_host, nth_count};
use super::*;

/// Variables of a task of Slurm 22.05, read from one.
const SLURM: &str = "SLURM_JOB_ID=812 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 \
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2) \
    SLURM_CPUS_ON_NODE=8";
const INDEXED: &str = "JOB_COMPLETION_INDEX=0 HOSTNAME=ft-0";
const TORCH: &str = "TORCHELASTIC_RUN_ID=a7 RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=gpu1 \
    MASTER_PORT=29500";
const MPI: &str = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 \
    OMPI_COMM_WORLD_LOCAL_SIZE=1";
const SKY: &str =
    "SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_IPS=10.0.0.4 SKYPILOT_TASK_ID=sky-7_train";

/// The variables of `base`, with those of `changes` in their place; `NAME=` unsets one.
fn environment(base: &str, changes: &str) -> Vec<(String, String)> {
    let pairs = |text: &str| -> Vec<(String, String)> {
        text.split_whitespace().filter_map(|w| w.split_once('=')).map(|(n, v)| (n.into(), v.into())).collect()
    };
    let mut all = pairs(changes);
    all.extend(pairs(base));
    all
}

fn expanded(variables: &[(String, String)], typed: &str) -> Result<(String, Vec<Vec<Typed>>), Refusal> {
    let read = |name: &str| variables.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let flag = |(key, value): (&str, &str)| Typed {
        key: key.into(),
        values: vec![value.replace('~', " ")],
        source: Origin::Flag,
    };
    let mut layers = vec![typed.split_whitespace().filter_map(|w| w.split_once('=')).map(flag).collect()];
    let line = expand(&mut layers, &read, 8)?.unwrap_or_default();
    Ok((line, layers))
}

/// Checks the options of the engine's layer, and the line without its beginning.
#[track_caller]
fn check(base: &str, changes: &str, typed: &str, options: &str, said: &str) {
    let (line, layers) = expanded(&environment(base, changes), &format!("role=auto {typed}")).unwrap();
    let got: Vec<String> = layers[1].iter().map(|t| format!("{}={}", t.key, t.values.concat())).collect();
    assert_eq!(got.join(" "), options, "{base} {changes}");
    assert_eq!(line, format!("--role auto: {said}"), "{base} {changes}");
    assert!(layers[1].iter().all(|t| t.source == Origin::Computed(line.clone())));
    assert!(!layers[0].iter().any(|t| t.key == "role"), "the typed word is replaced");
}

#[track_caller]
fn refused(base: &str, changes: &str, part: &str) {
    let refusal = expanded(&environment(base, changes), "role=auto").unwrap_err();
    assert!(refusal.code() == 78 && refusal.line.contains(part), "{refusal}");
}

#[test]
fn other_roles_are_left_as_they_are() {
    for typed in ["role=worker coordinator=h:1", "rank=8", ""] {
        let (line, layers) = expanded(&environment(SLURM, ""), typed).unwrap();
        assert_eq!((line.as_str(), layers.len()), ("", 1), "{typed}");
    }
    // A higher layer decides.
    let layer =
        |role: &str| vec![Typed { key: "role".into(), values: vec![role.into()], source: Origin::Default }];
    let mut layers = vec![layer("single"), layer("auto")];
    assert_eq!(expand(&mut layers, &|_| None, 8), Ok(None));
    let mut layers = vec![layer("auto"), layer("worker")];
    assert!(expand(&mut layers, &|_| None, 8).unwrap().is_some());
    assert_eq!(layers[2][0].values, ["single"]);
    assert!(layers[1].is_empty(), "the lower one does not come back");
}

#[test]
fn without_an_engine_it_trains_alone() {
    check("", "", "", "role=single", "no engine has started this process: trains alone");
    check(
        "",
        "SLURM_PROCID= HOSTNAME=a SLURM_JOB_ID=7",
        "",
        "role=single",
        "no engine has started this process: trains alone",
    );
}

#[test]
fn slurm_tasks_find_the_first_node() {
    let place = |task: usize| format!("Slurm job 812 on n[1-2], task {task} of 4");
    let bind = "role=coordinator bind=:9684 expect_workers=4 tasks";
    check(
        SLURM,
        "",
        "",
        &format!("gpus=1/2 threads=4 {bind}"),
        &format!("{}: coordinates on :9684 and computes", place(0)),
    );
    check(
        SLURM,
        "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_CPUS_PER_TASK=3",
        "",
        "gpus=2/2 threads=3 role=worker coordinator=n1:9684",
        &format!("{}: works for n1:9684", place(3)),
    );
    // Tasks of one node need no name. Steps of a job have their own ports.
    let one = "SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=4 SLURM_STEP_NODELIST=n7 SLURM_STEP_ID=2";
    check(
        SLURM,
        one,
        "",
        "gpus=1/4 threads=2 role=coordinator bind=127.0.0.1:9686 expect_workers=4 tasks",
        "Slurm job 812 on n7, task 0 of 4: coordinates on 127.0.0.1:9686 and computes",
    );
    check(
        SLURM,
        &format!("{one} SLURM_PROCID=2 SLURM_LOCALID=2"),
        "",
        "gpus=3/4 threads=2 role=worker coordinator=127.0.0.1:9686",
        "Slurm job 812 on n7, task 2 of 4: works for 127.0.0.1:9686",
    );
    check(
        SLURM,
        "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1",
        "",
        "gpus=auto role=single",
        "Slurm job 812 on n[1-2], one task: trains alone",
    );
    let batch = "SLURM_STEP_ID= SLURM_STEP_NUM_TASKS= SLURM_STEP_TASKS_PER_NODE=";
    refused(SLURM, batch, "job 812 has 4 tasks, and srun has not started this one: put srun before it");
    check(
        SLURM,
        &format!("{batch} SLURM_NTASKS=1"),
        "",
        "gpus=auto role=single",
        "Slurm job 812, one task: trains alone",
    );
    refused(SLURM, "SLURM_PROCID=x", "SLURM_PROCID=x is not a number");
    refused(SLURM, "SLURM_PROCID=4", "task 4 of 4: ranks begin at 0");
    refused(SLURM, "SLURM_STEP_NODELIST=n[", "n[ is no list of nodes");
}

/// Read from Slurm 22.05: `--gres=gpu:2`, `--gpus-per-task=1`, `--gres=gpu:1` with two tasks on a node.
#[test]
fn tasks_of_a_node_share_its_cards() {
    let second = "SLURM_PROCID=1 SLURM_LOCALID=1";
    for (cards, gpus) in [
        ("SLURM_GPUS_ON_NODE=2 CUDA_VISIBLE_DEVICES=0,1", "2/2"),
        ("SLURM_GPUS_ON_NODE=2 CUDA_VISIBLE_DEVICES=1", "auto"),
        ("SLURM_GPUS_ON_NODE=1 CUDA_VISIBLE_DEVICES=0", "2/2"),
        ("SLURM_GPUS_ON_NODE=4 ROCR_VISIBLE_DEVICES=2,3", "auto"),
        ("", "2/2"),
    ] {
        let (_, layers) = expanded(&environment(SLURM, &format!("{second} {cards}")), "role=auto").unwrap();
        let got = layers[1].iter().find(|t| t.key == "gpus").unwrap();
        assert_eq!(got.values, [gpus], "{cards}");
    }
    // A wrapper of mpirun gave the task its card.
    let mpi = "OMPI_COMM_WORLD_LOCAL_SIZE=2 CUDA_VISIBLE_DEVICES=1";
    check(
        MPI,
        mpi,
        "",
        "gpus=auto threads=4 role=coordinator bind=127.0.0.1:9000 expect_workers=2 tasks",
        "mpirun, task 0 of 2: coordinates on 127.0.0.1:9000 and computes",
    );
}

#[test]
fn pods_of_an_indexed_job_find_the_pod_with_index_0() {
    check(
        INDEXED,
        "",
        "",
        "gpus=auto role=coordinator bind=:9000",
        "Indexed Job ft, task 0: coordinates on :9000 and computes",
    );
    check(
        INDEXED,
        "JOB_COMPLETION_INDEX=12 HOSTNAME=ft-12",
        "",
        "gpus=auto role=worker coordinator=ft-0.ft:9000",
        "Indexed Job ft, task 12: works for ft-0.ft:9000",
    );
    // A JobSet's Service has another name than its Job.
    check(
        INDEXED,
        "JOB_COMPLETION_INDEX=2 HOSTNAME=ft-node-0-2",
        "coordinator=ft-node-0-0.ft:9100",
        "gpus=auto role=worker coordinator=ft-node-0-0.ft:9100",
        "Indexed Job ft-node-0, task 2: works for ft-node-0-0.ft:9100",
    );
    // Kubeflow's Trainer.
    check(
        INDEXED,
        "JOB_COMPLETION_INDEX=1 HOSTNAME=tj-node-0-1 PET_NNODES=3 PET_MASTER_ADDR=tj-node-0-0.tj",
        "",
        "gpus=auto role=worker coordinator=tj-node-0-0.tj:9000",
        "Indexed Job tj-node-0, task 1 of 3: works for tj-node-0-0.tj:9000",
    );
    refused(
        INDEXED,
        "JOB_COMPLETION_INDEX=1 HOSTNAME=",
        "task 1: nothing names the machine of task 0: add --coordinator HOST:9000",
    );
}

#[test]
fn torchrun_and_its_variables_give_role_and_share() {
    check(
        TORCH,
        "",
        "",
        "gpus=1/2 threads=4 role=coordinator bind=:29501 expect_workers=4 tasks",
        "torchrun a7, task 0 of 4: coordinates on :29501 and computes",
    );
    check(
        TORCH,
        "RANK=3 LOCAL_RANK=1",
        "",
        "gpus=2/2 threads=4 role=worker coordinator=gpu1:29501",
        "torchrun a7, task 3 of 4: works for gpu1:29501",
    );
    check(
        TORCH,
        "RANK=1 TORCHELASTIC_RUN_ID= LOCAL_RANK= LOCAL_WORLD_SIZE=",
        "",
        "gpus=auto role=worker coordinator=gpu1:29501",
        "torchrun, task 1 of 4: works for gpu1:29501",
    );
    let pet = "PET_NODE_RANK=1 PET_NNODES=2 PET_MASTER_ADDR=tj-0.tj PET_MASTER_PORT=29500";
    check(
        pet,
        "",
        "",
        "gpus=auto role=worker coordinator=tj-0.tj:29501",
        "PyTorch job, task 1 of 2: works for tj-0.tj:29501",
    );
    refused(TORCH, "WORLD_SIZE=", "WORLD_SIZE is not set");
}

#[test]
fn mpi_launchers_and_skypilot_give_role_and_share() {
    check(
        MPI,
        "OMPI_COMM_WORLD_RANK=1",
        "coordinator=head",
        "gpus=auto role=worker coordinator=head:9000",
        "mpirun, task 1 of 2: works for head:9000",
    );
    refused(MPI, "OMPI_COMM_WORLD_RANK=1", "add --coordinator HOST:9000");
    let hydra = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
    check(
        hydra,
        "",
        "",
        "gpus=2/2 threads=4 role=worker coordinator=127.0.0.1:9000",
        "mpiexec, task 1 of 2: works for 127.0.0.1:9000",
    );
    check(
        SKY,
        "SKYPILOT_NODE_RANK=1",
        "",
        "gpus=auto role=worker coordinator=10.0.0.4:9000",
        "SkyPilot sky-7_train, task 1 of 2: works for 10.0.0.4:9000",
    );
}

/// A launcher in an allocation has ranks of its own.
#[test]
fn the_nearest_launcher_decides() {
    for (near, job) in [(TORCH, "torchrun"), (MPI, "mpirun"), (SLURM, "Slurm"), (INDEXED, "Indexed Job")] {
        let far = [INDEXED, SKY, "RANK=0 WORLD_SIZE=9", "PMI_RANK=0 PMI_SIZE=9"];
        let far: Vec<&str> = far.into_iter().filter(|far| *far != near).collect();
        let base = format!("{near} {} {SLURM}", if job == "Slurm" { far.join(" ") } else { String::new() });
        let base = if job == "Indexed Job" { format!("{near} {SKY}") } else { base };
        let (line, _) = expanded(&environment(&base, ""), "role=auto").unwrap();
        assert!(line.starts_with(&format!("--role auto: {job}")), "{line}");
    }
}

#[test]
fn typed_addresses_replace_those_of_the_engine() {
    let address = |typed: &str, changes: &str| {
        let (_, layers) = expanded(&environment(SLURM, changes), &format!("role=auto {typed}")).unwrap();
        let keys = ["bind", "coordinator"];
        let of = |layer: &Vec<Typed>| -> Vec<String> {
            layer
                .iter()
                .filter(|t| keys.contains(&t.key.as_str()))
                .map(|t| format!("{}={}", t.key, t.values.concat()))
                .collect()
        };
        (of(&layers[0]).join(" "), of(&layers[1]).join(" "))
    };
    let worker = "SLURM_PROCID=1";
    assert_eq!(address("bind=:9100", ""), ("bind=:9100".into(), "bind=:9100".into()));
    // A worker does not listen there.
    assert_eq!(address("bind=:9100", worker), (String::new(), "coordinator=n1:9100".into()));
    assert_eq!(address("bind=10.0.0.9:9100", worker), (String::new(), "coordinator=10.0.0.9:9100".into()));
    let typed = "coordinator=head:7000";
    assert_eq!(address(typed, ""), (typed.into(), "bind=:7000".into()));
    assert_eq!(address(typed, worker), (typed.into(), typed.into()));
}

#[test]
fn worker_takes_a_model_that_is_not_here_from_task_0() {
    let typed = "role=auto model=owner/name base_model=/no/such/model data=rows.jsonl";
    let (_, layers) = expanded(&environment(SLURM, "SLURM_PROCID=1"), typed).unwrap();
    let keys: Vec<&str> = layers[0].iter().map(|t| t.key.as_str()).collect();
    assert_eq!(keys, ["data"]);
    let (_, layers) = expanded(&environment(SLURM, "SLURM_PROCID=1"), "role=auto model=Cargo.toml").unwrap();
    assert_eq!(layers[0].len(), 1);
    let (_, layers) = expanded(&environment(SLURM, ""), typed).unwrap();
    assert_eq!(layers[0].len(), 3);
}

#[test]
fn lists_of_nodes_and_of_counts_are_read() {
    for (list, first) in [
        ("n1", Some("n1")),
        ("n[1-3,7]", Some("n1")),
        ("n[003-128]", Some("n003")),
        ("rack[2-3]gpu[01,05-09]-ib,login", Some("rack2gpu01-ib")),
        ("login,n[1-3]", Some("login")),
        ("n[7,1-3]", Some("n7")),
        ("", None),
        ("n[", None),
        ("n[]", None),
        ("n[a-b]", None),
        ("n]1", None),
        (",n1", None),
    ] {
        assert_eq!(first_host(list).as_deref(), first, "{list:?}");
    }
    for (counts, at, here) in [
        ("2", 0, Some(2)),
        ("2(x3),1", 2, Some(2)),
        ("2(x3),1", 3, Some(1)),
        ("2(x3),1", 4, None),
        ("4,2(x2)", 1, Some(2)),
        ("2(x", 0, None),
    ] {
        assert_eq!(nth_count(counts, at), here, "{counts:?} {at}");
    }
}
