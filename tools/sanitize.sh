#!/usr/bin/env bash
# Builds the C++ tests of the kernels, the placement solver and the executor (tests/cpp) with sanitizers and runs them:
#
#   bash tools/sanitize.sh            AddressSanitizer + UndefinedBehaviorSanitizer, then ThreadSanitizer
#   bash tools/sanitize.sh address,undefined    one set of sanitizers only
#
# Needs cmake >= 3.24, ninja and gcc; neither Python nor PyTorch. MAX_JOBS bounds the compile jobs.
set -euo pipefail
cd "$(dirname "$0")/.."

sets=("$@")
if [ $# -eq 0 ]; then sets=(address,undefined thread); fi
for sanitizers in "${sets[@]}"; do
  build="build/sanitize-${sanitizers//,/-}"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOE_OPT_EXTENSION=OFF \
    -DMOE_OPT_CPP_TESTS=ON -DMOE_OPT_SANITIZE="$sanitizers" >/dev/null
  cmake --build "$build" --parallel "${MAX_JOBS:-$(nproc)}"
  echo "== $sanitizers"
  for test in kernels codec assignment executor; do
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 "$build/tests/cpp/test_$test"
  done
done
