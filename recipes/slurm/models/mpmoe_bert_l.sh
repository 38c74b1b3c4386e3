# shellcheck shell=bash disable=SC2034 source=../shared/mpmoe.sh
# MPMoE's MoE-BERT-L (Table III), in the sizes of BERT-large (Devlin et al. 2018, arXiv 1810.04805); a decoder, as
# pretrain_gpt.py trains. 8K tokens a GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/mpmoe.sh"

arguments+=(
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 16 --global-batch-size 1024
)
