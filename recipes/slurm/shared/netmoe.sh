# shellcheck shell=bash disable=SC2034 source=gpt.sh
# NetMoE, Table 3 and section 4.1: 4 samples a GPU (I/J), sequences of 1024 (S), 2 experts a GPU (E/J), top-2 (K), experts
# in every layer; on 4 nodes of 8 A800-SXM4 of 40 GB, NVLink 400 GB/s, InfiniBand 100 GB/s. A sample stays on one GPU.
# The table says neither heads nor layers: both are the base model's, unless a model's file says otherwise.
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

nodes=4 # 32 ranks: TP 1, PP 1, CP 1, EP 32, expert-TP 1
gpu_memory=40

arguments+=(
    --seq-length 1024 --max-position-embeddings 1024
    --num-experts 64 --moe-router-topk 2
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --micro-batch-size 4 --global-batch-size 128 --lr 2.5e-4 --min-lr 2.5e-5
)
dispatcher=(--moe-token-dispatcher-type netmoe)
