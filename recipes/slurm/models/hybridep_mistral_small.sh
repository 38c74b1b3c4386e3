# shellcheck shell=bash disable=SC2034 source=../shared/hybridep.sh
# HybridEP's Mistral-Small (Table II): P_E 4.7M.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/hybridep.sh"

arguments+=(
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12
)
