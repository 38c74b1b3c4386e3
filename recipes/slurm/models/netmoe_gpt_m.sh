# shellcheck shell=bash disable=SC2034 source=../shared/netmoe.sh
# NetMoE's MoE-GPT-M (Table 3), on GPT-2 medium (355M).
source "$(dirname "${BASH_SOURCE[0]}")/../shared/netmoe.sh"

arguments+=(
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
)
