#!/usr/bin/env bash
# Compiles every CUDA kernel for the architectures we support, with warnings as errors and no register spills.
# Needs nvcc, but neither a GPU nor PyTorch.
#
#   bash tools/check_cuda_compiles.sh [--verbose]     --verbose: registers and shared memory of every kernel
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v nvcc > /dev/null; then
    echo "nvcc not found: CUDA compile check skipped"
    exit 0
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
for source in "${sources[@]}"; do
    report="$objects/$(basename "$source").txt"
    if ! nvcc -std=c++17 -O3 -c "$source" -o "$objects/kernel.o" "${archs[@]}" \
        -Werror all-warnings -Xcompiler=-Wall,-Wextra,-Werror -Xptxas=-v &> "$report"; then
        cat "$report"
        echo "$source does not compile without warnings"
        exit 1
    fi
    if [[ "${1:-}" == "--verbose" ]]; then
        grep -E "Compiling entry|spill|Used" "$report" | c++filt
    fi
    if grep -E "[1-9][0-9]* bytes spill" "$report" > /dev/null; then
        grep -B2 -E "[1-9][0-9]* bytes spill" "$report" | c++filt
        echo "$source spills registers"
        exit 1
    fi
done
echo "${#sources[@]} CUDA sources compile without warnings or register spills for" \
    "$(printf '%s\n' "${archs[@]}" | grep -o 'sm_.*' | paste -sd' ')"
