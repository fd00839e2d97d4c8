"""Random masks: as dense as asked, the same for the same seed and name, and rescaled as promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merging.methods.cases import merge, tensors

RANDOM = ["dare_linear", "dare_ties", "della", "della_linear"]
OPTIONS: dict[str, Any] = {"density": 0.6, "rescale": False, "normalize": False}


def change(name: str, model: torch.Tensor, base: torch.Tensor, **options: Any) -> torch.Tensor:
    return merge(name, [model], base, **{**OPTIONS, **options}) - base


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    model, base = tensors((120, 90), 1, torch.float64)
    return model, base


@pytest.mark.parametrize("name", RANDOM)
def test_the_density_is_the_share_that_is_kept_unchanged(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, base = pair
    kept = change(name, model, base)
    torch.testing.assert_close(kept[kept != 0], (model - base)[kept != 0])
    assert abs(float((kept != 0).double().mean()) - 0.6) < 0.02  # four standard deviations


@pytest.mark.parametrize("name", RANDOM)
def test_rescaling_keeps_the_sum_of_magnitudes(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, base = pair
    kept = change(name, model, base, rescale=True)
    torch.testing.assert_close(kept.abs().sum(), (model - base).abs().sum())


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_of_the_paper_rescales_by_the_density(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, base = pair
    kept = change(name, model, base, rescale=True, paper=True)
    torch.testing.assert_close(kept[kept != 0], (model - base)[kept != 0] / 0.6)


@pytest.mark.parametrize("name", ["della", "della_linear"])
def test_della_of_the_paper_rescales_by_each_probability(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """From density − epsilon for the smallest change of a row to density + epsilon for the largest, evenly by rank."""
    model, base = pair
    kept = change(name, model, base, rescale=True, paper=True, epsilon=0.2)
    ranks = (model - base).abs().argsort(dim=1).argsort(dim=1).double() / (model.shape[1] - 1)
    likelihood = 0.4 + 0.4 * ranks
    torch.testing.assert_close(kept[kept != 0], ((model - base) / likelihood)[kept != 0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["della", "della_linear"])
def test_della_keeps_large_changes_more_often(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, base = pair
    kept = (change(name, model, base, epsilon=0.3) != 0).double()
    larger = (model - base).abs() > (model - base).abs().median(dim=1, keepdim=True).values
    assert abs(float(kept[larger].mean()) - 0.75) < 0.03
    assert abs(float(kept[~larger].mean()) - 0.45) < 0.03


@pytest.mark.parametrize("name", RANDOM)
def test_draws_depend_on_seed_name_and_model_and_on_nothing_else(name: str) -> None:
    *models, base = tensors((40, 21), 2)
    options = {**OPTIONS, "rescale": True}
    first = merge(name, models, base, **options)
    assert torch.equal(first, merge(name, models, base, **options))
    torch.testing.assert_close(first, merge(name, models, base, block_elements=50, **options), atol=1e-6, rtol=1e-6)
    assert not torch.equal(first, merge(name, models, base, seed=1, **options))
    assert not torch.equal(first, merge(name, models, base, tensor="another", **options))
    twice = merge("dare_linear", [models[0], models[0]], base, **OPTIONS) - base
    both = (twice / (models[0] - base)).round()
    assert set(both.unique().tolist()) == {0.0, 1.0, 2.0}  # two models do not share a mask


@pytest.mark.parametrize("name", RANDOM)
def test_a_density_of_zero_leaves_the_base(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, base = pair
    assert torch.equal(merge(name, [model], base, density=0.0), base)
