# shellcheck shell=bash disable=SC2034 source=../shared/hybridep.sh
# HybridEP's GPT-Medium (Table II): P_E 8.4M.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/hybridep.sh"

arguments+=(
    --num-layers 12 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
)
