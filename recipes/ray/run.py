"""One run on the nodes of a Ray cluster: a task per node, or per card. Task 0 is on the head, coordinates and computes.

command   python recipes/ray/run.py --tasks 4 -- MODEL --data rows.jsonl --output runs/ray     # any options of a run
          python recipes/ray/run.py --tasks 8 --gpus 1 -- ...      # a card for each task, on as many nodes as they need
needs     ray and the file `finetune` on all nodes; FINETUNE_TOKEN, which `finetune token` prints, or a home folder that they
          share; a port of the head (--port). Paths are on the head; workers get rows and model from task 0
expect    exit code 0 and the adapter on the head. A task that is lost with its node starts again on another one. If the
          head is lost, the same command goes on from the newest checkpoint
tried     Ray 2.60, two nodes that were one machine, CPUs, by hand (docs/systems.md). Not on a real cluster, not with GPUs
note      FINETUNE_ variables, the token too, are part of the job's environment, which Ray shows in its dashboard. Ray hides cards
          from tasks without --gpus
"""

import argparse
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

FOR_A_PERSON = (2, 3, 78)  # codes with which a retry is pointless


class Again(Exception):
    pass


@ray.remote(max_retries=20, retry_exceptions=[Again])
def task(rank, tasks, head, port, folder, words):
    variables = {"RANK": rank, "WORLD_SIZE": tasks, "MASTER_ADDR": head, "MASTER_PORT": port - 1}
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    words = ["finetune", *words, "--role", "auto", "--resume"]
    code = subprocess.run(words, env=env, cwd=folder if rank == 0 else None).returncode
    if code != 0 and code not in FOR_A_PERSON:
        raise Again(f"task {rank} ended with code {code}")
    return code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, required=True, help="number of tasks, task 0 included")
    parser.add_argument("--cpus", type=int, default=1, help="processors of a task")
    parser.add_argument("--gpus", type=int, default=0, help="cards of a task; 0: one task per node")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("words", nargs="+", metavar="-- MODEL and options of the run")
    args = parser.parse_args()

    names = [name for name in os.environ if name.startswith("FINETUNE_")]
    variables = {"FINETUNE_THREADS": str(args.cpus), **{name: os.environ[name] for name in names}}
    ray.init(address="auto", runtime_env={"env_vars": variables})
    resources = {"CPU": args.cpus, **({"GPU": args.gpus} if args.gpus else {})}
    bundles = [dict(resources) for _ in range(args.tasks)]
    bundles[0]["node:__internal_head__"] = 0.001
    group = placement_group(bundles, strategy="PACK" if args.gpus else "STRICT_SPREAD")
    if not group.wait(600):
        sys.exit(f"the cluster has no room for {args.tasks} tasks with {resources} each")
    head = next(node["NodeManagerAddress"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])

    def start(rank):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        own = bundles[rank].get("node:__internal_head__")
        more = {"resources": {"node:__internal_head__": own}} if own else {}
        options = task.options(num_cpus=args.cpus, num_gpus=args.gpus, scheduling_strategy=place, **more)
        return options.remote(rank, args.tasks, head, args.port, os.getcwd(), args.words)

    running = [start(rank) for rank in range(args.tasks)]
    code = ray.get(running[0])
    if args.tasks > 1:
        # The others end with it. One that has just been started again finds no run, and ends with this program.
        ray.wait(running[1:], num_returns=args.tasks - 1, timeout=30)
    sys.exit(code)


main()
