#!/usr/bin/env bash
# The first contact with a card of any vendor through wgpu, in four calls, each under 9 minutes by its own limits. Every test
# is a process of its own: a lost device or a hang costs one test. The riskiest come last, and what was not reached is said.
#   benches/wgpu_first.sh 1    what the card is; self-test; verbs, kernel variants, submissions
#   benches/wgpu_first.sh 2    whole models, against PEFT and the CPU; many runs, matrices over 1 GiB
#   benches/wgpu_first.sh 3    speed: each variant at the sizes of a card, whole microbatches
#   benches/wgpu_first.sh 4    40 steps beside the CPU's, the same bytes twice, 8,192 tokens, the validation layer
# Needs no Rust. PROGRAMS (default .gpu): a folder with finetune, the test programs op_verbs, wgpu_variants, wgpu_device, parity
# and quantised, and the benchmarks wgsl and step, built elsewhere (cargo build --release; cargo test --release --no-run; cargo
# bench --no-run), stripped; in PROGRAMS/lib the Vulkan loader (libvulkan1), if the machine has none.
# OUT: folder of the results (default .). FINETUNE_TEST_ADAPTER: a part of the card's name (default: the first card).
# TESTS: only these, as PROGRAM:TEST. SECONDS_IN_ALL and SECONDS_EACH change the limits (430, after the list of devices, and 60).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
call=${1:-} programs=${PROGRAMS:-.gpu} out=${OUT:-.} all=${SECONDS_IN_ALL:-430} each=${SECONDS_EACH:-60}
case $call in [1-4]) ;; *) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
finetune=$programs/finetune
[ -x "$finetune" ] || { echo "$finetune: not there; see the head of this file" >&2; exit 2; }
export RUST_BACKTRACE=0 LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$programs/lib:/usr/local/nvidia/lib64:/usr/local/nvidia/lib
# NVIDIA's driver in a container.
icd=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json
if [ -z "${VK_DRIVER_FILES:-}" ] && [ -e "$icd" ]; then export VK_DRIVER_FILES=$icd VK_ICD_FILENAMES=$icd; fi
mkdir -p "$out"
# No compiled kernel of another build is read.
export XDG_CACHE_HOME=$out/cache-$call
rm -rf "$XDG_CACHE_HOME"

# The adapters of wgpu: `N NAME`, and the line of facts behind it.
listed=$(timeout 90 "$finetune" devices 2>/dev/null)
if [ -n "${FINETUNE_TEST_ADAPTER:-}" ]; then
  index=$(grep -iF -- "$FINETUNE_TEST_ADAPTER" <<<"$listed" | sed -n 's/^wgpu \([0-9]*\) .*/\1/p' | head -n 1)
else
  index=$(grep -A 1 '^wgpu [0-9]' <<<"$listed" | grep -B 1 -E '^ +(discrete|integrated|virtual),' | sed -n 's/^wgpu \([0-9]*\) .*/\1/p' | head -n 1)
fi
[ -n "$index" ] || { echo "skipped: no wgpu adapter ${FINETUNE_TEST_ADAPTER:-that is a card}"; exit 0; }
card=$(sed -n "s/^wgpu $index  *//p" <<<"$listed")
export FINETUNE_TEST_ADAPTER=$card
gpu="--gpu-backend wgpu --gpus $index"
SECONDS=0

shown='^(timing|skipped|dropped|wgpu-|linear|attention|matmul|together|x aT|dyT h|\{)|VUID'
said='panicked|error:|off by|not finite' limited='@(bench|validated)*'
alive() { grep -qF -- "$card" <<<"$(timeout 60 "$finetune" devices 2>/dev/null)"; }
. benches/within_limits.sh

# Tests that a card runs, the riskiest last.
ladder="op_verbs:every_op_case_holds_on_wgpu op_verbs:edges::overflow_gives_a_non_finite_value_on_wgpu
  op_verbs:edges::non_finite_values_stay_visible_on_wgpu wgpu_variants:every_variant_matches_the_product_formula
  wgpu_variants:every_variant_multiplies_every_block_type wgpu_variants:long_sums_of_few_outputs_are_split
  wgpu_variants:small_gradients_are_not_lost_in_f16 wgpu_variants:wrong_variant_is_dropped_by_name
  wgpu_variants:variant_wrong_for_a_model_is_dropped_before_use
  wgpu_device:compiled::compiled_kernels_are_kept_and_found_again wgpu_device:lengths::empty_sum_is_zero
  wgpu_device:lengths::estimated_speed_changes_no_bit wgpu_device:lengths::window_that_no_row_exceeds_changes_no_bit
  wgpu_device:lengths::blocks_outside_a_window_are_not_read wgpu_device:lengths::number_of_bind_groups_is_bounded
  wgpu_device:sizes::matrix_beyond_one_binding_is_computed_in_parts
  wgpu_device:trips::microbatch_takes_at_most_two_submissions_and_one_read
  wgpu_device:trips::no_submission_exceeds_its_time_limit wgpu_device:trips::long_work_is_split_and_read_once
  wgpu_device:faults::work_that_did_not_run_once_is_a_fault
  wgpu_device:faults::earlier_work_that_did_not_run_is_a_fault_of_the_read
  wgpu_device:faults::lost_upload_of_weights_is_a_fault_of_the_next_read
  wgpu_device:faults::matrix_beyond_one_binding_is_a_fault_with_advice
  wgpu_device:faults::kernel_that_does_not_compile_is_named_in_a_fault
  wgpu_device:faults::impossible_allocation_is_a_fault_with_its_size wgpu_device:faults::a_lost_device_is_a_fault"
