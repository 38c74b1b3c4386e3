# shellcheck shell=bash disable=SC2034 source=gpt.sh
# MPMoE, Table III and section V-A: 64 experts on Adira, 8 DGX A100 with 8 GPUs of 40 GB and 200 Gb/s InfiniBand. (Valor,
# 4 nodes of 4 V100, has 16 experts and no bf16.) The table gives the sizes of an expert; layers, heads and sequences are
# those of the models it names. A token goes to one expert, as the paper counts rows (eq. 2).
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

nodes=8 # 64 ranks: TP 1, PP 1, CP 1, EP 64, expert-TP 1
gpu_memory=40

arguments+=(
    --num-experts 64 --moe-router-topk 1 --moe-router-pre-softmax
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --lr 2e-4 --min-lr 2e-5
)
# Of MPMoE-pb (section IV-A) the partitions; with a PROFILE the job's dispatcher is auto, which chooses them and memory reuse, and
# tries what it chooses. Where activations must fit, add --moe-opt-activation-budget to that.
dispatcher=(--moe-token-dispatcher-type mpmoe --moe-opt-partitions 4)
