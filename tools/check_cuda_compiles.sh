#!/usr/bin/env bash
# Compiles every CUDA kernel for the architectures we support, with warnings as errors and no register spills, and, where
# there is a PyTorch, what calls CUDA's runtime (csrc/pipeline/cuda_streams.cpp). Needs nvcc, but no GPU.
#
#   bash tools/check_cuda_compiles.sh [--write | --streams]
#
#   --write: renews csrc/kernels/facts.txt, the registers and 128-bit accesses of every kernel, which are compared
#   otherwise; --streams: cuda_streams.cpp alone, with the headers of a PyTorch, which may be built for CPU
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

if ! command -v nvcc > /dev/null; then
    echo "nvcc not found: CUDA compile check skipped"
    exit 0
fi

python="${PYTHON:-python3}"
if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
torch=$("$python" -c 'from torch.utils.cpp_extension import include_paths; print(*include_paths())' 2> /dev/null) || torch=""
if [[ -n "$torch" ]]; then
    includes=()
    for folder in $torch; do
        includes+=(-isystem "$folder")
    done
    nvcc -std=c++20 -c csrc/pipeline/cuda_streams.cpp -o /dev/null -Xcompiler=-fsyntax-only,-Wall,-Wextra,-Werror \
        -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE "${includes[@]}"
    echo "csrc/pipeline/cuda_streams.cpp compiles without warnings"
else
    echo "no PyTorch found: csrc/pipeline/cuda_streams.cpp left out"
fi
if [[ "${1:-}" == "--streams" ]]; then
    exit
fi

archs=()
for arch in 80 90 100; do
    if nvcc --list-gpu-arch | grep -qx "compute_$arch"; then
        archs+=("-gencode=arch=compute_$arch,code=sm_$arch")
    else
        echo "$(nvcc --version | grep -o 'release [0-9.]*'): sm_$arch is unknown to this nvcc, left out"
    fi
done

objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
shopt -s globstar nullglob
sources=(csrc/**/*.cu)
spills="[1-9][0-9]* bytes spill"

compiles() { # SOURCE: without warnings or spills; what nvcc says is in REPORT
    report="$objects/$(basename "$1").txt"
    nvcc -std=c++17 -O3 -c "$1" -o "$objects/kernel.o" "${archs[@]}" --keep --keep-dir "$objects" \
        -Werror all-warnings -Xcompiler=-Wall,-Wextra,-Werror -Xptxas=-v &> "$report" &&
        ! grep -qE "$spills" "$report"
}

# All together, so that CUDA's headers are read once for each architecture and not once a source. What is wrong is said
# of its source.
printf '#include "%s"\n' "${sources[@]/#/$PWD/}" > "$objects/all.cu"
if ! compiles "$objects/all.cu"; then
    rm "$objects"/*
    for source in "${sources[@]}"; do
        if ! compiles "$source"; then
            grep -B2 -E "$spills" "$report" | c++filt || cat "$report"
            echo "$source does not compile without warnings or register spills"
            exit 1
        fi
    done
fi
echo "${#sources[@]} CUDA sources compile without warnings or register spills for" \
    "$(printf '%s\n' "${archs[@]}" | grep -o 'sm_.*' | paste -sd' ')"
"$python" tools/gpu/kernel_facts.py "$objects" "${@:1:1}"