models="parity:golden_cases_train_as_in_peft_on_wgpu quantised:quantised_cases_train_as_in_peft_on_wgpu
  wgpu_device:streamed::streamed_layers_have_the_bits_of_resident_ones
  wgpu_device:lengths::free_buffers_are_released_before_the_budget_is_exceeded
  wgpu_variants:one_product_many_times_gives_the_same_bits wgpu_device:sizes::last_rows_of_a_large_matrix_are_right"

# climb SECONDS PROGRAM:TEST...
climb() {
  local limit=$1 step
  shift
  for step in "$@"; do tested "$programs/${step%%:*}" "${step#*:}" "$limit" "${step%%:*} ${step#*:}"; done
}

correct() {
  one 60 "devices, cold" "$finetune" devices --json
  one 30 "devices, warm" "$finetune" devices --json
  one 120 selftest "$finetune" selftest "--report=$out/selftest.json"
  climb "$each" $ladder
}

fast() {
  local tokens
  one 150 "bench large" "$programs/wgsl" "$card" large
  one 90 "bench large, with run-time checks" "$programs/wgsl" "$card" large checked
  # One row of at most 1,024 tokens; SmolLM2-135M, then the shape of Qwen3-1.7B.
  for tokens in 256 1024 4096; do
    one 60 "bench SmolLM2-135M $tokens" "$programs/step" --adapter "$card" --steps 3 --micro $tokens --rows $((tokens / 256))
    one 90 "bench Qwen3-1.7B $tokens" "$programs/step" --adapter "$card" --steps 3 --micro $tokens --rows $((tokens / 256)) \
      --hidden 2048 --heads 16 --kv-heads 8 --feed-forward 6144 --layers 28 --vocab 151936
  done
  one 60 "bench blocks" "$programs/wgsl" "$card" blocks
}

# losses RUN: each loss of a run is within a hundredth of the CPU's (F-DP-005).
losses() {
  one 10 "losses of $1" bash -c '
    of() { sed -nE "s/^\{\"event\":\"step\".*\"loss\":([0-9.e-]+).*/\1/p" "$1/metrics.jsonl"; }
    paste <(of "$1") <(of "$2") | awk "NF != 2 { bad = 1 }
      { off = (\$2 - \$1) / \$1; if (off < 0) off = -off; if (off > most) most = off }
      END { print \"timing: \" NR \" losses off by \" most + 0; exit bad || NR == 0 || most > 0.01 }"' of "$out/run-cpu" "$out/$1"
}

long() {
  local run="demo --max-steps 40 --no-shuffle --overwrite -q"
  one 90 "run on the CPU" "$finetune" $run --gpus cpu --dtype f32 -o "$out/run-cpu"
  one 90 "run on the card, f32" "$finetune" $run $gpu --dtype f32 -o "$out/run-f32"
  losses run-f32
  one 90 "run on the card" "$finetune" $run $gpu -o "$out/run-card"
  losses run-card
  one 90 "run on the card again" "$finetune" $run $gpu -o "$out/run-again"
  one 10 "the same bytes" cmp "$out/run-card/adapter_model.safetensors" "$out/run-again/adapter_model.safetensors"
  one 120 "bench 8192 tokens" "$programs/step" --adapter "$card" --steps 1 --rows 1 --length 8192 --micro 8192 \
    --hidden 2048 --heads 16 --kv-heads 8 --feed-forward 6144 --layers 4 --vocab 151936
  VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation one 120 "validated selftest" "$finetune" selftest
}

contact() {
  grep -A 4 "^wgpu $index " <<<"$listed"
  if [ -n "${TESTS:-}" ]; then climb "$each" $TESTS; return; fi
  case $call in 1) correct ;; 2) climb 120 $models ;; 3) fast ;; 4) long ;; esac
}
report "wgpu-first-$call" contact
