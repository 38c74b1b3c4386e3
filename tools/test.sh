#!/usr/bin/env bash
# The test command: installs what it needs into .venv, then style, CUDA compile check and all tests.
#
#   bash tools/test.sh                 everything (about 15 minutes on 2 cores)
#   bash tools/test.sh --sanitizers    also the C++ tests under ASan, UBSan and TSan
set -euo pipefail
cd "$(dirname "$0")/.."

source recipes/setup_env.sh

echo "== style"
ruff check .
ruff format --check .
git ls-files 'csrc/*' 'tests/cpp/*' | grep -E '\.(h|cpp|cu|cuh)$' | xargs clang-format --dry-run -Werror

# Two cores: what runs in one process goes beside the runs of several ranks, which wait for each other much of the time.
beside="$(mktemp)"
(bash tools/check_cuda_compiles.sh && python -m pytest tests/unit tests/gpu --durations=5) >"$beside" 2>&1 &
failed=0
echo "== tests of several ranks and of whole runs"
python -m pytest tests/multirank tests/system --durations=10 || failed=1
wait $! || failed=1
echo "== CUDA sources compile; tests in one process"
cat "$beside" && rm "$beside"
((failed == 0)) || exit 1

if [[ "${1:-}" == "--sanitizers" ]]; then
    echo "== sanitizers"
    bash tools/sanitize.sh
fi
