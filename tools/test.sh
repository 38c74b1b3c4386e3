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

echo "== CUDA sources compile"
bash tools/check_cuda_compiles.sh

echo "== tests"
python -m pytest tests --durations=10

if [[ "${1:-}" == "--sanitizers" ]]; then
    echo "== sanitizers"
    bash tools/sanitize.sh
fi
