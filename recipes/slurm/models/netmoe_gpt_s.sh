# shellcheck shell=bash disable=SC2034 source=../shared/netmoe.sh
# NetMoE's MoE-GPT-S (Table 3), on GPT-2 small (124M).
source "$(dirname "${BASH_SOURCE[0]}")/../shared/netmoe.sh"

arguments+=(
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12
)
