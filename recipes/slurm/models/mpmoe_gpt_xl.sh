# shellcheck shell=bash disable=SC2034 source=../shared/mpmoe.sh
# MPMoE's MoE-GPT-XL (Table III), on GPT-3 XL (Brown et al. 2020, arXiv 2005.14165, Table 2.1), whose 24 heads of 128 do not
# make 2048: 16 of them. 8K tokens a GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/mpmoe.sh"

arguments+=(
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 256
)
