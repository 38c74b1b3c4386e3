# shellcheck shell=bash source=training.sh
# Decoders as published since Llama: rotary positions, RMSNorm, SwiGLU, a matrix of its own for the output.
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"

arguments+=(
    --position-embedding-type rope --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights
)
