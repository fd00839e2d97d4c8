"""What methods measure over blocks is what a look at everything at once would give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isomerge.merging.methods import block_sums
from isomerge.merging.run.rows import InMemory, TensorGroup


def group(*arrays: np.ndarray, block_elements: int = 512) -> TensorGroup:
    return TensorGroup("x", [InMemory(torch.from_numpy(array)) for array in arrays], block_elements=block_elements)


NUMBERS = np.random.default_rng(0)
DRAWN = {
    "normal": NUMBERS.standard_normal((300, 70)),
    "heavy tails": NUMBERS.standard_cauchy((300, 70)) ** 3,
    "few values": NUMBERS.integers(0, 4, (300, 70)).astype(float),
    "mostly zero": NUMBERS.standard_normal((300, 70)) * (NUMBERS.random((300, 70)) < 0.02),
    "constant": np.full((300, 70), 3.5),
    "sorted": np.sort(NUMBERS.standard_normal(300 * 70)).reshape(300, 70),  # what a sample of rows sees is not all
    "one outlier": np.where(np.arange(21000).reshape(300, 70) == 777, 1e30, 0.25),
}


@pytest.mark.parametrize("gathered", [50, 2**21], ids=["narrowing", "gathering"])
@pytest.mark.parametrize("kind", DRAWN)
def test_order_statistics_are_exact(kind: str, gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sums, "SAMPLED", 2**10)
    monkeypatch.setattr(block_sums, "GATHERED", gathered)
    monkeypatch.setattr(block_sums, "PENDING", min(gathered, block_sums.PENDING) // 2)
    array = DRAWN[kind].astype(np.float32)
    ranks = [0, 1, 777, 10_500, 20_998, 20_999]
    (found,) = block_sums.kth_smallest(group(array), lambda block: block.tensors, [ranks])
    assert found == np.sort(array, axis=None)[ranks].tolist()


def test_each_row_has_its_own_order_statistics() -> None:
    one, other = (DRAWN[kind].astype(np.float32) for kind in ("normal", "few values"))
    found = block_sums.kth_smallest(group(one, other), lambda block: block.tensors, [[5], [7, 9]])
    ordered = [np.sort(array, axis=None) for array in (one, other)]
    assert found == [[ordered[0][5]], [ordered[1][7], ordered[1][9]]]


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_inner_products_are_good_to_seven_digits(size: float) -> None:
    numbers = np.random.default_rng(1)
    arrays = [(numbers.standard_normal((500, 200)) + 0.5).astype(np.float32) * np.float32(size) for _ in range(3)]
    expected = np.array([[float(a.astype(float).ravel() @ b.astype(float).ravel()) for a in arrays] for b in arrays])
    found = np.array(block_sums.gram(group(*arrays, block_elements=2**16)))
    norms = np.sqrt(np.diag(expected))
    assert (np.abs(found - expected) <= 1e-7 * np.outer(norms, norms)).all()
