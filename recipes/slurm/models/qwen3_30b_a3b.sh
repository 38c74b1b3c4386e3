# shellcheck shell=bash disable=SC2034 source=../shared/decoder.sh
# Qwen3-30B-A3B-like: Qwen Team 2025 (arXiv 2505.09388), Table 2, and config.json of Qwen/Qwen3-30B-A3B. Batch, learning rate
# and EP as in NVIDIA's Megatron-MoE-ModelZoo, with 2 pipeline stages.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/decoder.sh"

nodes=4 # 32 ranks: TP 1, PP 2, CP 1, EP 8, expert-TP 1
vocabulary=151936

arguments+=(
    --make-vocab-size-divisible-by 1187 # the tokenizer has fewer words: as published, not the next multiple of 128
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --rotary-base 1000000 --norm-epsilon 1e-6
    --seq-length 4096 --max-position-embeddings 40960

    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3

    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 1
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1

    --micro-batch-size 1 --global-batch-size 256 --train-iters 500000
    --lr 1.2e-4 --min-lr 1.2e-5 --lr-warmup-iters 2000
)
dispatcher=(--moe-token-dispatcher-type auto)
