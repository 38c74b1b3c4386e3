#!/usr/bin/env bash
# The check for a machine with GPUs. Of one: builds with CUDA, runs tests/gpu, measures the kernels, and runs a part of the
# tests under compute-sanitizer; ends with a table; under 10 minutes. Of 2 to 8 together (--node): builds, and runs
# tools/gpu/node.py; ends with a page; under 15 minutes. Either exits non-zero if anything failed.
#
#   bash tools/gpu_check.sh                      one GPU
#   bash tools/gpu_check.sh --node               the GPUs of this node, or of a Slurm job (tools/gpu/job.sbatch)
#   bash tools/gpu_check.sh [--node] --record    also write the results to docs/benchmarks/
#
# Needs nvcc, cmake, ninja, and a Python with PyTorch (built for CUDA), setuptools>=77, pybind11, pytest, hypothesis, rich and
# typer, and no network. PYTHON chooses the interpreter (default python3). Megatron-Core is needed by --node alone: other tests that
# use it are skipped.
set -uo pipefail
CDPATH='' cd "$(dirname "$0")/.."

record=false
node=false
for word in "$@"; do
    case "$word" in
        --record) record=true ;;
        --node) node=true ;;
        *)
            echo "usage: bash tools/gpu_check.sh [--node] [--record]" >&2
            exit 2
            ;;
    esac
done

python="${PYTHON:-python3}"
runs="runs/gpu_check"
mkdir -p "$runs"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export MAX_JOBS="${MAX_JOBS:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)}" # which nproc obeys

# Without this, a machine whose GPU PyTorch cannot use would skip every test and pass.
machine=$("$python" - << 'PY'
import subprocess
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: run this on a machine with one")
query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
print(f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}")
PY
) || exit 2
echo "$machine"

table=""
failed=0
# step NAME LIMIT_S COMMAND...: runs it with a time limit, keeps its output, adds a line to the table.
step() {
    local name="$1" limit="$2" log result begin=$SECONDS
    shift 2
    log="$runs/${name// /-}.log"
    echo "== $name"
    if timeout "$limit" "$@" 2>&1 | tee "$log"; then
        result="ok"
    elif [[ ${PIPESTATUS[0]} -eq 124 ]]; then
        result="FAILED (over $limit s)"
        failed=1
    else
        result="FAILED"
        failed=1
    fi
    table+=$(printf '%-28s %-30s %5d' "$name" "$result" $((SECONDS - begin)))$'\n'
    [[ "$result" == "ok" ]]
}
skip() {
    echo "== $1: skipped, $2"
    table+=$(printf '%-28s %-30s %5s' "$1" "skipped: $2" "-")$'\n'
}
# finish: prints the table, writes the record, leaves.
finish() {
    printf '\n%s\n\n%-28s %-30s %5s\n%s' "$machine" "check" "result" "s" "$table"
    if $record; then
        write_record
    fi
    exit "$failed"
}
write_record() {
    local file
    file="docs/benchmarks/gpu-$(date -u +%Y-%m-%d).md"
    mkdir -p docs/benchmarks
    {
        echo "# GPU check, $(date -u +%Y-%m-%d)"
        printf '\n%s. Commit %s.\n' "$machine" "$(git describe --always --dirty 2> /dev/null || echo unknown)"
        printf '\nWritten by `tools/gpu_check.sh --record`.\n\n```\n%-28s %-30s %5s\n%s```\n' "check" "result" "s" "$table"
        for log in "$runs"/bench-*.log; do
            [[ -e "$log" ]] || continue
            printf '\n```\n'
            cat "$log"
            printf '```\n'
        done
    } > "$file"
    echo "written: $file"
}

build() {
    # The architecture of this GPU alone: the other ones are compiled by tools/check_cuda_compiles.sh.
    local arch
    arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || return 1
    MOE_OPT_CUDA=ON MOE_OPT_CUDA_ARCHS="$arch" "$python" setup.py build_ext --inplace &&
        "$python" -c 'from megatron_moe_opt.extension import build_info; print(build_info())'
}
bench() {
    "$python" -m tools.bench.kernels --device cuda "$@"
}
sanitize() {
    # PyTorch's caching allocator hides out-of-bounds accesses inside its blocks: off. The cases are the small ones that
    # still reach every kernel and both access widths. Forged indices make threads race: a case for memcheck alone.
    local cases="(cpu_bit_for_bit or row_maps or packed) and (odd-hidden or one-vector) or shuffled or past_the_buffer"
    cases+=" or (uneven and (3 or 64)) or (equals_the_reference and blocks and clustered)"
    if [[ "$1" == memcheck ]]; then cases+=" or forged"; fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 20 \
        "$python" -m pytest tests/gpu -q -x -p no:cacheprovider \
        -k "$cases"
}
export -f build bench sanitize
export python

rm -f "$runs"/*.log
if $node; then
    step "build" 110 bash -c build || finish
    if $record; then exec "$python" -m tools.gpu.node --record; fi
    exec "$python" -m tools.gpu.node
fi
step "build" 150 bash -c build || finish
step "tests" 150 "$python" -m pytest tests/gpu -q -rs --durations=5
step "bench 8192x7168 top-8" 90 \
    bash -c 'bench --tokens 8192 --hidden 7168 --experts 256 --topk 8 --dtypes bf16 --at-least 0.85'
step "bench 4096x4096 top-8" 45 bash -c 'bench --tokens 4096 --hidden 4096 --experts 64 --topk 8 --dtypes fp32,bf16'
for tool in memcheck racecheck; do
    if ! command -v compute-sanitizer > /dev/null; then
        skip "$tool" "no compute-sanitizer"
    elif ! compute-sanitizer --tool "$tool" "$python" -c 'import torch; torch.ones(8, device="cuda").sum().item()' \
        > "$runs/$tool-probe.txt" 2>&1; then
        skip "$tool" "not supported here" # some virtual machines refuse it
    else
        step "$tool" 80 bash -c "sanitize $tool"
    fi
done
finish
