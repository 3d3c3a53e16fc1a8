#!/usr/bin/env bash
# Damages every format that the program reads, in process, and checks how each input is read or refused
# (tests/mutated_files). Prints the seed and, for every format, counts, cases a second and the peak memory of a case. A
# failed input is saved in target/tmp/mutated_files/ and named with its case.
#
# usage: benches/fuzz.sh [CASES [SEED [FORMAT]]]
#   CASES   number of cases, of all formats together (default 1000000)
#   SEED    repeats an earlier sequence (default: from the clock)
#   FORMAT  only this one: gguf, yaml, parquet ...
# cost: about 10 minutes for a million cases on 2 free cores; terminated after 30 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FINETUNE_FUZZ_CASES=${1:-1000000} FINETUNE_FUZZ_SEED=${2:-$(date +%s)}
[ -z "${3:-}" ] || export FINETUNE_FUZZ_FORMAT=$3
exec timeout 1800 cargo test --release --locked --test mutated_files -- --nocapture
