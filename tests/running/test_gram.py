"""Sums over rows give what numpy gives of all rows at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isomerge.running.gram import GramSums

FAR = 1e6  # of the mean, in units of the spread: plain sums in float64 would lose twelve of the sixteen digits


def rows(batches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20, 5, generator=generator, dtype=torch.float64) + FAR for _ in range(batches)]


@pytest.mark.parametrize("batches", [1, 4])
def test_centred_sums_keep_their_digits_far_from_zero(batches: int) -> None:
    sums = GramSums(centred=True)
    for batch in rows(batches):
        sums.add(batch)
    every = torch.cat(rows(batches)).numpy()
    np.testing.assert_allclose(sums.mean().numpy(), every.mean(0), rtol=1e-14)
    covariance = np.cov(every, rowvar=False, bias=True) * len(every)
    np.testing.assert_allclose(sums.products().numpy(), covariance, atol=1e-8)


def test_plain_sums_are_those_of_all_rows() -> None:
    sums = GramSums()
    for batch in rows(3):
        sums.add(batch.float())
    every = torch.cat(rows(3)).float().double().numpy()
    assert sums.count == 60
    np.testing.assert_allclose(sums.products().numpy(), every.T @ every, rtol=1e-14)
    np.testing.assert_allclose(sums.mean().numpy(), every.mean(0), rtol=1e-14)
    assert GramSums(3).product.shape == (3, 3)
