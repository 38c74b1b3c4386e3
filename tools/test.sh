#!/usr/bin/env bash
# The test command: installs what it needs into .venv, then style, CUDA compile check, all tests, and a cross-section of
# them on the newest supported Megatron whose Python is here.
#
#   bash tools/test.sh                 everything (13 to 22 minutes on 2 cores, 37 on slow ones, installation included)
#   bash tools/test.sh --sanitizers    also the C++ tests under ASan, UBSan and TSan
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

# Two cores: what has nothing to wait for goes beside what waits much of the time. The CUDA check needs nvcc alone and
# begins beside the installation, as does the cross-section, which has one of its own; whole runs and what runs in one
# process go beside the tests of several ranks.
jobs="${MAX_JOBS:-}"
export MAX_JOBS="${jobs:-1}" # no core waits for a second job, and one alone reads PyTorch's headers once
unset PYTHONDONTWRITEBYTECODE # or each of the processes that tests start compiles all modules of ours anew
outputs="$(mktemp -d)"
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$outputs"' EXIT
bash tools/check_cuda_compiles.sh >"$outputs/cuda" 2>&1 &
cuda_check=$!
"${PYTHON:-python3}" -m tools.megatron_checks.test_matrix --pairs newest --again >"$outputs/newest" 2>&1 &
newest=$!
MORE_REQUIREMENTS=tools/requirements.txt
source recipes/setup_env.sh

echo "== style"
ruff check .
ruff format --check .
vermin -q -t=3.10- --violations --no-tips --no-parse-comments --eval-annotations megatron_moe_opt recipes tools tests
git ls-files 'csrc/*' 'tests/*' | grep -E '\.(h|cpp|cu|cuh)$' | xargs clang-format --dry-run -Werror

(
    failed=0
    export OMP_NUM_THREADS=1 # a second thread only spins for a core that is not free; tests of threads ask for theirs
    python -m pytest tests/unit tests/papers tests/system --durations=10 || failed=1
    python -m pytest -p tests.emulator.plugin tests/gpu tests/emulator --durations=5 || failed=1
    exit $failed
) >"$outputs/beside" 2>&1 &
beside=$!
failed=0
echo "== tests of several ranks"
python -m pytest tests/multirank --durations=10 || failed=1
wait $beside || failed=1
echo "== tests in one process, and of whole runs"
cat "$outputs/beside"
wait "$newest" || { failed=1; cat runs/test-matrix/*.log; }
echo "== a cross-section on the newest Megatron"
cat "$outputs/newest"
echo "== the job script under a real Slurm"
why_not="$(python -c 'from tests.slurm.cluster import why_not; print(why_not() or "")')"
if [[ -n "$why_not" ]]; then
    echo "left out: $why_not"
else
    python -m pytest tests/slurm -rs || failed=1
fi
wait $cuda_check || failed=1
echo "== CUDA sources compile"
cat "$outputs/cuda"
((failed == 0)) || exit 1

if [[ "${1:-}" == "--sanitizers" ]]; then
    echo "== sanitizers"
    MAX_JOBS="$jobs" bash tools/sanitize.sh
fi
