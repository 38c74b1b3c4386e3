# shellcheck shell=bash disable=SC2034 source=../shared/parm.sh
# Parm's GPT-2 (Table V), on GPT-2 small (124M).
source "$(dirname "${BASH_SOURCE[0]}")/../shared/parm.sh"

arguments+=(--seq-length 1024 --max-position-embeddings 1024)
