"""Shapes of models by name, as their publications or configuration files have them.

Word embeddings are not padded here beyond the published size, but GPT-2's and BERT's as Megatron does at the papers'
TP: to a multiple of 128 times TP. recipes/slurm/models trains the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_moe_opt.planning.training.model import ModelShape


def _gpt(layers: int, hidden: int, heads: int, experts: int, topk: int, vocabulary: int = 50304) -> ModelShape:
    """Returns GPT-2's blocks with experts four times as wide inside in all layers, and its words by default."""
    return ModelShape(
        layers, hidden, heads, vocabulary, experts, topk, 4 * hidden, gated=False, norm_parameters=2, tied=True
    )


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
    "parm-bert-base": _gpt(12, 768, 12, experts=8, topk=1, vocabulary=30720),
    "parm-gpt2": _gpt(12, 768, 12, experts=8, topk=1, vocabulary=50688),
    # NetMoE, Table 3, on 32 GPUs, two experts each (give experts=... for others); layers and heads are the base
    # models', GPT-2's and GPT-3 6.7B's, of which GPT-2 XL's 48 layers and the 32 of GPT-3 do not fit into 40 GB.
    "netmoe-gpt-s": _gpt(12, 768, 12, experts=64, topk=2),
    "netmoe-gpt-m": _gpt(24, 1024, 16, experts=64, topk=2),
    "netmoe-gpt-l": _gpt(36, 1280, 20, experts=64, topk=2),
    "netmoe-gpt-xl": _gpt(24, 1600, 25, experts=64, topk=2),
    "netmoe-gpt-xxl": _gpt(4, 4096, 32, experts=64, topk=2),
    # MPMoE, Table III, on Adira; layers and heads are those of GPT-3 Small and XL (arXiv 2005.14165, Table 2.1; XL's 24
    # heads of 128 do not make 2048) and of BERT-large, experts of a token as in its eq. 2.
    "mpmoe-gpt-s": _gpt(12, 768, 12, experts=64, topk=1),
    "mpmoe-gpt-xl": _gpt(24, 2048, 16, experts=64, topk=1),
    "mpmoe-bert-l": _gpt(24, 1024, 16, experts=64, topk=1),
    # HybridEP, Table II; experts of a token of Table III's range, heads of 64 as in GPT-2: assumed.
    "hybridep-llama-tiny": _gpt(12, 512, 8, experts=32, topk=2),
    "hybridep-mistral-small": _gpt(12, 768, 12, experts=32, topk=2),
    "hybridep-gpt-medium": _gpt(12, 1024, 16, experts=32, topk=2),
    "hybridep-gpt-large": _gpt(16, 1024, 16, experts=32, topk=2),
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
