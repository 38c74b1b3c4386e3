"""A small MoE GPT trained through Megatron's own loop, for tests on the pool of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.ranks.megatron import ends_with_groups, moe_config

VOCAB, TOKENS, MICRO_BATCH = 128, 32, 2


@dataclass
class Gpt:
    """Model, optimizer and data position. `losses` are those of the steps taken, on every rank.

    `chunks` are the parts of the model that this rank holds: one, or as many as there are virtual pipeline stages.
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: Any
    microbatches: int = 2
    same_data: bool = False
    optimizer_format: str = "dp_reshardable"
    micro_batch: int = MICRO_BATCH
    step: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def model(self) -> DistributedDataParallel:
        """The first chunk: all of this rank's model without virtual pipeline stages."""
        return self.chunks[0]

    def train(self, steps: int) -> list[float]:
        """Take optimizer steps; return their losses."""
        return [self.train_step() for _ in range(steps)]

    def train_step(self) -> float:
        """One optimizer step over `microbatches`; the mean loss over the whole batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.forward_backward()
        updated, _, _ = self.optimizer.step()
        assert updated
        self.step += 1
        mean = torch.zeros(2, device="cuda")
        for loss, tokens in losses:  # on the last pipeline stage only
            mean += torch.stack((loss, tokens.float()))
        dist.all_reduce(mean)
        self.losses.append((mean[0] / mean[1]).item())
        return self.losses[-1]

    @cached_property
    def _schedule(self) -> Any:
        """Returns Megatron's schedule, asked for once before the first step, as Megatron-LM's loop does."""
        return get_forward_backward_func()

    def forward_backward(self, forward_only: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Forward and backward of one step's microbatches; gradients are in the DDP buffers afterwards."""
        return self._schedule(
            forward_step_func=_forward_step,
            data_iterator=[iter([self.batch(index) for index in range(self.microbatches)]) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=self.microbatches,
            seq_length=TOKENS,
            micro_batch_size=self.micro_batch,
            forward_only=forward_only,
        )

    def batch(self, microbatch: int) -> dict[str, torch.Tensor]:
        """Sequences that count on by a constant step: int64 [micro_batch, TOKENS], cut to this CP rank's part.

        Data-parallel ranks see different sequences, unless `same_data`.
        """
        replica = 0 if self.same_data else parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(1000 * self.step + 10 * replica + microbatch)
        start = torch.randint(0, VOCAB, (self.micro_batch, 1), generator=generator)
        stride = torch.randint(1, 4, (self.micro_batch, 1), generator=generator)
        sequence = (start + stride * torch.arange(TOKENS + 1)) % VOCAB
        batch = {
            "tokens": sequence[:, :-1],
            "labels": sequence[:, 1:],
            "position_ids": torch.arange(TOKENS).repeat(self.micro_batch, 1),
        }
        size, rank = (
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
        )
        # Chunks rank and 2 * size - 1 - rank of 2 * size, as Megatron's get_batch_on_this_cp_rank cuts.
        return {
            name: torch.cat([part.chunk(2 * size, 1)[chunk] for chunk in (rank, 2 * size - 1 - rank)], 1)
            for name, part in batch.items()
        }

    def sharded_state(self, loading: bool = False) -> dict[str, Any]:
        """Returns what a distributed checkpoint of model and optimizer holds."""
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": self.optimizer_format,
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: str) -> None:
        """Write a distributed checkpoint (torch_dist)."""
        dist_checkpointing.save(self.sharded_state(), folder)

    def load(self, folder: str) -> None:
        """Read one back into model and optimizer."""
        state = dist_checkpointing.load(self.sharded_state(loading=True), folder)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def gpt(
    *,
    bf16: bool = False,
    distributed_optimizer: bool = True,
    overlap: bool = False,
    learning_rate: float = 1e-2,
    microbatches: int = 2,
    same_data: bool = False,
    optimizer_format: str = "dp_reshardable",
    micro_batch: int = MICRO_BATCH,
    **config: Any,
) -> Gpt:
    """Build model, DDP and optimizer for the present parallel state. `config` goes to `moe_config`."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = moe_config(bf16=bf16, params_dtype=dtype, pipeline_dtype=dtype, **config)
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = [
        _chunk(config, distributed_optimizer, overlap, stage)
        for stage in ([None] if virtual is None else range(virtual))
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=learning_rate,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed_optimizer,
            overlap_param_gather=overlap and distributed_optimizer,
        ),
        chunks,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if overlap:
        (chunk,) = chunks
        config.no_sync_func = chunk.no_sync
        config.grad_sync_func = None
        config.param_sync_func = chunk.start_param_sync if distributed_optimizer else None
    return Gpt(config, chunks, optimizer, microbatches, same_data, optimizer_format, micro_batch)


def _chunk(
    config: TransformerConfig, distributed_optimizer: bool, overlap: bool, vp_stage: int | None
) -> DistributedDataParallel:
    """The layers of this rank's pipeline stage, or of one of its virtual stages."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    whole = vp_stage is None
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=whole, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=whole, vp_stage=vp_stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )
    model.cuda()  # as Megatron-LM does: a router is made on the host
    if config.bf16:
        model = Float16Module(config, model)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.bf16,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and distributed_optimizer,
            bucket_size=20_000 if overlap else None,
        ),
        model,
    )
    model.broadcast_params()
    return ends_with_groups(model)


def _forward_step(batches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    batch = next(batches)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])
    return output, _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    total, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, tokens, (total.detach().clone(), tokens)
