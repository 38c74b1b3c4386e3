#!/usr/bin/env bash
# Checks what a job will need, then submits pretrain_gpt.sbatch with a recipe's number of nodes; the head of that script says
# which variables it takes. Settings of the site go through sbatch's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT,
# SBATCH_TIMELIMIT, ...).
#
#   [NODES=N] bash recipes/slurm/submit.sh MODEL [ARGUMENTS of Megatron-LM, which replace the recipe's]
set -euo pipefail
here="$(CDPATH='' cd "$(dirname "$0")" && pwd)"

refuse() {
    echo "submit.sh: error: $1" >&2
    exit 2
}

models=("$here"/models/*.sh)
names="$(basename -s .sh "${models[@]}" | paste -sd ' ')"
model="${1:-}"
[[ -n "$model" ]] || refuse "name a recipe, or the path of a file of your own; recipes are: $names"
shift
for argument in "$@"; do
    [[ ! "$argument" =~ ^--(save|load)(=|$) ]] || refuse "$argument is the job's own, which goes on from CHECKPOINTS: set \
that folder; to begin with the weights of another run give --pretrained-checkpoint"
done
recipe="$here/models/$model.sh"
[[ -r "$recipe" ]] || recipe="$(realpath -e "$model" 2>/dev/null)" ||
    refuse "$model is neither a file nor a recipe, which are: $names"
# shellcheck source=models/mixtral_8x7b.sh
source "$recipe"

# What the job would find out after the queue. In a container paths are the container's, and Python is.
[[ -z "${PROFILE:-}" || -z "${PLAN:-}" ]] || refuse "PROFILE and PLAN are two ways to plan: give one of them"
if [[ -z "${MEASURE:-}" ]]; then
    [[ -n "${MEGATRON_LM:-}" ]] || refuse "set MEGATRON_LM: a checkout of Megatron-LM, core_v0.16 to core_v0.19, or main"
    [[ -n "${CHECKPOINTS:-}" ]] || refuse "set CHECKPOINTS: a folder of this run that all nodes share"
    [[ -z "${CONTAINER:-}" || "$CHECKPOINTS" == /* ]] ||
        refuse "CHECKPOINTS: $CHECKPOINTS is not where a container starts: give an absolute path"
    [[ -n "${DATA:-}" ]] || refuse "set DATA: prefix of a data set, or mock"
    [[ "$DATA" == mock || -n "${TOKENIZER:-}" ]] || refuse "set TOKENIZER: name or folder of a tokenizer"
fi
if [[ -z "${CONTAINER:-}" ]]; then
    exists() { # VARIABLE, what is missing where PATH is: PATH...
        local variable="$1" path
        shift
        for path in "$@"; do
            [[ -e "$path" ]] || refuse "$variable: there is no $path"
        done
    }
    [[ -z "${PROLOGUE:-}" ]] || exists PROLOGUE "$PROLOGUE"
    [[ -z "${PROFILE:-}" ]] || exists PROFILE "$PROFILE"
    [[ -z "${PLAN:-}" ]] || exists PLAN "$PLAN"
    if [[ -n "${MEASURE:-}" ]]; then
        exists MEASURE "$(dirname "$MEASURE")"
    else
        exists MEGATRON_LM "$MEGATRON_LM/pretrain_gpt.py"
        [[ "$DATA" == mock ]] || exists DATA "$DATA.bin" "$DATA.idx"
        [[ "$DATA" == mock || "$TOKENIZER" != /* ]] || exists TOKENIZER "$TOKENIZER" # else it may be a name
        mkdir -p "$CHECKPOINTS" || refuse "CHECKPOINTS: $CHECKPOINTS cannot be made"
    fi
    if [[ -n "${PROLOGUE:-}" ]]; then # it may be what finds Python
        given=("$@")
        set --
        set +eu
        # shellcheck disable=SC1090
        source "$PROLOGUE"
        set -eu
        set -- "${given[@]}"
    fi
    command -v "${PYTHON:-python3}" >/dev/null || refuse "PYTHON: there is no ${PYTHON:-python3}"
    planned=()
    [[ -z "${PROFILE:-}" ]] || planned=(--moe-token-dispatcher-type auto --moe-opt-profile "$PROFILE")
    [[ -z "${PLAN:-}" ]] || planned=(--moe-token-dispatcher-type auto --moe-opt-plan "$PLAN")
    # shellcheck disable=SC2154 # the recipe sets it
    PYTHONPATH="${MEGATRON_LM:+$MEGATRON_LM:}${PYTHONPATH:-}" \
        "${PYTHON:-python3}" "$here/check_recipe.py" "$recipe" --nodes "${NODES:-$nodes}" -- "${planned[@]}" "$@" || exit 2
fi

# SIGTERM 10 minutes before the end, which a short job spends otherwise; a measurement takes minutes.
[[ -z "${MEASURE:-}" ]] || export SBATCH_TIMELIMIT="${SBATCH_TIMELIMIT:-30}"
seconds() { # of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S
    local days=0 parts
    IFS=: read -ra parts <<<"${1#*-}"
    if [[ "$1" == *-* ]]; then
        days="${1%%-*}"
        parts+=(0 0)
    elif ((${#parts[@]} < 3)); then
        parts=(0 "${parts[@]}" 0)
    fi
    echo "$((((10#$days * 24 + 10#${parts[0]}) * 60 + 10#${parts[1]}) * 60 + 10#${parts[2]}))"
}
signal=()
if [[ -z "${SBATCH_SIGNAL:-}" && "${SBATCH_TIMELIMIT:-}" =~ ^[0-9:-]+$ ]] && (($(seconds "$SBATCH_TIMELIMIT") < 2400)); then
    signal=(--signal "TERM@$(($(seconds "$SBATCH_TIMELIMIT") / 4))")
fi

# shellcheck disable=SC2154 # the recipe sets them
exec sbatch --nodes "${NODES:-$nodes}" --ntasks-per-node "$gpus_per_node" --gpus-per-node "$gpus_per_node" "${signal[@]}" \
    --job-name "$(basename "$recipe" .sh)" "$here/pretrain_gpt.sbatch" "$recipe" "$@"
