#!/usr/bin/env bash
# Builds the program for another system than this one, on Debian.
#
# usage: packaging/cross.sh TARGET [PROFILE]
#   TARGET is x86_64-pc-windows-gnu or aarch64-unknown-linux-gnu, PROFILE one of Cargo.toml (default: release).
#   The last line printed is the binary's path.
#
# Uses the standard library of `rustup target add TARGET` if it is installed. Otherwise Debian's rustc-web compiles it
# from its source (rust-web-src). As root this installs what it needs with apt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${1:-} profile=${2:-release}
case $target in
  x86_64-pc-windows-gnu) packages=gcc-mingw-w64-x86-64-posix gcc=x86_64-w64-mingw32-gcc-posix
    ar=x86_64-w64-mingw32-ar name=finetune.exe ;;
  aarch64-unknown-linux-gnu) packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" gcc=aarch64-linux-gnu-gcc
    ar=aarch64-linux-gnu-ar name=finetune ;;
  *) echo "usage: packaging/cross.sh x86_64-pc-windows-gnu|aarch64-unknown-linux-gnu [PROFILE]" >&2; exit 2 ;;
esac

cargo=cargo more=()
if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
  packages="$packages rustc-web cargo-web rust-web-src"
  cargo=/usr/bin/cargo more=(-Zbuild-std=std,panic_unwind)
  export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1
fi
missing=$(for package in $packages; do dpkg -s "$package" >/dev/null 2>&1 || echo "$package"; done)
if [ -n "$missing" ]; then
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
    { echo "packaging/cross.sh: needs $(echo $missing) (Debian's names)" >&2; exit 1; }
  apt-get update -q
  # rustc-web replaces Debian's rustc and rustup, which must not go without a question.
  apt-get install -yq --no-install-recommends --no-remove $missing
fi >&2

variable=${target//-/_}
export "CC_$variable=$gcc" "AR_$variable=$ar"
variable=${variable^^}
export "CARGO_TARGET_${variable}_LINKER=$gcc"
"$cargo" build --profile "$profile" --locked --bin finetune --target "$target" --target-dir target/cross "${more[@]}" >&2
echo "target/cross/$target/$profile/$name"
