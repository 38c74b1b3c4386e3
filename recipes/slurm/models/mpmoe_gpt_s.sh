# shellcheck shell=bash disable=SC2034 source=../shared/mpmoe.sh
# MPMoE's MoE-GPT-S (Table III), on GPT-3 Small (Brown et al. 2020, arXiv 2005.14165, Table 2.1). 8K tokens a GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/mpmoe.sh"

arguments+=(
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 256
)
