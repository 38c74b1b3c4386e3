# shellcheck shell=bash disable=SC2034 source=../shared/decoder.sh
# DeepSeek-V3-like: DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2, and config.json of deepseek-ai/DeepSeek-V3: 61 layers,
# 3 of them dense, latent attention, 256 experts and a shared one, 8 of 4 groups a token, sigmoid gates with biases in the
# place of most of the balancing loss. Not like it: bf16 instead of FP8, no multi-token prediction, a constant batch
# (theirs grows from 3072), cosine decay, plain rotary positions (YaRN came after, for longer contexts).
#
# 16 stages and EP 64 as the paper trains (section 3.2); 61 layers as 4, 14 times 4, and 1 beside the output, as in
# NVIDIA's Megatron-MoE-ModelZoo. Weights, gradients and optimizer states are about 20 GB a GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/decoder.sh"

nodes=128 # 1024 ranks: TP 1, PP 16, CP 1, EP 64, expert-TP 1
vocabulary=129280

arguments+=(
    --make-vocab-size-divisible-by 3232 # the tokenizer has fewer words: as published, not the next multiple of 128
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --rope-type rope --no-rope-fusion --rotary-base 10000 --norm-epsilon 1e-6 --init-method-std 0.006
    --seq-length 4096 --max-position-embeddings 4096

    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq "([0]*3+[1]*58)"
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4

    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --context-parallel-size 1
    --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --recompute-granularity selective --recompute-modules mla_up_proj layernorm mlp moe

    --micro-batch-size 1 --global-batch-size 15360 --train-iters 235000 --save-interval 100
    --lr 2.2e-4 --min-lr 7.3e-6 --lr-warmup-iters 2000
)
dispatcher=(--moe-token-dispatcher-type auto)
