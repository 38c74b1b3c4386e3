"""Which attention masks netmoe looks at, and what it sees."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt.integration.layer.block_passes import _Masks


def causal(batch: int = 2) -> torch.Tensor:
    return torch.ones(batch, 1, 6, 6, dtype=torch.bool).triu(1)


def test_a_mask_is_looked_at_again_when_it_is_another_or_has_changed():
    masks, mask = _Masks(), causal()
    assert masks.unlike(None) is None
    seen = masks.unlike(mask)
    assert not seen and masks.unlike(mask) is seen
    mask[1, 0, 3, 0] = True  # one sample's second document begins at its fourth token
    changed = masks.unlike(mask)
    assert changed and masks.unlike(mask) is changed
    del mask
    assert not masks.unlike(causal())  # perhaps where the last one was
    with torch.inference_mode():
        mask = causal()
        assert not masks.unlike(mask)
        mask[0] = False
        assert masks.unlike(mask)


@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_not_causal_is_seen(batch):
    assert not _Masks().unlike(causal(batch))
    assert _Masks().unlike(~causal(batch))
    assert _Masks().unlike(causal(batch)[:, :, :1])  # of padding: [B, 1, 1, S]
