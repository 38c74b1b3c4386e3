# shellcheck shell=bash disable=SC2034 source=../shared/decoder.sh
# MoNTA's 2x70B: hidden size, TP, EP and DP of Table 7, sequences of 8K (End-to-End time on Model), one expert a node, on 2
# nodes of 8 A800 of 80 GB with 200 Gb/s InfiniBand. Of a "70B" with hidden size 8192 the rest is Llama 2's (Touvron et
# al. 2023, arXiv 2307.09288; config.json of meta-llama/Llama-2-70b-hf). Each token goes to both experts: Table 8 has
# 256 MB for the all-to-all of 8K tokens, which are 128 MB. Learning rate as Llama 2's.
#
# 125 billion parameters have 18 bytes each of weights, gradients and optimizer states, which 16 GPUs of 80 GB do not hold;
# the paper does not say where they were. Here Adam's states are on the hosts (12 bytes a parameter, 750 GB a node, and
# copies of gradients besides), and layers are recomputed.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/decoder.sh"

nodes=2 # 16 ranks: TP 8, PP 1, CP 1, EP 2, expert-TP 8
vocabulary=32000

arguments+=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --rotary-base 10000 --norm-epsilon 1e-5
    --seq-length 8192 --max-position-embeddings 8192

    --num-experts 2 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2

    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 8

    --use-precision-aware-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1

    --micro-batch-size 1 --global-batch-size 64 --train-iters 100000
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-warmup-iters 2000
)
# With a profile the level and the chunks are chosen; the paper's choice at 8K is O1, this dispatcher's without one.
dispatcher=(--moe-token-dispatcher-type monta)
