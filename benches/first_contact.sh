#!/usr/bin/env bash
# The first contact with an NVIDIA card, in four calls, each under 9 minutes by its own limits. Every test is a process of
# its own: a fault poisons one context, a hang costs one limit. The simplest come first, and what was not reached is said.
#   benches/first_contact.sh 1    is anything wrong: tests, self-test, kernels without Rust
#   benches/first_contact.sh 2    kernels' speed, and cuBLAS and flash attention beside them
#   benches/first_contact.sh 3    steps with and without graphs, wgmma and kept activations, PEFT, a run of the program
#   benches/first_contact.sh 4    compute-sanitizer, if call 1 passed
# Needs no Rust: PTX and FINETUNE name the programs, built elsewhere (default: .gpu/ptx and .gpu/finetune):
#   cargo build --release && cargo test --release --test ptx --no-run     and strip both into .gpu/
# OUT: folder of the results (default .). FINETUNE_PTX_DEVICE: the card (default 0). PYTHON: with numpy; torch,
# transformers and peft for the peers. SECONDS_IN_ALL and SECONDS_EACH change the limits (510 and 45).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
call=${1:-} ptx=${PTX:-.gpu/ptx} finetune=${FINETUNE:-.gpu/finetune} out=${OUT:-.} python=${PYTHON:-python3}
all=${SECONDS_IN_ALL:-510} each=${SECONDS_EACH:-45}
case $call in [1-4]) ;; *) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
export FINETUNE_PTX_DEVICE=${FINETUNE_PTX_DEVICE:-0} RUST_BACKTRACE=0
# A kernel that does not end is named before the process is killed.
export FINETUNE_CUDA_WAIT=${FINETUNE_CUDA_WAIT:-20}
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:/usr/local/nvidia/lib64:/usr/local/nvidia/lib
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-/tmp/jit} CUDA_CACHE_MAXSIZE=1073741824
command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q . || { echo "skipped: no cuda"; exit 0; }
for program in "$ptx" "$finetune"; do
  [ -x "$program" ] || { echo "$program: not there; see the head of this file" >&2; exit 2; }
done
mkdir -p "$out"
# No verdict of another build is read.
export XDG_CACHE_HOME=$out/cache-$call
rm -rf "$XDG_CACHE_HOME"

# Tests that a card runs, the riskiest last. Other tests of the program need the interpreter.
ladder="cases::every_op_case_holds_in_ptx cases::overflow_gives_a_non_finite_value
  cases::what_only_the_data_shows_is_a_fault_that_stays attention_sm80::windows_of_the_baseline_are_those_of_the_cpu
  widen::every_type_widens_to_its_bits widen::products_of_blocks_are_those_of_the_widened_matrix
  widen::a_matrix_of_many_parts_has_the_bits_of_one model::a_whole_model_has_the_gradient_of_the_cpu
  tensor::products_on_tensor_cores_are_those_of_rounded_inputs sm70::products_in_f16_are_those_of_rounded_factors
  sm70::a_gradient_is_added_to_what_is_there sm70::what_f16_does_not_hold_is_not_finite
  skinny::products_with_few_outputs_across_are_those_of_f64 skinny::long_slices_are_summed_in_pieces
  attention_sm80::attention_on_tensor_cores_is_that_of_rounded_inputs
  attention_sm80::windows_on_tensor_cores_are_those_of_rounded_inputs
  attention_sm80::heads_that_no_tile_fits_stay_with_the_baseline
  fused::a_copy_made_on_the_way_has_the_bits_of_one_made_apart
  fused::an_adapter_in_the_epilogue_has_the_bits_of_its_own_product
  model::a_whole_model_in_f16_is_near model::a_whole_model_on_tensor_cores_is_near
  model::a_whole_model_with_heads_of_256_is_near model::streamed_layers_have_the_bits_of_resident_ones
  model::training_gives_what_peft_gives model::thirty_steps_end_within_a_hundredth_of_the_cpu
  sm90a::products_by_wgmma_are_those_of_rounded_inputs
  sm90a::an_adapter_in_the_epilogue_has_the_bits_of_its_own_product
  attention_sm90a::attention_by_wgmma_is_that_of_rounded_inputs
  attention_sm90a::windows_by_wgmma_are_those_of_rounded_inputs attention_sm80::a_window_of_the_whole_row_changes_no_bit
  model::a_whole_model_by_wgmma_is_near model::a_whole_model_with_attention_by_wgmma_is_near"

# Times, those of peers, and cases of the lab.
shown='^(timing|\{|(PASS|FAIL|FAULT|HANG) )' said='panicked|CUDA_ERROR|no answer|error:|off by' limited='@(lab|peer)*'
alive() { timeout 20 nvidia-smi -L >/dev/null; }
. benches/within_limits.sh

run() {
  tested "$ptx" "$1" "$2" "$1${FINETUNE_PTX_SWITCHES:+ $FINETUNE_PTX_SWITCHES}"
}

lab() {
  one "$1" "lab $2" "$python" benches/ptx_lab.py --ptx kernels/ptx --match "$2" --limit 20
}

correct() {
  local name
  for name in $ladder; do
    case $name in
      # It compiles all kernels: 87 s on the first card.
      cases::*case_holds*) run "$name" $((3 * each)) ;;
      *) run "$name" "$each" ;;
    esac
  done
  one 90 selftest "$finetune" selftest "--report=$out/selftest.json"
  lab 90 _nt/128x256x
  lab 60 133x270
  lab 60 attention
}

fast() {
  run timings::timings 150
  one 90 "peer products" "$python" benches/gpu_peer.py --only products
  one 45 "peer attention" "$python" benches/gpu_peer.py --only attention
  lab 60 product_sm90a_nt/256x151936x2560
  lab 60 product_sm90a_nt/256x2560x151936
  lab 90 _nt/8192x
}

steps() {
  local switches
  for switches in "" profile no-graphs no-wgmma keep-everything; do
    FINETUNE_PTX_SWITCHES=$switches run step::step 60
  done
  one 75 "peer step" "$python" benches/gpu_peer.py --only step
  one 120 "peer step compiled" "$python" benches/gpu_peer.py --only step --compiled
  one 45 "run on the CPU" "$finetune" demo --gpus cpu --max-steps 30 --overwrite -o "$out/run-cpu"
  one 45 "run on the card" "$finetune" demo --gpu-backend cuda --max-steps 30 --overwrite -o "$out/run-cuda"
}

# Not on sm_90a: setmaxnreg and copies by the engine may stall under instrumentation.
sanitized() {
  local tool name sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) ||
    { echo "skipped: no compute-sanitizer (pip: nvidia-cuda-sanitizer-api)"; return; }
  for tool in memcheck racecheck; do
    for name in tensor::products_on_tensor_cores_are_those_of_rounded_inputs \
      attention_sm80::windows_on_tensor_cores_are_those_of_rounded_inputs cases::every_op_case_holds_in_ptx; do
      one 100 "$tool $name" "$sanitizer" --tool $tool --error-exitcode 9 "$ptx" --exact "$name" --test-threads 1
    done
  done
}

contact() {
  nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total,memory.used --format=csv || nvidia-smi -L
  case $call in 1) correct ;; 2) fast ;; 3) steps ;; 4) sanitized ;; esac
  # Compiled kernels, for a look at the machine code.
  [ -d "$CUDA_CACHE_PATH" ] && tar -C "$CUDA_CACHE_PATH" -czf "$out/jit-$call.tar.gz" . 2>/dev/null
}
report "first-contact-$call" contact
