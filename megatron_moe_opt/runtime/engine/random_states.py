"""The states of random generators, for what is computed again and has to draw the same numbers."""

from __future__ import annotations

import torch


class RandomStates:
    """The states of PyTorch's generators, on the host and on the device, at the moment when this is made."""

    def __init__(self) -> None:
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def numbers(self) -> list[torch.Tensor]:
        """Returns the states as tensors, always in the same order."""
        return [self._host, *([] if self._device is None else [self._device])]

    def moved(self) -> bool:
        """Whether a generator has another state now."""
        pairs = zip(self.numbers(), type(self)().numbers(), strict=True)
        return not all(one is other or torch.equal(one, other) for one, other in pairs)

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.set_rng_state(self._host)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)
