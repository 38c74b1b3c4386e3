"""Training and validation batches from a Megatron indexed dataset (PREFIX.bin and PREFIX.idx)."""

from __future__ import annotations

import argparse
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_moe_opt.errors import ConfigurationError

TokenData: TypeAlias = "GPTDataset | BlendedDataset"

SPLIT_NAMES = ("training", "validation", "test")
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_TOKENS_LOOKED_AT = 1 << 20


@dataclass(frozen=True)
class TokenIds:
    """The token numbering of an already tokenised dataset: 0..eod - 1, then end-of-document."""

    eod: int

    @property
    def vocab_size(self) -> int:
        return self.eod + 1

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What Megatron's dataset cache is keyed on."""
        return OrderedDict({"class": type(self).__name__, "eod": str(self.eod)})


def check_datasets(args: argparse.Namespace) -> None:
    """Check that every dataset is there, is whole, has tokens of the vocabulary, and has a sample for each split.

    Raises ConfigurationError where one is not; reads its index and at most its first million tokens.
    """
    for _, prefix in args.blend:
        _check_dataset(args, prefix)


def _check_dataset(args: argparse.Namespace, prefix: str) -> None:
    for suffix in (".bin", ".idx"):
        path = Path(prefix + suffix)
        if not path.is_file():
            raise ConfigurationError(
                f"--data-path {prefix}: {path} does not exist; make the dataset with recipes/prepare_text.py"
            )
        if path.stat().st_size == 0:
            raise ConfigurationError(
                f"--data-path {prefix}: {path} is empty; make the dataset again with recipes/prepare_text.py"
            )
    not_an_index = ConfigurationError(
        f"--data-path {prefix}: {prefix}.idx is not the index of a Megatron dataset; make the dataset again with"
        " recipes/prepare_text.py"
    )
    with open(prefix + ".idx", "rb") as index:
        if index.read(len(_INDEX_MAGIC)) != _INDEX_MAGIC:
            raise not_an_index
    try:
        dataset = IndexedDataset(prefix)
    except (AssertionError, ValueError, KeyError, IndexError, OSError, struct.error) as error:
        raise not_an_index from error
    lengths = dataset.sequence_lengths
    token_bytes = numpy.dtype(dataset.index.dtype).itemsize
    if Path(prefix + ".bin").stat().st_size < int(lengths.sum(dtype=numpy.int64)) * token_bytes:
        raise ConfigurationError(
            f"--data-path {prefix}: {prefix}.bin is shorter than its index says; make the dataset again with"
            " recipes/prepare_text.py"
        )
    _check_splits(args, prefix, lengths)
    _check_vocabulary(args, prefix, dataset)


def _check_splits(args: argparse.Namespace, prefix: str, lengths: numpy.ndarray) -> None:
    weights = _split_weights(args.split)
    if args.eval_iters and not weights[1]:
        raise ConfigurationError(
            f"--eval-iters {args.eval_iters}: --split {args.split} has no validation part; give it one, such as 99,1,0"
        )
    bounds = numpy.concatenate(([0.0], numpy.cumsum(weights))) / sum(weights)
    # The same rounding as BlendedMegatronDatasetBuilder, which shares out whole documents.
    documents = [round(float(bound) * float(len(lengths))) for bound in bounds]
    for name, weight, begin, end in zip(SPLIT_NAMES, weights, documents, documents[1:], strict=False):
        tokens = int(lengths[begin:end].sum(dtype=numpy.int64))
        if weight > 0 and tokens <= args.seq_length:
            raise ConfigurationError(
                f"--data-path {prefix}: the {name} part of --split {args.split} has {tokens} tokens, fewer"
                f" than one sample of --seq-length {args.seq_length} needs ({args.seq_length + 1}); prepare more text"
                " or change --split"
            )


def _split_weights(split: str) -> list[float]:
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= len(SPLIT_NAMES) or min(weights) < 0 or weights[0] == 0:
        raise ConfigurationError(
            f"--split {split} must be up to three numbers, training first and more than 0, such as 99,1,0"
        )
    return weights + [0.0] * (len(SPLIT_NAMES) - len(weights))


