# shellcheck shell=bash disable=SC2034 source=../shared/decoder.sh
# Mixtral 8x7B: Jiang et al. 2024 (arXiv 2401.04088), Table 1, and config.json of mistralai/Mixtral-8x7B-v0.1. Batch and
# learning rate as in Megatron-LM's examples/mixtral.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/decoder.sh"

nodes=4 # 32 ranks: TP 2, PP 2, CP 1, EP 8, expert-TP 1
vocabulary=32000

arguments+=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --rotary-base 1000000 --norm-epsilon 1e-5 --init-method-std 0.01
    --seq-length 4096 --max-position-embeddings 32768

    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2

    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --context-parallel-size 1
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1

    --micro-batch-size 1 --global-batch-size 256 --train-iters 500000
    --lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 500
)
dispatcher=(--moe-token-dispatcher-type auto)
