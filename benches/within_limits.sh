# Steps of a first contact with a card, each within its own limit and that of the call: sourced by first_contact.sh (NVIDIA
# through CUDA) and wgpu_first.sh (any card through wgpu), which set
#   out   folder of the results             all   seconds of the call
#   shown, said   extended regular expressions: lines of a log to print always, and those to print after a failure
#   limited       pattern of steps that may reach their limit; any other step that does so hangs
#   alive         a function that fails if the card is gone
failed=0
declare -A names=()

# one SECONDS NAME COMMAND...: runs the command within its own limit and that of the call, prints one line, and keeps what
# it said in $out/NAME.log.
one() {
  local limit=$1 name=$2 left=$((all - SECONDS)) log began code how
  shift 2
  log=$out/$(tr ': /' '___' <<<"$name").log
  ((left >= 5)) || { echo "not run: $name"; return 0; }
  ((limit <= left)) || limit=$left
  began=$SECONDS
  timeout -k 5 "$limit" "$@" >"$log" 2>&1
  code=$?
  # The first line of a test begins behind its name.
  sed -i -E 's/^(test [^ ]+ \.\.\. )(.)/\1\n\2/' "$log"
  case $code in
    0) if grep -q '^skipped' "$log"; then how=skipped; else how=PASS; fi ;;
    124 | 137) if [[ $name == $limited ]]; then how=LIMIT; else how=HANG; fi ;;
    *) how=FAIL ;;
  esac
  echo "$how $((SECONDS - began)) s $name"
  grep -hE "$shown" "$log" | cut -c1-300
  case $how in FAIL | HANG | LIMIT) ;; *) return 0 ;; esac
  failed=1
  grep -E "$said" "$log" | tail -4 | cut -c1-300
  # A card that is gone ends the call.
  alive || { echo "the card is gone after $name"; exit 3; }
}

# tested PROGRAM TEST SECONDS NAME: a test, which must be one of the program's.
tested() {
  local program=$1 test=$2 limit=$3 name=$4
  [ -n "${names[$program]:-}" ] || names[$program]=$("$program" --list 2>/dev/null)
  grep -qx "$test: test" <<<"${names[$program]}" || { echo "FAIL 0 s $name: no such test"; failed=1; return; }
  one "$limit" "$name" "$program" --exact "$test" --test-threads 1 --nocapture
}

# report NAME FUNCTION: prints what the function says, keeps it in $out/NAME.txt, and exits with 1 if a step failed.
report() {
  { "$2"; exit "$failed"; } 2>&1 | tee "$out/$1.txt"
  exit "${PIPESTATUS[0]}"
}
