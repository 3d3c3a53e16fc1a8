#!/usr/bin/env bash
# Builds what a release consists of: a Python wheel with the binary, and an archive of the binary with its checksum.
#
# usage: packaging/wheel.sh [TARGET]
#   TARGET is x86_64-unknown-linux-gnu (default) or aarch64-unknown-linux-gnu; its standard library must be installed
#   (`rustup target add TARGET`). Results: target/wheels.
#
# Needs cargo and Python with pip. Zig is the C compiler and the linker (both from Python wheels), so that the binary
# needs no glibc newer than 2.28 on any build machine: RHEL 8, Debian 10, Ubuntu 18.10 and newer systems have it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${1:-x86_64-unknown-linux-gnu}
glibc=2.28
out=$PWD/target/wheels
maturin=1.16.0 zig=0.15.2
tools=$PWD/target/packaging-$maturin-$zig

case $target in
  x86_64-unknown-linux-gnu | aarch64-unknown-linux-gnu) ;;
  *) echo "packaging/wheel.sh: $target is not built here; .github/workflows/release.yml builds other systems" >&2; exit 2 ;;
esac

if ! { python3 -m venv --help && command -v readelf; } >/dev/null 2>&1; then
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
    { echo "packaging/wheel.sh: needs Python 3 with venv, and readelf (python3-venv, binutils)" >&2; exit 1; }
  apt-get update -q && apt-get install -yq --no-install-recommends python3-venv binutils
fi
python=$tools/bin/python
if ! "$python" -c 'import ziglang' 2>/dev/null || [ ! -x "$tools/bin/maturin" ]; then
  python3 -m venv "$tools"
  "$python" -m pip install -q --disable-pip-version-check "maturin==$maturin" "ziglang==$zig"
fi

# maturin writes into an empty folder, so that the name of the wheel is known.
rm -rf "$out/staged-$target"
(cd packaging && PATH=$tools/bin:$PATH maturin build -q --release --locked --zig --target "$target" \
  --target-dir "$PWD/../target/packaging-build" --compatibility "manylinux_${glibc/./_}" --out "$out/staged-$target")
wheel=$(ls "$out/staged-$target"/finetune_lora-*.whl)
mv "$wheel" "$out/"
rmdir "$out/staged-$target"
wheel=$out/$(basename "$wheel")

# The archive holds the wheel's binary.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
name=finetune-v$version-$target
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/$name"
"$python" - "$wheel" "$work/$name/finetune" <<'PYTHON'
import sys, zipfile

wheel = zipfile.ZipFile(sys.argv[1])
binary = [name for name in wheel.namelist() if name.endswith("/scripts/finetune")]
open(sys.argv[2], "wb").write(wheel.read(binary[0]))
PYTHON
chmod +x "$work/$name/finetune"
newest=$(readelf -W --version-info "$work/$name/finetune" | grep -o 'GLIBC_[0-9][0-9.]*' | sort -uV | tail -n 1)
if [ "$(printf '%s\n' "$newest" "GLIBC_$glibc" | sort -V | tail -n 1)" != "GLIBC_$glibc" ]; then
  echo "packaging/wheel.sh: the binary needs $newest, more than glibc $glibc" >&2
  exit 1
fi
cp README.md LICENSE-APACHE LICENSE-MIT "$work/$name/"
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -czf "$out/$name.tar.gz" "$name"
(cd "$out" && sha256sum "$name.tar.gz" > "$name.tar.gz.sha256" && sha256sum "$(basename "$wheel")" > "$(basename "$wheel").sha256")
echo "$newest"
ls -l "$out" | awk 'NR > 1 { print $5, $9 }'
