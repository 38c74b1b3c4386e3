# shellcheck shell=bash disable=SC2034 source=../shared/netmoe.sh
# NetMoE's MoE-GPT-XL (Table 3), on GPT-2 XL (1.5B): 24 of its 48 layers, which 40 GB hold.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/netmoe.sh"

arguments+=(
    --num-layers 24 --hidden-size 1600 --ffn-hidden-size 6400 --num-attention-heads 25
)
