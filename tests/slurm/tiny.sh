# shellcheck shell=bash disable=SC2034
# A model that four CPU processes train, as a recipe of recipes/slurm: saves on SIGTERM, logs every iteration.
nodes=2 # 4 ranks: TP 1, PP 1, CP 1, EP 4
gpus_per_node=2
gpu_memory=80
vocabulary=256

arguments=(
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 4
    --micro-batch-size 1 --global-batch-size 4 --train-iters 100 --lr 1e-3 --lr-decay-iters 100 --split "99,1,0"
    --exit-signal-handler --save-interval 1000 --eval-interval 1000 --eval-iters 1 --log-interval 1 --num-workers 1
    --distributed-timeout-minutes 2

    # Without a GPU.
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-persist-layer-norm
    --no-rope-fusion --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
)
dispatcher=(--moe-token-dispatcher-type monta)
