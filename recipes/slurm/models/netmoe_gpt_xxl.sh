# shellcheck shell=bash disable=SC2034 source=../shared/netmoe.sh
# NetMoE's MoE-GPT-XXL (Table 3), on GPT-3 6.7B (Brown et al. 2020, arXiv 2005.14165,
# Table 2.1): 4 of its 32 layers, which 40 GB hold.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/netmoe.sh"

arguments+=(
    --num-layers 4 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32
)
