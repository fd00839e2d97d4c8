"""What holds for every merge method. A new method is in all of these tests by being in METHODS."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isomerge.merging.methods import METHODS
from merging.methods.cases import ALSO, CASE_NAMES, CASES, NEEDED, count, merge, tensors

# Options with which one model comes out as it went in, where the defaults go only a part of the way.
ALL_THE_WAY: dict[str, dict[str, Any]] = {
    "slerp": {"t": 1.0},
    "wise_ft": {"alpha": 1.0},
    "paint": {"alpha": 1.0},
    "nearswap": {"t": 1e9},
    "ram": {"epsilon": 0.0},
    "ramplus_tl": {"epsilon": 0.0},
    "ewc": {"strength": 0.0},
}
NOT_ITSELF = {
    "arcee_fusion": "takes over the outliers of the changes only",
    "ace": "shrinks towards no change, and takes the mean row away",
    "esm": "makes the kept directions of the change equally strong",
    "localize_and_stitch": "keeps the strongest changes only",
    "pcb": "keeps the strongest tenth of the changes only",
    "dc_merge": "makes the kept directions of the change equally strong",
    "iso_c": "makes all directions of the change equally strong",
    "iso_cts": "makes all directions of the change equally strong",
    "elastic_weight_removal": "takes the change away instead of adding it",
}
ORDERED = {
    "ema": "later checkpoints count more",
    "sma": "only the last checkpoints count",
    "tail_average": "only the last checkpoints count",
    "geometric": "later checkpoints count more",
    "wsm": "later steps count less",
    "swag": "the deviations are those from the mean so far",
}
SUMS_OVER_BLOCKS = {  # sums are rounded differently when the blocks are others
    *("slerp", "nuslerp", "multislerp", "karcher", "model_stock", "sce"),
    *("breadcrumbs_ties", "ties"),  # with rescale
}
STILL_SEEN = {"consensus_ties": "a model that adds nothing still says which weights it needs"}
WEIGHTED = [name for name, method in METHODS.items() if any(option.name == "weight" for option in method.options)]

methods = pytest.mark.parametrize("name", METHODS)
cases = pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_NAMES)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.least == 1])
def test_one_model_comes_out_as_it_went_in(name: str) -> None:
    model, base = tensors((9, 7), 1)
    result = merge(name, [model], base, **(ALL_THE_WAY.get(name) or NEEDED.get(name, {})))
    same = torch.allclose(result, model, atol=2e-6)
    assert same != (name in NOT_ITSELF), NOT_ITSELF.get(name)


@cases
def test_equal_models_and_base_stay_as_they_are(name: str, options: dict[str, Any]) -> None:
    (base,) = tensors((9, 7), 0)
    result = merge(name, [base.clone() for _ in range(count(name))], base, **options)
    torch.testing.assert_close(result, base, atol=1e-6, rtol=1e-6)


@cases
def test_the_order_of_equally_weighted_models_does_not_matter(name: str, options: dict[str, Any]) -> None:
    *models, base = tensors((9, 7), count(name))
    one = merge(name, models, base, **options)
    other = merge(name, models[::-1], base, **options)
    same = torch.allclose(one, other, atol=1e-5)
    assert same != (name in ORDERED), ORDERED.get(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@methods
def test_computes_in_float32_or_in_float64_if_that_is_stored(name: str, dtype: torch.dtype) -> None:
    *models, base = tensors((6, 5), count(name), dtype)
    result = merge(name, models, base, **NEEDED.get(name, {}))
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("kind", ["zero", "zero base", "constant", "huge", "tiny", "opposite", "frozen model"])
@cases
def test_finite_in_finite_out(name: str, options: dict[str, Any], kind: str) -> None:
    *models, base = tensors((8, 6), count(name))
    if kind == "zero":
        models, base = [torch.zeros_like(m) for m in models], torch.zeros_like(base)
    elif kind == "zero base":
        base = torch.zeros_like(base)
    elif kind == "constant":
        models, base = [torch.full_like(m, i + 1.0) for i, m in enumerate(models)], torch.ones_like(base)
    elif kind in ("huge", "tiny"):
        size = 1e30 if kind == "huge" else 1e-30
        models, base = [m * size for m in models], base * size
    elif kind == "opposite":
        models = [base + (models[0] - base) * (-1) ** i for i in range(len(models))]
    else:
        models[0] = base.clone()
    result = merge(name, models, base, **options)
    assert result.isfinite().all()


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (0, 4), (4, 0), (1, 1), (2,), (1, 5), (3, 2, 2), (2, 3, 2, 2)], ids=str
)
@cases
def test_tensors_of_any_shape_survive(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    *models, base = tensors(shape, count(name))
    result = merge(name, models, base, **options)
    assert result.shape == shape
    assert result.isfinite().all()


@cases
def test_blocks_of_any_size_give_the_same(name: str, options: dict[str, Any]) -> None:
    *models, base = tensors((24, 18), count(name))
    whole = merge(name, models, base, **options)
    pieces = merge(name, models, base, block_elements=40, **options)
    if name in SUMS_OVER_BLOCKS:
        torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(pieces, whole)


@cases
def test_commutes_with_permutations_of_rows_and_columns(name: str, options: dict[str, Any]) -> None:
    """What alignment may do before a merge must not change what the merge does."""
    if name == "swag":  # an element draws by its place
        options = {**options, "scale": 0.0}
    *models, base = tensors((12, 10), count(name), torch.float64)
    importance = [tensor.square() for tensor in [*models, base]]
    rows, columns = torch.randperm(12, generator=torch.manual_seed(1)), torch.randperm(10)

    def moved(some: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor[rows][:, columns] for tensor in some]

    before = merge(name, models, base, importance=importance, **options)
    after = merge(name, moved(models), moved([base])[0], importance=moved(importance), **options)
    torch.testing.assert_close(after, moved([before])[0], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_weight_of_zero_is_zero_and_not_a_default(name: str) -> None:
    """It leaves a model out: what that model is does not matter."""
    *models, base = tensors((6, 5), count(name))
    weight = [1.0] + [0.0] * (len(models) - 1)
    one = merge(name, models, base, weight=weight)
    other = merge(name, [models[0], *[model + 0.25 for model in models[1:]]], base, weight=weight)
    same = torch.allclose(one, other, atol=1e-5)
    assert same != (name in STILL_SEEN), STILL_SEEN.get(name)


@methods
def test_every_option_says_what_it_means(name: str) -> None:
    method = METHODS[name]
    assert method.summary.endswith(".") and len(method.summary) <= 120
    assert all(option.help for option in method.options)
    assert method.reference.startswith("https://") or name == "passthrough"


def test_the_tables_of_exceptions_name_only_methods() -> None:
    for table in (ALL_THE_WAY, NOT_ITSELF, ORDERED, SUMS_OVER_BLOCKS, STILL_SEEN, NEEDED, ALSO):
        assert set(table) <= set(METHODS)
