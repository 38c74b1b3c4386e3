"""Shapes of models by name, as their publications or configuration files have them.

Word embeddings are not padded here beyond the published size: Megatron pads them to a multiple of 128 times TP.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_moe_opt.planning.training.model import ModelShape

KNOWN_MODELS: Mapping[str, ModelShape] = {
    # Jiang et al. 2024 (arXiv 2401.04088), Table 1.
    "mixtral-8x7b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, vocabulary=32000, experts=8, topk=2, ffn=14336
    ),
    # MoNTA, Table 7: two experts, hidden size 8192. Of the rest the paper says "70B": taken from Llama 2 70B
    # (arXiv 2307.09288), with which the published volumes agree where each token goes to both experts.
    "monta-2x70b": ModelShape(
        layers=80, hidden=8192, heads=64, kv_heads=8, vocabulary=32000, experts=2, topk=2, ffn=28672
    ),
    # DeepSeek-V3 (arXiv 2412.19437), section 4.2, without its latent attention: 128 heads of 128 with grouped queries
    # stand for it, which have 1.3 times its matrices.
    "deepseek-v3-like": ModelShape(
        layers=61, hidden=7168, heads=128, head_size=128, kv_heads=8, vocabulary=129280, experts=256, topk=8, ffn=2048,
        shared_ffn=2048, dense_layers=3, dense_ffn=18432,
    ),
    # Qwen3 (arXiv 2505.09388), Table 2, and config.json of Qwen/Qwen3-30B-A3B.
    "qwen3-30b-a3b-like": ModelShape(
        layers=48, hidden=2048, heads=32, head_size=128, kv_heads=4, vocabulary=151936, experts=128, topk=8, ffn=768,
        qk_norm=True,
    ),
    # Parm, section VI-D: BERT-Base (Devlin et al. 2019, arXiv 1810.04805) and GPT-2 small (Radford et al. 2019) with 8
    # experts, as on its testbed B; a token goes to one of them, which the paper does not say. Words padded for TP 4.
    "parm-bert-base": ModelShape(
        layers=12, hidden=768, heads=12, vocabulary=30720, experts=8, topk=1, ffn=3072, gated=False, norm_parameters=2,
        tied=True,
    ),
    "parm-gpt2": ModelShape(
        layers=12, hidden=768, heads=12, vocabulary=50688, experts=8, topk=1, ffn=3072, gated=False, norm_parameters=2,
        tied=True,
    ),
}  # fmt: skip

MONTA_CHOICES: Mapping[int, str] = {
    4096: "O1",
    8192: "O1",
    16384: "O1",
    32768: "O2",
    65536: "O2",
    131072: "O2",
    262144: "O3",
}
"""What MoNTA's paper says it selects, by tokens of a sequence (its AllToAll performance section, Fig. 14), for
monta-2x70b on 16 GPUs of a800-ib200 with TP and expert-TP 8 and EP 2."""
