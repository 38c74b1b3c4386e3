# shellcheck shell=bash disable=SC2034 source=gpt.sh
# Parm, section VI-D: MoE versions of BERT-Base and GPT-2 with N_MP = N_ESP = 4 and 8 experts on testbed B (Table II), 8 nodes
# of 4 RTX 2080 Ti of 11 GB. Tokens are not split by sequence parallelism: that is what parm is about. The paper says neither
# top-k nor samples: a token goes to one expert here, with f = 1.2 of Table III, 8 samples a GPU. These GPUs have no bf16:
# there, use --fp16 in the place of --bf16, in a copy of shared/training.sh.
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

nodes=8 # 32 ranks: TP 4, PP 1, CP 1, EP 8, expert-TP 4
gpus_per_node=4
gpu_memory=11

arguments+=(
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12
    --num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-expert-capacity-factor 1.2
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 4
    --micro-batch-size 8 --global-batch-size 64 --lr 2.5e-4 --min-lr 2.5e-5
)
dispatcher=(--moe-token-dispatcher-type parm)
