# shellcheck shell=bash disable=SC2034 source=../shared/netmoe.sh
# NetMoE's MoE-GPT-L (Table 3), on GPT-2 large (774M).
source "$(dirname "${BASH_SOURCE[0]}")/../shared/netmoe.sh"

arguments+=(
    --num-layers 36 --hidden-size 1280 --ffn-hidden-size 5120 --num-attention-heads 20
)