def _check_vocabulary(args: argparse.Namespace, prefix: str, dataset: IndexedDataset) -> None:
    looked_at = 0
    for document in range(len(dataset)):
        tokens = dataset.get(document, length=min(int(dataset.sequence_lengths[document]), _TOKENS_LOOKED_AT))
        if len(tokens) and (tokens.min() < 0 or tokens.max() > args.vocab_size):
            raise ConfigurationError(
                f"--data-path {prefix}: document {document} holds token {tokens.max()}, but"
                f" --vocab-size {args.vocab_size} allows 0 to {args.vocab_size}; raise --vocab-size"
            )
        looked_at += len(tokens)
        if looked_at >= _TOKENS_LOOKED_AT:
            return


def kind_names(args: argparse.Namespace) -> tuple[str, ...]:
    """What the datasets are called, for a record of which sample was of which: the names of their files."""
    return tuple(Path(prefix).name for _, prefix in args.blend)


def build_datasets(args: argparse.Namespace, index_cache: Path) -> tuple[TokenData, TokenData | None]:
    """Build the training dataset and, where `--eval-iters` asks for it, the validation dataset.

    Called by all ranks together: rank 0 writes the sample indices into `index_cache`, the others read them. Several
    datasets are mixed by weight, sequence by sequence.
    """
    weights, prefixes = ([part[index] for part in args.blend] for index in (0, 1))
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, weights if len(prefixes) > 1 else None),
        split=",".join(map(str, _split_weights(args.split))),
        path_to_cache=str(index_cache),
        tokenizer=TokenIds(args.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()
    return train, valid if args.eval_iters else None


def check_samples(args: argparse.Namespace, samples: int, iteration: int, consumed_samples: int, last: int) -> None:
    """Check that a resumed run has data to its last iteration: its earlier batches may have been larger.

    Args:
        args: the command line.
        samples: of the training dataset that it asks for.
        iteration: where the run begins.
        consumed_samples: by then.
        last: where it ends.

    Raises:
        ConfigurationError: samples would run out; with the batch size that they would last for.
    """
    batch, needed = args.global_batch_size, consumed_samples + (last - iteration) * args.global_batch_size
    if needed > samples:
        raise ConfigurationError(
            f"--global-batch-size {batch}: {consumed_samples} samples are consumed in {iteration} iterations, and"
            f" {last - iteration} more end at sample {needed}, but --train-iters {args.train_iters} of this size makes"
            f" {samples}; give {-(-consumed_samples // iteration)} or more"
        )


def batches(
    dataset: TokenData, micro_batch_size: int, consumed_samples: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches, in Megatron's order: consecutive samples shared out over the data-parallel ranks.

    Ranks of one tensor, pipeline or context group read the same samples; a context-parallel rank keeps its part of
    each sequence.

    Args:
        dataset: samples of `seq_length` tokens.
        micro_batch_size: samples a rank takes at a time.
        consumed_samples: samples, over all ranks, that an earlier run has used already.
        device: where the tensors go.

    Yields:
        tokens, labels and position_ids (int64) and loss_mask (float32), each [micro_batch_size, seq_length / CP]; and
        kinds (int64, on the CPU) [micro_batch_size], the number of the dataset that each sample is from.
    """
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    step = micro_batch_size * size
    for first in range(consumed_samples, len(dataset) - step + 1, step):
        start = first + rank * micro_batch_size
        samples = [dataset[index] for index in range(start, start + micro_batch_size)]
        kinds = torch.tensor([int(sample.get("dataset_id", 0)) for sample in samples])
        yield {"kinds": kinds} | {
            key: _context_part(torch.stack([sample[key] for sample in samples])).to(device, non_blocking=True)
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        }


def _context_part(rows: torch.Tensor) -> torch.Tensor:
    """The chunks of [batch, sequence] that belong to this context-parallel rank.

    The sequence is cut into 2 x CP chunks and rank r takes chunks r and 2 CP - 1 - r, so that a causal mask gives
    every rank the same work; Megatron's attention expects this order.
    """
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return rows
    chunks = rows.chunk(2 * size, dim=1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1)
