#!/usr/bin/env bash
# Builds with sanitizers and runs: the C++ tests of the kernels, the placement solver and the executor (tests/cpp), and
# 100,000 random calls of the Python extension (tests/unit/kernels/extension_fuzz.py).
#
#   bash tools/sanitize.sh                      AddressSanitizer + UndefinedBehaviorSanitizer, then ThreadSanitizer
#   bash tools/sanitize.sh address,undefined    one set of sanitizers only
#   CALLS=0 bash tools/sanitize.sh              the C++ tests alone
#
# The C++ tests need cmake >= 3.24, ninja and gcc; the calls, under AddressSanitizer only, an environment with the
# package installed (.venv, or the active one). MAX_JOBS bounds the compile jobs, SEED the calls made.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

sets=("$@")
if [ $# -eq 0 ]; then sets=(address,undefined thread); fi
calls="${CALLS:-100000}"
for sanitizers in "${sets[@]}"; do
  build="build/sanitize-${sanitizers//,/-}"
  extension=OFF
  if [[ $sanitizers == *address* ]] && ((calls > 0)); then
    extension=ON
    # shellcheck disable=SC1091
    [ -n "${VIRTUAL_ENV:-}" ] || source .venv/bin/activate
  fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOE_OPT_EXTENSION=$extension -DMOE_OPT_CUDA=OFF \
    -DPython_EXECUTABLE="$(command -v python3)" -DMOE_OPT_CPP_TESTS=ON -DMOE_OPT_SANITIZE="$sanitizers" >/dev/null
  cmake --build "$build" --parallel "${MAX_JOBS:-$(nproc)}"
  echo "== $sanitizers"
  for test in kernels codec assignment executor; do
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 "$build/tests/cpp/test_$test"
  done
  if [ $extension = ON ]; then
    echo "== $sanitizers: $calls calls of the extension"
    # Python itself leaks, and asks for more memory than there is in these calls. libstdc++ comes along because
    # AddressSanitizer looks for what throws exceptions when it starts.
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
      ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
      python3 -m tests.unit.kernels.extension_fuzz --calls "$calls" --seed "${SEED:-1}" --extension "$build"/_C.*.so
  fi
done
