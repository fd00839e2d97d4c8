"""Distance, cosine and sign conflict against numpy on whole tensors."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from isomerge.kinship import SAMPLE, conflict, cosines, distances, relation, sampled_rows


def read(tensor: torch.Tensor):
    return lambda start, stop: tensor[start:stop] if tensor.dim() > 1 else tensor


def looked_at(tensors: dict[str, torch.Tensor], **options):
    shape = next(iter(tensors.values())).shape
    return relation("w", shape, None, {name: read(t) for name, t in tensors.items()}, **options)


def test_small_tensors_are_taken_whole_and_agree_with_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    models = {name: torch.randn(9, 7, generator=generator, dtype=torch.float64) for name in ("base", "a", "b", "c")}
    one = looked_at(models, reference="base", base="base")
    arrays = {name: tensor.numpy() for name, tensor in models.items()}
    deltas = {name: (arrays[name] - arrays["base"]).ravel() for name in "abc"}
    assert one.sampled == one.elements == 63
    for (x, y), value in cosines([one], "after").items():
        expected = deltas[x] @ deltas[y] / np.linalg.norm(deltas[x]) / np.linalg.norm(deltas[y])
        assert value == pytest.approx(expected, rel=1e-12)
    assert len(cosines([one], "after")) == 3
    signs = np.sign(np.stack(list(deltas.values())))
    assert conflict([one], "after") == pytest.approx(np.mean((signs.max(0) > 0) & (signs.min(0) < 0)))
    for name, value in distances([one], "after").items():
        expected = np.linalg.norm(arrays[name] - arrays["base"]) / np.linalg.norm(arrays["base"])
        assert value == pytest.approx(expected, rel=1e-12)


def test_several_tensors_count_by_their_size() -> None:
    generator = torch.Generator().manual_seed(1)
    pairs = [
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n in "ab"} for s in [(4, 5), (5, 6), (30,)]
    ]
    found = [looked_at(pair, reference="a") for pair in pairs]
    a, b = (np.concatenate([pair[n].numpy().ravel() for pair in pairs]) for n in "ab")
    (value,) = cosines(found, "after").values()
    x, y = a[:50], b[:50]  # the vector does not count
    assert value == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    assert distances(found, "after") == {"b": pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)}


def test_a_sample_of_a_large_tensor_is_near_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(2000, 300, generator=generator)
    models = {"a": a, "b": a + torch.randn(2000, 300, generator=generator)}
    one = looked_at(models, reference="a")
    assert one.sampled <= SAMPLE and one.elements == 600_000
    (value,) = cosines([one], "after").values()
    assert value == pytest.approx(1 / math.sqrt(2), abs=0.02)
    assert conflict([one], "after") == pytest.approx(0.25, abs=0.02)
    assert distances([one], "after")["b"] == pytest.approx(1.0, abs=0.02)


def test_the_rows_depend_on_the_name_and_the_seed_alone_and_stay_inside() -> None:
    shape = (5000, 64)
    rows = sampled_rows("x", shape)
    assert rows == sampled_rows("x", shape) != sampled_rows("y", shape)
    assert rows != sampled_rows("x", shape, seed=1)
    assert all(0 <= start < stop <= 5000 for start, stop in rows)
    assert all(stop <= after for (_, stop), (after, _) in pairwise(rows))
    assert sampled_rows("bias", (10**6,)) == [(0, 1)], "a tensor of one axis is asked for whole"


def test_equal_models_have_cosine_one_and_zero_vectors_none() -> None:
    tensor = torch.randn(5, 5)
    one = looked_at({"a": tensor, "b": tensor.clone()}, reference="a")
    assert cosines([one], "after") == {("a", "b"): pytest.approx(1.0)}
    still = looked_at({"base": tensor, "a": tensor.clone(), "b": tensor.clone()}, reference="base", base="base")
    assert cosines([still], "after") == {} and conflict([still], "after") == 0.0
