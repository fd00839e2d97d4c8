"""Squared distances against numpy in float64, over several blocks and for tensors that are views."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isomerge.alignment import evidence


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 17])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_and_views_make_no_difference(block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evidence.BLOCKS, "cpu", block)
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(11, 13, generator=generator).to(dtype) for _ in range(2))
    for a, b in ((one, other), (one.T, other.T), (one[2:9, ::2], other[2:9, ::2]), (one[:0], other[:0])):
        x, y = (each.double().numpy() for each in (a, b))
        assert evidence.squared_distance(a, b) == pytest.approx(float(np.square(x - y).sum()), rel=1e-12)
        assert evidence.squared_distance(a) == pytest.approx(float(np.square(x).sum()), rel=1e-12)


def test_large_offsets_are_not_lost_to_rounding() -> None:
    a = torch.full((1 << 18,), 1000.0)
    b = a + 2.0**-10
    assert evidence.squared_distance(a, b) == pytest.approx(2.0**18 * 2.0**-20, rel=1e-12)
