# shellcheck shell=bash disable=SC2034 source=training.sh
# GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, one matrix for words and output. As in the papers, an
# expert is two matrices, and no linear layer has a bias (Megatron's experts have one only without expert-TP). Made for
# measuring: 1000 iterations.
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"

vocabulary=50257

arguments+=(
    --position-embedding-type learned_absolute --normalization LayerNorm
    --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --train-iters 1000 --lr-warmup-iters 100
)
