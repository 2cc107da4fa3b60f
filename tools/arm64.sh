#!/usr/bin/env bash
# Compiles and links the program for ARM64 on x86-64, from Debian's cross compiler and a folder of Debian's arm64 packages,
# and starts it under qemu: it prints what the native program prints, and the plugin for ARM64 computes. `./run test arm64`
# calls it.
#   tools/arm64.sh SOURCE BUILD WHEELS JOBS     WHEELS: those of cmake/wheels_aarch64.txt, unpacked
set -euo pipefail
source=$1 native=$2 wheels=$3 jobs=$4
build=$native/arm64 root=$native/arm64_root
fail() { echo "FAILED: $*" >&2; exit 1; }

if [[ ! -e $root.stamp || $source/cmake/packages.txt -nt $root.stamp ]]; then
  rm -rf "$root"
  packages=$(grep -v '^#' "$source/cmake/packages.txt" | cut -d' ' -f1 | grep -- '-dev$' | paste -sd,)
  mmdebstrap --quiet --variant=extract --architectures=arm64 --include="$packages" \
    "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$root"
  touch "$root.stamp"
fi
[[ -e $build/build.ninja ]] ||
  cmake -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMD_UNITY=ON -DMD_DEPS="$wheels" \
    -DCMAKE_TOOLCHAIN_FILE="$source/cmake/aarch64.cmake" -DCMAKE_SYSROOT="$root" >"$native/arm64.log" ||
  { tail -30 "$native/arm64.log"; fail "cmake: $native/arm64.log"; }
NINJA_STATUS='arm64: [%f/%t] ' ninja -C "$build" -j "$jobs" maxdiffusion 2>&1 | tee "$native/arm64.log"
[[ -z ${CI:-} ]] || ! grep -E '\bwarning: ' "$native/arm64.log" || fail "the build warns (see above)"

started() {
  HF_HUB_OFFLINE=1 qemu-aarch64 -L "$root" -E LD_LIBRARY_PATH="$root/usr/lib/aarch64-linux-gnu:$wheels/pyarrow" \
    "$build/maxdiffusion" "$@"
}
for words in version 'inspect keys' "inspect config $source/configs/quickstart.yml"; do
  # shellcheck disable=SC2086
  diff <(started $words 2>&1) <("$native/maxdiffusion" $words 2>&1) || fail "maxdiffusion $words differs"
done
said=$(started doctor probe=plugin cpu "$wheels/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so") || fail "the plugin: $said"
[[ $said == *'"stage":"a product is computed"'* ]] || fail "the plugin computes nothing: $said"
echo "arm64: all well"
