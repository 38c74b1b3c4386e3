# shellcheck shell=bash disable=SC2034 source=../shared/parm.sh
# Parm's BERT-Base (Table V): the sizes of Devlin et al. 2019 (arXiv 1810.04805) and its words in a decoder, which is what
# pretrain_gpt.py trains.
source "$(dirname "${BASH_SOURCE[0]}")/../shared/parm.sh"

vocabulary=30522

arguments+=(--seq-length 512 --max-position-embeddings 512)
