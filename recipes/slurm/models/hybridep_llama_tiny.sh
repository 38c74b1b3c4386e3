# shellcheck shell=bash disable=SC2034 source=../shared/hybridep.sh
# HybridEP's Llama-Tiny (Table II): P_E 2.1M.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/hybridep.sh"

arguments+=(
    --num-layers 12 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8
)
