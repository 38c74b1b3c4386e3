#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, build, text, training, comparison with stock Megatron-Core.
#
#   bash recipes/quickstart.sh                       Python's own standard library as text
#   bash recipes/quickstart.sh --text DIR            any folder of text
#   bash recipes/quickstart.sh -- --num-experts 16   more arguments for recipes/pretrain_moe_gpt.py
#
# Needs git, Python 3.10 or newer and a C++ compiler. Run again, it keeps the environment and the data.
set -euo pipefail
cd "$(dirname "$0")/.."

source recipes/setup_env.sh
exec bash recipes/train_and_compare.sh "$@"
