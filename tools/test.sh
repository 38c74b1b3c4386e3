#!/usr/bin/env bash
# The test command: installs what it needs into .venv, then style, CUDA compile check, all tests, and a cross-section of
# them on the newest supported Megatron whose Python is here.
#
#   bash tools/test.sh                 everything (13 to 18 minutes on 2 cores, more on slow ones, installation included)
#   bash tools/test.sh --sanitizers    also the C++ tests under ASan, UBSan and TSan
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

# Two cores. What other parts wait for, and the tests of ranks, which wait for each other, have them first; what waits
# for nobody takes what is left: the CUDA check, which needs nvcc alone, the cross-section, which has an installation of
# its own, and all that runs in one process. A task of the idle class does not delay one that wakes.
beside() {
    if chrt --idle 0 true 2>/dev/null; then exec chrt --idle 0 "$@"; fi
    exec nice -n 19 "$@"
}
jobs="${MAX_JOBS:-}"
export MAX_JOBS="${jobs:-1}" # no core waits for a second job, and one alone reads PyTorch's headers once
unset PYTHONDONTWRITEBYTECODE # or each of the processes that tests start compiles all modules of ours anew
outputs="$(mktemp -d)"
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$outputs"' EXIT
beside bash tools/check_cuda_compiles.sh >"$outputs/cuda" 2>&1 &
cuda_check=$!
beside "${PYTHON:-python3}" -m tools.megatron_checks.test_matrix --pairs newest --again >"$outputs/newest" 2>&1 &
newest=$!
MORE_REQUIREMENTS=tools/requirements.txt
source recipes/setup_env.sh

echo "== style"
ruff check .
ruff format --check .
vermin -q -t=3.10- --violations --no-tips --no-parse-comments --eval-annotations megatron_moe_opt recipes tools tests
git ls-files 'csrc/*' 'tests/*' | grep -E '\.(h|cpp|cu|cuh)$' | xargs clang-format --dry-run -Werror

export OMP_NUM_THREADS=1 # a second thread only spins for a core that is not free; tests of threads ask for theirs
declare -A lanes
lane() { # NAME ARGUMENTS of pytest. Several, so that both cores have some when the ranks have ended
    beside python -m pytest "${@:2}" --durations=10 >"$outputs/$1" 2>&1 &
    lanes[$1]=$!
}
lane planning tests/unit/cli tests/unit/planning tests/unit/tools tests/papers
lane unit tests/unit --ignore=tests/unit/cli --ignore=tests/unit/planning --ignore=tests/unit/tools
lane emulator -p tests.emulator.plugin tests/gpu tests/emulator
failed=0
echo "== tests of several ranks, and of whole runs"
python -m pytest tests/multirank tests/system --durations=10 || failed=1
for name in planning unit emulator; do
    wait "${lanes[$name]}" || failed=1
    echo "== tests in one process: $name"
    cat "$outputs/$name"
done
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
