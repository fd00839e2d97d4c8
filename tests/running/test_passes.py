"""A pass over data gives the same examples every time, within its limit, and says what it read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.running.passes import DataPass


def batches(*sizes: int) -> list[Batch]:
    rows = torch.arange(3.0 * sum(sizes)).reshape(-1, 3)
    parts = torch.split(rows, list(sizes))
    return [{"pixel_values": part, "labels": part[:, 0].long()} for part in parts]


def values(reading: DataPass) -> torch.Tensor:
    return torch.cat([batch["pixel_values"] for batch in reading])


def test_the_hash_does_not_depend_on_the_size_of_batches() -> None:
    passes = [DataPass(lambda sizes=sizes: iter(batches(*sizes)), limit=5) for sizes in ((3, 3), (1, 5), (2, 2, 2))]
    assert all(torch.equal(values(one), values(passes[0])) for one in passes)
    assert len({one.sha256 for one in passes}) == 1 and {one.examples for one in passes} == {5}


def test_what_fits_the_budget_is_read_once() -> None:
    calls = []

    def fresh() -> Iterator[Batch]:
        calls.append(1)
        return iter(batches(2, 2))

    kept, again = DataPass(fresh, budget=1 << 20, labels=False), DataPass(fresh)
    assert "labels" not in kept.first() and len(kept.first(1)["pixel_values"]) == 1
    calls.clear()
    first, second = values(kept), values(kept)
    assert torch.equal(first, second) and len(calls) == 1 and kept.count == 2
    digest = (list(again), again.sha256)[1]
    assert (list(again), again.sha256)[1] == digest and len(calls) == 3


def test_a_pass_that_ended_early_does_not_count() -> None:
    whole, broken = (DataPass(lambda: iter(batches(2, 2))) for _ in range(2))
    next(iter(broken))
    assert torch.equal(values(whole), values(broken)) and whole.sha256 == broken.sha256


def test_other_examples_in_the_next_pass_are_refused() -> None:
    left = [batches(2, 2), batches(2)]
    reading = DataPass(lambda: iter(left.pop(0)))
    list(reading)
    with pytest.raises(RequestError, match="4 examples the first time and 2 now"):
        list(reading)


def test_nothing_to_read_and_limits_below_one_are_refused() -> None:
    with pytest.raises(RequestError, match="not one batch"):
        list(DataPass(lambda: iter(())))
    with pytest.raises(RequestError, match="at least one"):
        DataPass(lambda: iter(()), limit=0)


def test_floats_take_the_dtype_and_progress_the_total() -> None:
    told: list[tuple[int, int]] = []
    reading = DataPass(
        lambda: iter(batches(2, 2)), dtype=torch.float64, total=7, progress=lambda done, of, _: told.append((done, of))
    )
    assert values(reading).dtype == torch.float64 and told == [(2, 7), (4, 7)]
