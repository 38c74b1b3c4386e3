#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, build, text, training, comparison with stock Megatron-Core; and one
# layer of it timed under both in turns, as a busy machine slows whatever runs at the time.
#
#   bash recipes/quickstart.sh                       Python's own standard library as text
#   bash recipes/quickstart.sh --text DIR            any folder of text
#   bash recipes/quickstart.sh -- --num-experts 16   more arguments for recipes/pretrain_moe_gpt.py
#
# Needs git, Python 3.10 or newer with its venv module and headers, and a C++ compiler. Run again, it keeps the environment and the data.
set -euo pipefail
here="$PWD"
CDPATH='' cd "$(dirname "$0")/.."

export MOE_OPT_CUDA="${MOE_OPT_CUDA:-OFF}" # all of it runs on CPUs, and an nvcc that is here may be of another CUDA than torch
source recipes/setup_env.sh
(cd "$here" && bash "$OLDPWD/recipes/train_and_compare.sh" "$@") # whose folders are the caller's
echo "== a layer in turns"
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" \
    python -m torch.distributed.run --standalone --nproc-per-node 4 -m megatron_moe_opt.cli.main bench --dtype fp32 --tp 2 --ep 2 \
    --expert-tp 2 --tokens 512 --hidden 128 --ffn-hidden 256 --experts 8 --topk 2 --dispatchers monta:O1,mpmoe:2 --steps 7
