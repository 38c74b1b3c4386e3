"""The transformer block that each MoE layer is in: what a pipeline stage, or a virtual chunk of it, runs in one go."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

_blocks: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The block of each MoE layer."""
_watching: weakref.WeakSet[Watching] = weakref.WeakSet()
"""Objects to be told, by their `watch`, when a block has been built."""


class Watching(Protocol):
    """Whoever looks at blocks, some of which may be built later."""

    def watch(self) -> None:
        """Looks for blocks that have been built."""


def watch_for_blocks(one: Watching) -> None:
    """Has an object's `watch` called whenever a block has been built, as long as it is there."""
    _watching.add(one)


def unwatch(one: Watching) -> None:
    """Has it called no more."""
    _watching.discard(one)


def note_block(block: Any) -> None:
    """Notes the MoE layers of a block that has been built, and tells whoever watches."""
    for layer in block.layers:
        if (moe := getattr(layer, "mlp", None)) is not None:
            _blocks[moe] = weakref.ref(block)
    for one in tuple(_watching):
        one.watch()


def places_in_blocks(moe_layers: Iterable[Any]) -> dict[Any, list[int]]:
    """Returns the transformer blocks that MoE layers are in, in turn, and the places of each one's layers among all;
    those outside of a block have none.
    """
    places: dict[Any, list[int]] = {}
    for place, layer in enumerate(moe_layers):
        if (of_layer := _blocks.get(layer)) is not None:
            places.setdefault(of_layer(), []).append(place)
    return places
