#!/usr/bin/env bash
# Train a small MoE GPT on real text with `monta`, resume it from its middle, train it again with stock `alltoall`, and
# compare. Four ranks on this machine's CPU; python on PATH must have the package installed.
#
#   bash recipes/train_and_compare.sh [--text DIR] [--steps N] [--output DIR] [-- ARGUMENTS of pretrain_moe_gpt.py]
set -euo pipefail
here="$PWD"
CDPATH='' cd "$(dirname "$0")/.."

refuse() {
    echo "train_and_compare: error: $1" >&2
    exit 2
}

from_here() { # a path as whoever calls this recipe means it
    (cd "$here" && realpath -m "$1")
}

text=() steps=60 output=runs/quickstart data=runs/data/stdlib
while (($#)); do
    case "$1" in
        --text) text=(--text "$(from_here "$2")") data="runs/data/$(basename "${text[1]}")" && shift 2 ;;
        --steps) steps="$2" && shift 2 ;;
        --output) output="$(from_here "${2:?--output needs a folder}")" && shift 2 ;;
        --) shift && break ;;
        *) refuse "unknown argument $1; see the head of recipes/train_and_compare.sh" ;;
    esac
done
extra=("$@")
half=$((steps / 2)) resumed_steps=$((steps / 15 + 2))

# The same job everywhere: CPU, one thread a rank, no network.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

train() { # NAME DISPATCHER ARGUMENTS...
    local name="$1" dispatcher="$2"
    shift 2
    echo "== $name: $dispatcher"
    python -m torch.distributed.run --standalone --nproc-per-node 4 recipes/pretrain_moe_gpt.py \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 \
        --tensor-model-parallel-size 2 --sequence-parallel \
        --expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --use-distributed-optimizer \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$steps" \
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters $((steps / 10)) \
        --data-path "$data" --split 1,0,0 --log-json "$output/$name.jsonl" \
        --moe-token-dispatcher-type "$dispatcher" "$@" "${extra[@]}"
}

# An earlier comparison in the folder makes room, and nothing else: only what a file of ours says we made.
made_here="$output/.made_by_train_and_compare"
if [[ -e "$output" && ! -e "$made_here" && -n "$(ls -A "$output")" ]]; then
    refuse "--output $output holds what this recipe did not make; name a new folder"
fi
mkdir -p "$output"
touch "$made_here"
rm -rf "$output"/{monta,resumed,alltoall}.jsonl "$output/checkpoints" "$output/closing_table.md" "$output/loss.png"
echo "== text"
python recipes/prepare_text.py --output "$data" "${text[@]}"

train monta monta --save "$output/checkpoints" --save-interval "$half"
train resumed monta --load "$output/checkpoints" --ckpt-step "$half" --exit-interval $((half + resumed_steps))
echo "== the same steps with stock, each loss beside monta's"
train alltoall alltoall --compare-with "$output/monta.jsonl"

echo "== comparison"
python recipes/compare_runs.py --output "$output" --run monta "$output/monta.jsonl" \
    --baseline alltoall "$output/alltoall.jsonl" --resumed "$output/resumed.jsonl"
