//! Slurm, with recipes/slurm, in a real cluster whose nodes are this machine: what the tasks of a job compute has the
//! bytes of one process, whatever happens to tasks, nodes and the job.

use crate::cluster::{Cluster, RUN};

#[test]
fn four_tasks_give_the_bytes_of_one_process() {
    let Some(cluster) = Cluster::start(2) else { return };
    cluster.alone();
    // Two tasks per node with a card each. The tasks that start first wait for the token.
    let run = format!("-N2 --ntasks-per-node=2 --gres=gpu:2 finetune {RUN} --role auto -o out");
    let said = cluster.srun(&run, "cards=2");
    for part in [
        "on n[1-2], task 0 of 4: coordinates on :9",
        "on n[1-2], task 3 of 4: works for n1:9",
        "pretended 0 NVIDIA card (cpu",
        "pretended 1 NVIDIA card (cpu",
        "running  4 devices",
    ] {
        assert!(said.contains(part), "{part}\n{said}");
    }
    cluster.bench.same_adapter("alone", "out");

    // One node whose tasks get a card each from Slurm, and one where they share one.
    let run = format!("-N1 -n2 --gpus-per-task=1 finetune {RUN} --role auto -o bound");
    let said = cluster.srun(&run, "cards=2");
    assert!(said.contains("task 1 of 2: works for 127.0.0.1:9"), "{said}");
    assert!(said.contains("pretended 0 NVIDIA card (cpu"), "{said}");
    assert!(said.contains("pretended 1 NVIDIA card (cpu"), "{said}");
    cluster.bench.same_adapter("alone", "bound");
}

#[test]
fn a_batch_script_without_srun_is_refused() {
    let Some(cluster) = Cluster::start(2) else { return };
    let job = cluster.batch("-N2 -n2 --wrap", "'finetune demo --role auto'");
    assert_eq!(cluster.end(job), "FAILED 78:0", "{}", cluster.said(job));
    assert!(
        cluster.said(job).contains("has 2 tasks, and srun has not started this one"),
        "{}",
        cluster.said(job)
    );
}

#[test]
fn killed_task_and_killed_node_change_no_byte() {
    let Some(cluster) = Cluster::start(3) else { return };
    cluster.alone();
    let job = cluster.job("-N3 --ntasks-per-node=1", RUN, "slow=20");
    cluster.step(job, 2);
    cluster.kill(job, 1);
    cluster.step(job, 3);
    // The daemon of the node, its step and its task.
    cluster.kill_node(job, 2);
    assert_eq!(cluster.end(job), "COMPLETED 0:0", "{}", cluster.said(job));
    cluster.same_as_alone(job);
    assert!(cluster.said(job).contains("left"), "{}", cluster.said(job));
}

#[test]
fn requeued_job_resumes_to_the_same_bytes() {
    let Some(cluster) = Cluster::start(2) else { return };
    cluster.alone();
    let job = cluster.job("-N2 --ntasks-per-node=2", RUN, "slow=20");
    cluster.step(job, 3);
    cluster.scontrol(&format!("requeue {job}"));
    assert_eq!(cluster.end(job), "COMPLETED 0:0", "{}", cluster.said(job));
    cluster.same_as_alone(job);
    assert_eq!(cluster.starts(job), 2, "{}", cluster.said(job));
}

#[test]
fn job_that_is_terminated_before_its_limit_goes_on() {
    let Some(cluster) = Cluster::start(2) else { return };
    cluster.alone();
    // Slurm looks at limits every half minute. Steps take long until the signal has come.
    let job = cluster.job("-N2 --ntasks-per-node=1 --time=1 --signal=TERM@58", RUN, "slow=900");
    cluster.wait(job, "is stopped", || cluster.said(job).contains("go on with --resume"));
    cluster.faults("");
    assert_eq!(cluster.end(job), "COMPLETED 0:0", "{}", cluster.said(job));
    cluster.same_as_alone(job);
    assert_eq!(cluster.starts(job), 2, "{}", cluster.said(job));
}

#[test]
fn array_runs_beside_each_other_on_the_same_nodes() {
    let Some(cluster) = Cluster::start(2) else { return };
    cluster.alone();
    let lines = format!("{RUN}\n{RUN} --seed '7'\n");
    cluster.bench.file("runs.txt", &lines);
    let job = cluster.job("--array=1-2 -N2 --ntasks-per-node=1 --cpus-per-task=2", "runs.txt", "");
    assert_eq!(cluster.end(job), "COMPLETED 0:0 COMPLETED 0:0", "{}", cluster.said(job));
    let runs = cluster.runs();
    assert_eq!(runs.len(), 2, "{runs:?}");
    let same = runs.iter().filter(|run| cluster.adapter(run) == cluster.adapter("alone")).count();
    assert_eq!(same, 1, "the other one has another seed");
}
