# shellcheck shell=bash disable=SC2034 source=gpt.sh
# HybridEP, Table II and section V-A: 32 experts on Cluster-L, 4 data centres of 8 A800 (PCIe 3.0 inside, 10 Gb/s Ethernet
# between). Sequence, samples and experts of a token are of Table III's ranges; the middle size of an expert follows from
# its parameters, P_E = 2 H M. Heads are not given: 64 wide, as GPT-2's.
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

nodes=4 # 32 ranks: TP 1, PP 1, CP 1, EP 32, expert-TP 1

arguments+=(
    --seq-length 512 --max-position-embeddings 512
    --num-experts 32 --moe-router-topk 2
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --micro-batch-size 16 --global-batch-size 512 --lr 1e-4 --min-lr 1e-5
)
# Domains of 4 data centres and of 1 GPU inside: experts travel between the data centres, tokens inside them. Table VI's
# Cluster-L at 24 MB of tokens and experts of 8 MB.
dispatcher=(--moe-token-dispatcher-type expert-migration --moe-opt-domain-sizes "4,1")
