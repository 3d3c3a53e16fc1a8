#!/usr/bin/env bash
# Kills, freezes and restarts coordinators, workers and single processes at random moments, and compares the bytes of
# every adapter with those of an undisturbed process. Prints the seed and the counts of all disturbances.
#
# usage: benches/chaos.sh [BLOWS [SEED]]
#   BLOWS  number of disturbances (default 1000)
#   SEED   repeats an earlier sequence (default: from the clock)
# cost: at most 30 minutes; stops after the run with the last disturbance.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FINETUNE_CHAOS_BLOWS=${1:-1000} FINETUNE_CHAOS_SECONDS=1800
[ -z "${2:-}" ] || export FINETUNE_CHAOS_SEED=$2
exec cargo test --release --locked --test cluster_runs random_kills_and_freezes -- --nocapture
