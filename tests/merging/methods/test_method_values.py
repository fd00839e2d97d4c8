"""Each method's numbers are those of its formula, written again in numpy (references.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isomerge.errors import RequestError
from isomerge.merging.methods import METHODS
from merging.methods import references
from merging.methods.cases import count, merge, tensors

W3, D3 = [0.3, 0.6, 1.0], [0.2, 0.5, 0.9]
TRIED: dict[str, list[dict[str, Any]]] = {
    "linear": [{}, {"weight": W3}, {"weight": [1.0, -0.5, 0.0], "normalize": False}],
    "uniform_soup": [{}],
    "sparse_soup": [{}, {"weight": W3, "density": 0.3}],
    "wise_ft": [{}, {"alpha": 0.3, "weight": W3}],
    "ema": [{}, {"decay": 0.3}],
    "swa": [{}, {"start": 1}, {"every": 2}],
    "lawa": [{}, {"window": 2}],
    "sma": [{}, {"fraction": 0.2}, {"fraction": 1.0}],
    "geometric": [{}, {"decay": 0.8}],
    "slerp": [{}, {"t": 0.2}, {"t": 1.0}],
    "nuslerp": [
        {},
        {"weight": [0.2, 0.9]},
        {"nuslerp_flatten": False},
        {"nuslerp_flatten": False, "nuslerp_row_wise": True},
    ],
    "multislerp": [{}, {"weight": W3}, {"weight": W3, "normalize_weights": False}],
    "karcher": [{"max_iter": 100, "tol": 1e-12}],
    "model_stock": [{}, {"filter_wise": True}],
    "task_arithmetic": [{}, {"weight": W3, "lambda": 0.5}, {"weight": W3, "normalize": True}],
    "ties": [
        {},
        {"weight": W3, "density": D3},
        {"weight": [0.3, -0.6, 1.0], "density": D3, "normalize": False},
        {"weight": [0.3, -0.6, 1.0], "density": D3},
        {"density": D3, "rescale": True, "lambda": 0.4},
        {"weight": W3, "density": D3, "paper": True},
    ],
    "breadcrumbs": [{}, {"weight": W3, "density": D3, "gamma": 0.2}, {"density": 0.9, "gamma": 0.3, "rescale": True}],
    "breadcrumbs_ties": [{}, {"weight": W3, "density": D3, "gamma": 0.2, "normalize": True}],
    "dare_linear": [{}, {"weight": W3}],
    "dare_ties": [{}, {"weight": W3}],
    "della": [{}, {"weight": W3}],
    "della_linear": [{}, {"weight": W3}],
    "sce": [{}, {"select_topk": 0.3}, {"select_topk": 0.3, "paper": True}],
    "ram": [{}, {"epsilon": 0.4}],
    "ramplus_tl": [{}, {"epsilon": 0.4, "r": 0.5, "alpha": 3.0}],
    "nearswap": [{"t": 0.3}],
    "arcee_fusion": [{}],
    "passthrough": [{}, {"scale": 0.25}, {"scale": 0.0}],
    "magmax": [{}, {"lambda": 0.5}],
    "consensus_ties": [
        {},
        {"weight": W3, "density": D3, "normalize": True, "k": 3},
        {"elect": False, "tall_lambda": 0.6},
        {"elect": False, "task": 2},
    ],
    "emr": [{}, {"lambda": 0.5}, {"task": 1}, {"task": 3, "lambda": 0.5}],
    "localize_and_stitch": [{}, {"density": D3, "lambda": 0.5}],
    "pcb": [{}, {"ratio": 0.5, "lambda": 0.4}],
    "tsv": [{}, {"share": 0.2, "lambda": 0.5}],
    "iso_c": [{}, {"lambda": 0.5}],
    "iso_cts": [{}, {"common": 0.4}],
    "wudi": [{}, {"lambda": 0.5}, {"normalize": False}],
    "svc": [{}, {"alpha": 0.2, "lambda": 0.5}],
    "dc_merge": [{}, {"smooth": False, "density": 0.3}],
    "ace": [{}, {"threshold": 0.0}, {"threshold": 0.0, "epsilon": 0.5, "share": 0.6, "lambda": 0.5}],
    "knots": [{}, {"weight": W3, "density": D3, "lambda": 0.5}, {"inner": "task_arithmetic"}, {"inner": "iso_c"}],
    "core_space": [{}, {"weight": W3, "density": D3}, {"inner": "dare_ties", "weight": W3}, {"inner": "tsv"}],
    "ortho_merge": [{}, {"lambda": 0.5}],
    "geometric_median": [{}, {"weight": W3}],
    "wsm": [{}, {"power": 1.0}, {"power": 2.0}, {"cosine": True}, {"rate": [3e-4, 2e-4, 5e-5]}],
}
SAME_FORMULA = {"paint": "wise_ft", "tail_average": "sma", "sma": "tail", "della_linear": "dare_linear"}
ELSEWHERE = {
    *("rewarded_soup", "ewc", "elastic_weight_removal", "paint", "tail_average"),
    *("fisher", "regmean", "esm"),  # tests/merging/data_methods
    "swag",  # draws
}


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, some in TRIED.items() for options in some], ids=str
)
def test_the_values_are_those_of_the_formula(name: str, options: dict[str, Any]) -> None:
    *models, base = tensors((20, 16), count(name), torch.float64, seed=3)
    reference = getattr(references, SAME_FORMULA.get(name, name))
    arguments = {("lambda_" if key == "lambda" else key): value for key, value in options.items()}
    expected = reference(np.stack([model.numpy() for model in models]), base.numpy(), **arguments)
    result = merge(name, models, base, block_elements=64, **options)
    # multislerp's eps of 1e-8 is part of its definition and not of the reference; the optimiser of the other is a
    # search without gradients.
    tolerance = {"multislerp": 1e-7, "geometric_median": 1e-6}.get(name, 1e-10)
    np.testing.assert_allclose(result.numpy(), expected, atol=tolerance, rtol=tolerance)


def test_every_method_has_a_reference() -> None:
    assert set(TRIED) | ELSEWHERE == set(METHODS)


@pytest.mark.parametrize(("alias", "name"), [("paint", "wise_ft"), ("tail_average", "sma")])
def test_an_alias_is_the_same_method(alias: str, name: str) -> None:
    assert METHODS[alias].function is METHODS[name].function


def test_rewarded_soup_takes_preferences_only() -> None:
    *models, base = tensors((4, 3), 2, torch.float64)
    result = merge("rewarded_soup", models, base, weight=[0.25, 0.75])
    torch.testing.assert_close(result, 0.25 * models[0] + 0.75 * models[1])
    for weight in ([0.5, 0.6], [1.5, -0.5]):
        with pytest.raises(RequestError, match="add up to"):
            merge("rewarded_soup", models, base, weight=weight)


@pytest.mark.parametrize("with_base", [False, True])
def test_a_sparse_soup_is_zero_exactly_where_its_mask_is(with_base: bool) -> None:
    *models, base = tensors((20, 16), 3)
    mask = torch.rand(20, 16, generator=torch.manual_seed(5)) < 0.3
    models = [model * mask for model in models]
    if with_base:  # training on has left the mask
        base, models = base * mask, [model + 0.01 for model in models]
    result = merge("sparse_soup", models, base if with_base else None, weight=W3)
    assert torch.equal(result != 0, mask)
    mean = sum(w * model for w, model in zip(W3, models, strict=True)) / sum(W3)
    torch.testing.assert_close(result[mask], mean[mask])


def test_a_sparse_soup_keeps_the_largest_weights_in_blocks_of_any_size() -> None:
    *models, base = tensors((40, 30), 3)
    mean = sum(models) / 3
    whole = merge("sparse_soup", models, base, density=0.1)
    assert torch.equal(merge("sparse_soup", models, base, density=0.1, block_elements=90), whole)
    largest = mean.flatten().abs().topk(120).indices
    assert set(whole.flatten().nonzero().flatten().tolist()) == set(largest.tolist())
    assert not merge("sparse_soup", models, base, density=0.0).any()


def test_a_sparse_soup_leaves_norms_and_biases_whole() -> None:
    models = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0])]
    result = merge("sparse_soup", models, torch.zeros(3), density=0.1)
    torch.testing.assert_close(result, torch.tensor([0.5, 1.0, 1.5]))


def test_ewc_is_the_importance_weighted_mean() -> None:
    *models, base = tensors((5, 4), 2, torch.float64)
    first, second, own = (tensor.square() for tensor in tensors((5, 4), 2, torch.float64, seed=9))
    expected = (2 * first * models[0] + 0.5 * second * models[1] + 3 * own * base) / (
        2 * first + 0.5 * second + 3 * own
    )
    result = merge("ewc", models, base, importance=[first, second, own], weight=[2.0, 0.5], strength=3.0)
    torch.testing.assert_close(result, expected)


def test_ewc_without_any_importance_somewhere_is_the_mean_there() -> None:
    *models, base = tensors((5, 4), 2, torch.float64)
    nothing = torch.zeros_like(base)
    torch.testing.assert_close(merge("ewc", models, base, importance=[nothing] * 3), (models[0] + models[1]) / 2)


def test_elastic_weight_removal_is_the_weighted_mean_of_the_base_and_the_base_without_the_change() -> None:
    model, base = tensors((5, 4), 1, torch.float64)
    bad, own = (tensor.square() for tensor in tensors((5, 4), 1, torch.float64, seed=9))
    expected = (own * base + 0.7 * bad * (base - (model - base))) / (own + 0.7 * bad)
    result = merge("elastic_weight_removal", [model], base, importance=[bad, own], weight=0.7)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ["breadcrumbs", "breadcrumbs_ties", "ties", "sce"])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 1)], ids=str)
def test_a_small_tensor_is_not_lost_to_its_density(name: str, shape: tuple[int, ...]) -> None:
    *models, base = tensors(shape, 2)
    density = "select_topk" if name == "sce" else "density"
    result = merge(name, models, base, **{density: 0.3})
    assert not torch.equal(result, base)


def test_breadcrumbs_of_the_paper_always_drop_the_outliers() -> None:
    model, base = tensors((10, 10), 1, torch.float64)
    change = (model - base).abs().flatten()
    largest = change.topk(20).indices
    result = merge("breadcrumbs", [model], base, density=0.95, gamma=0.2, paper=True)
    dropped = (result == base).flatten()
    assert dropped[largest].all() and int(dropped.sum()) == 20


def test_frozen_tensors_keep_every_bit() -> None:
    (base,) = tensors((30, 20), 0)
    for name in ("task_arithmetic", "ties", "dare_ties", "magmax", "ram", "model_stock", "wise_ft", "nearswap"):
        options = {"t": 0.1} if name == "nearswap" else {}
        assert torch.equal(merge(name, [base.clone()] * count(name), base, **options), base), name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {"weight": [1.0, -1.0, 0.0]}, "add up to zero"),
        ("multislerp", {"weight": [1.0, -1.0, 0.0]}, "add up to zero"),
        ("wise_ft", {"weight": [1.0, -1.0, 0.0]}, "add up to zero"),
        ("sparse_soup", {"weight": [1.0, -1.0, 0.0]}, "add up to zero"),
        ("nearswap", {}, "needs 't'"),
        ("della", {"density": 0.9}, "epsilon from 0"),
        ("ties", {"densty": 0.9}, "Did you mean 'density'"),
        ("ties", {"density": [0.9, 0.1]}, "2 values for 3 models"),
        ("swa", {"start": 3}, "none of 3"),
        ("ema", {"decay": 1.0}, "below 1"),
        ("lawa", {"window": 0}, "empty"),
        ("sma", {"fraction": 0.0}, "above 0"),
        ("geometric", {"decay": 2.0}, "from 0 to 1"),
        ("tsv", {"share": 0.0}, "above 0"),
        ("iso_cts", {"common": 1.5}, "from 0 to 1"),
        ("ace", {"epsilon": 0.0}, "above 0"),
        ("emr", {"task": 4}, "no model 4"),
        ("consensus_ties", {"task": 0}, "no model 0"),
        ("knots", {"inner": "tie"}, "must be one of task_arithmetic"),
        ("core_space", {"inner": "tsv", "density": 0.5}, "has no density"),
        ("wsm", {"power": 0.0}, "above 0"),
        ("wsm", {"rate": [1.0, 0.5, 0.6]}, "do not decay"),
        ("wsm", {"rate": [1.0, 0.5, -0.1]}, "do not decay"),
        ("wsm", {"rate": [1.0, None, 0.5]}, "do not decay"),
        ("wsm", {"rate": 0.0}, "not 0"),
    ],
)
def test_a_wrong_option_is_a_wrong_request(name: str, options: dict[str, Any], message: str) -> None:
    *models, base = tensors((4, 3), count(name))
    with pytest.raises(RequestError, match=message):
        merge(name, models, base, **options)


MATRIX = ["tsv", "iso_c", "iso_cts", "wudi", "ace", "knots", "core_space"]


@pytest.mark.parametrize("shape", [(), (7,), (40, 3), (3, 40), (50, 2, 1)], ids=str)
@pytest.mark.parametrize("name", MATRIX)
def test_what_is_not_one_linear_map_gets_the_mean_change(name: str, shape: tuple[int, ...]) -> None:
    *models, base = tensors(shape, 3, torch.float64)
    torch.testing.assert_close(merge(name, models, base), sum(models) / 3)


@pytest.mark.parametrize("name", MATRIX)
def test_a_tensor_of_more_axes_is_a_matrix_of_its_first_axis(name: str) -> None:
    *models, base = tensors((8, 3, 2, 2), 3, torch.float64)
    flat = merge(name, [model.reshape(8, 12) for model in models], base.reshape(8, 12))
    torch.testing.assert_close(merge(name, models, base), flat.reshape(8, 3, 2, 2))


@pytest.mark.parametrize("name", [name for name in MATRIX if name != "knots"])  # which elects signs input by input
def test_directions_that_no_model_has_changed_stay_unchanged(name: str) -> None:
    """As after low-rank fine-tuning: what is filled in there would be noise."""
    (base,) = tensors((16, 12), 0, torch.float64)
    inputs = [torch.linalg.qr(torch.randn(12, 2, generator=torch.manual_seed(k)))[0].double().T for k in range(3)]
    models = [base + tensors((16, 2), 0, torch.float64, seed=k)[0] @ rows for k, rows in enumerate(inputs)]
    changed = torch.linalg.qr(torch.cat(inputs).T)[0]
    merged = merge(name, models, base) - base
    torch.testing.assert_close(merged @ changed @ changed.T, merged, atol=1e-8, rtol=1e-8)
    assert torch.linalg.matrix_rank(merged, atol=1e-6) <= 6


def test_swag_draws_from_the_gaussian_of_the_checkpoints() -> None:
    """Mean and covariance of two weights over many draws are those of the formula."""
    models = [torch.tensor(row, dtype=torch.float64) for row in np.random.default_rng(1).normal(size=(5, 2))]
    W = np.stack(models)
    draws = np.stack([merge("swag", models, seed=seed, rank=3).numpy() for seed in range(4000)])
    so_far = np.cumsum(W, 0) / np.arange(1, 6)[:, None]
    D = (W - so_far)[-3:]
    covariance = (np.diag(W.var(0)) + D.T @ D / 2) / 2
    np.testing.assert_allclose(draws.mean(0), W.mean(0), atol=4 * np.sqrt(covariance.max() / 4000))
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.1 * covariance.max())


def test_swag_without_variance_is_the_mean_and_the_common_draws_are_those_of_all_tensors() -> None:
    models = tensors((4, 3), 2, torch.float64)
    torch.testing.assert_close(merge("swag", models, scale=0.0), (models[0] + models[1] + models[2]) / 3)
    equal = [model.new_full((1,), float(model[0, 0])) for model in models]
    one, other = (merge("swag", equal, tensor=name, seed=7) for name in ("a.weight", "b.weight"))
    assert not torch.equal(one, other)  # each weight has a draw of its own …
    few = [torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    assert merge("swag", few, tensor="a", seed=7, scale=0.0) == 0.5


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0, 1.0], [0.6, 1.0, 1.2, 0.8]])
def test_at_the_geometric_median_the_pulls_of_all_models_balance(weight: list[float]) -> None:
    """Σ w_k (W_k − W) / ‖W_k − W‖ = 0, which holds at the minimum of this convex sum and nowhere else."""
    models = tensors((6, 5), 3, torch.float64)
    median = merge("geometric_median", models, weight=weight, tol=1e-15, max_iter=10_000).numpy()
    towards = np.stack([model.numpy() - median for model in models])
    units = towards / np.linalg.norm(towards, axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(np.tensordot(weight, units, 1), 0, atol=1e-10)


def test_a_model_far_away_moves_the_geometric_median_no_further() -> None:
    *models, _ = tensors((6, 5), 3, torch.float64)
    far, farther = (merge("geometric_median", [*models, models[0] + shift * torch.eye(6, 5)]) for shift in (1e3, 1e6))
    assert (far - farther).norm() < 0.01 < (models[0] - models[1]).norm()


def test_decays_at_their_extremes_are_known_averages() -> None:
    """A straight line is the plain mean, a rate that stays the last checkpoint, one that falls at once the first."""
    models = tensors((6, 5), 3, torch.float64)[:3]
    torch.testing.assert_close(merge("wsm", models, power=1.0), sum(models) / 3)
    torch.testing.assert_close(merge("wsm", models, rate=2e-5), models[-1])
    torch.testing.assert_close(merge("wsm", models, rate=[1.0, 0.0, 0.0]), models[0])
