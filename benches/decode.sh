#!/usr/bin/env bash
# Greedy generation with one model, by this program and a peer in turn, A B A B, in one run: tokens a second, processor
# milliseconds a token, and their ratios. The peer of a .gguf file is llama.cpp; the peer of a Hugging Face directory is
# transformers in the same dtype. Of several runs the fastest short and the fastest long answer to one prompt are taken
# separately: their difference is the time of the tokens. (The best of several differences would favour the run whose
# short answer was disturbed most.) An answer that fails or ends before its last token ends the script.
#
# usage: benches/decode.sh MODEL
#   PYTHON   an interpreter with llama-cpp-python, or torch and transformers (python3)
#   FINETUNE a binary (a release build)      THREADS  of both ("2")      DTYPES  ("f32"; of a directory "f32 bf16")
#   PAIRS    number of pairs (3)      TOKENS  measured tokens (128)      PROMPT  a prompt whose answer is long enough
# On a shared machine compare processor time: it does not include waiting for a core.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '8,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
binary=${FINETUNE:-}
[ -n "$binary" ] || { cargo build --release --locked && binary=target/release/finetune; }
case $model in
  *.gguf) peer=llama dtypes=${DTYPES:-f32} ;;
  *) peer=transformers dtypes=${DTYPES:-f32 bf16} ;;
esac
python=${PYTHON:-python3} tokens=${TOKENS:-128} prompt=${PROMPT:-Once upon a time there was a small}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
lines=$work/lines
TIMEFORMAT='%R %U %S'

# Sets took to [seconds by the clock, of the processor] of an answer of $1 tokens.
answer() {
  local clock
  clock=$({ time "$binary" generate "$model" --prompt "$prompt" --max-new-tokens "$1" --temperature 0 --dtype "$dtype" \
    --gpus cpu --threads "$threads" --json >"$work/said" 2>"$work/errors"; } 2>&1) || { cat "$work/errors" >&2; exit 1; }
  # shellcheck disable=SC2086
  took=$("$python" - "$work/said" "$1" $clock <<'P'
import json, sys
said, asked, (wall, user, kernel) = json.load(open(sys.argv[1])), int(sys.argv[2]), map(float, sys.argv[3:])
if said["tokens"] != asked:
    sys.exit(f"the answer ended after {said['tokens']} of {asked} tokens ({said['ended']}): give another PROMPT, or fewer TOKENS")
print([wall, user + kernel])
P
  )
}
for threads in ${THREADS:-2}; do
  for dtype in $dtypes; do
    answer 4 # The first call reads the file from the disk.
    for _ in $(seq "${PAIRS:-3}"); do
      answer 4
      short=$took
      answer $((tokens + 4))
      echo "{\"who\": \"finetune\", \"dtype\": \"$dtype\", \"threads\": $threads, \"tokens\": $tokens, \"short\": $short, \"long\": $took}" | tee -a "$lines"
      "$python" "benches/${peer}_decode.py" "$model" "$prompt" "$tokens" "$threads" "$dtype" >"$work/said" 2>"$work/errors" ||
        { cat "$work/errors" >&2; exit 1; }
      tee -a "$lines" <"$work/said"
    done
  done
done
"$python" - "$lines" <<'P'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
for kind in dict.fromkeys((r["dtype"], r["threads"]) for r in rows):
    fast, cpu = [], []
    for ours in (True, False):
        runs = [r for r in rows if (r["dtype"], r["threads"]) == kind and (r["who"] == "finetune") == ours]
        least = lambda which, what: min(r[which][what] for r in runs)
        wall, spent = (least("long", what) - least("short", what) for what in (0, 1))
        if min(wall, spent) <= 0:
            sys.exit(f"{runs[0]['who']}, {kind[0]}: a long answer took no more than a short one: give more TOKENS, or more PAIRS")
        fast.append(runs[0]["tokens"] / wall)
        cpu.append(1e3 * spent / runs[0]["tokens"])
    print(f"{kind[0]}, {kind[1]} threads: {fast[0]:.1f} and {fast[1]:.1f} tokens/s, ratio {fast[0] / fast[1]:.2f}; "
          f"processor {cpu[0]:.2f} and {cpu[1]:.2f} ms a token, ratio {cpu[1] / cpu[0]:.2f}")
P
