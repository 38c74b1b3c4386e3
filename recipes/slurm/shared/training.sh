# shellcheck shell=bash disable=SC2034
# What all recipes train with; a model's file goes on from here. Its paths come from the job (pretrain_gpt.sbatch).
gpus_per_node=8
gpu_memory=80 # GB; the recipe is refused where a rank needs more

arguments=(
    --bf16 --attention-dropout 0.0 --hidden-dropout 0.0
    --disable-bias-linear --moe-grouped-gemm

    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --split "99,1,0"

    # SIGTERM, before the time limit or a preemption: save and exit.
    --exit-signal-handler --save-interval 500
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    # Rank 0 alone indexes a new data set while the others wait.
    --distributed-timeout-minutes 30
)
