#!/usr/bin/env bash
# All tests, as CI runs them: installs what the tests need, builds once (release, so that dependencies are compiled
# for one profile only) and runs them. Arguments go to `cargo test`: tests/run.sh tidy
# Optional: FINETUNE_SMOLLM2=DIR and FINETUNE_SMOLLM2_GGUF=FILE (recipes/quickstart.sh --fetch-only gets the file)
# switch on the tests against the real model; without them those say `skipped`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The regular expressions of tokenizers (onig) are C: a compiler is the one thing that rustup does not bring.
if ! command -v cc >/dev/null; then
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -q && apt-get install -yq --no-install-recommends gcc libc6-dev
  else
    echo "tests/run.sh: no C compiler (cc): install gcc or clang, then run this again" >&2
    exit 1
  fi
fi
# Hosts of a bad network are namespaces, which `ip` makes; without it (or without root) those tests say `skipped`.
if ! command -v ip >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -q && apt-get install -yq --no-install-recommends iproute2 || echo "tests/run.sh: no iproute2" >&2
fi
command -v cargo >/dev/null || { echo "tests/run.sh: no cargo: install Rust from https://rustup.rs, then run this again" >&2; exit 1; }

exec cargo test --release --locked --no-fail-fast "$@"
