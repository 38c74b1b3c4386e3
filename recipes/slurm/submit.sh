#!/usr/bin/env bash
# Submits pretrain_gpt.sbatch with a recipe's number of nodes; the head of that script says which variables it takes.
# Settings of the site go through sbatch's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, ...).
#
#   [NODES=N] bash recipes/slurm/submit.sh MODEL [ARGUMENTS of Megatron-LM, which replace the recipe's]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

model="${1:?name in recipes/slurm/models, or path of a file of your own}"
shift
recipe="$here/models/$model.sh"
[[ -r "$recipe" ]] || recipe="$(realpath -e "$model")"
# shellcheck source=models/mixtral_8x7b.sh
source "$recipe"

# shellcheck disable=SC2154 # the recipe sets them
exec sbatch --nodes "${NODES:-$nodes}" --ntasks-per-node "$gpus_per_node" --gpus-per-node "$gpus_per_node" \
    --job-name "$(basename "$recipe" .sh)" "$here/pretrain_gpt.sbatch" "$recipe" "$@"
