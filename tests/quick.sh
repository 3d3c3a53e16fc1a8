#!/usr/bin/env bash
# The quick loop while code is changed: format, clippy, unit tests, tidy. Under 3 minutes after the first build.
# Everything else: tests/run.sh, and .ci/run before a merge.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CARGO_INCREMENTAL=1
cargo fmt --all --check
cargo clippy --release --locked --lib --bins -- -D warnings
cargo test --release --locked --lib --test tidy
