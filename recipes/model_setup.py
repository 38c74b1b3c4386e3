"""Model, optimizer and learning-rate schedule of the recipe, built from Megatron-Core's own parts."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module


def build_config(args: argparse.Namespace) -> TransformerConfig:
    """The TransformerConfig that the command line describes."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        init_method_std=args.init_method_std,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=args.num_experts,
        moe_layer_freq=args.moe_layer_freq,
        moe_router_topk=args.moe_router_topk,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=args.moe_shared_expert_intermediate_size,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        moe_grouped_gemm=args.moe_grouped_gemm,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig, device: torch.device) -> DistributedDataParallel:
    """The part of the GPT that this rank's pipeline stage holds, wrapped for data parallelism."""
    # Megatron pads the vocabulary so that every tensor-parallel rank gets an equal, round part.
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    padded_vocab_size = -(-(args.vocab_size + 1) // multiple) * multiple
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=torch.cuda.is_available() and find_spec("transformer_engine") is not None,
            normalization="RMSNorm",
        ),
        vocab_size=padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    ).to(device)
    if args.bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=args.bf16, use_distributed_optimizer=args.use_distributed_optimizer
        ),
        model,
    )


def build_optimizer(
    args: argparse.Namespace, model: DistributedDataParallel
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam with the schedule of the command line; tells the model's config how to scale and finish gradients."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            bf16=args.bf16,
            params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    if next(model.parameters()).device.type == "cpu":
        for group in optimizer.param_groups:
            group["fused"] = True  # else PyTorch's Adam goes over every weight ten times
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
    samples = args.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * samples,
        lr_decay_steps=args.lr_decay_iters * samples,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # else a resumed run would go on by the schedule of the one before
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler
