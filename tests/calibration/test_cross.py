"""Activations of two models side by side: the sums themselves, and that they move as the specification says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.feature_selection import mutual_info_regression

from calibration.hooks import batches, data, inputs_by_module, rows, stock
from isomerge import align
from isomerge.architectures import describe
from isomerge.calibration import CrossMoments, calibrate, cross_statistics
from isomerge.calibration.cross import MOST_NATS
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.symmetry.moved import scrambled
from models import MODELS, model
from precision import float64_throughout

every = pytest.mark.parametrize("name", MODELS)


def test_cross_moments_are_those_of_the_rows_both_models_saw() -> None:
    folders = [model("bert", 1), model("bert", 0)]
    batch = data(folders[0])
    found = cross_statistics(*folders, batches(batch, 2, 4))
    layer = "bert.encoder.layer.1.output.dense"
    b, a = (rows(inputs_by_module(stock(folder), batch)[layer], batch, layer) for folder in folders)
    ((site, moments),) = [(s, m) for s, m in found.of("ffn.1") if s.role == "input"]
    assert site.name == layer + ".weight:in" and site.sizes == (7,) and moments.count == len(a)
    np.testing.assert_allclose(moments.cross.numpy(), b.T @ a, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(moments.sum_b.numpy(), b.sum(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(moments.squares_a.numpy(), (a**2).sum(0), rtol=1e-6)
    expected = np.corrcoef(b.T, a.T)[:7, 7:]
    np.testing.assert_allclose(moments.correlation().numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(moments.covariance().numpy(), np.cov(b.T, a.T, bias=True)[:7, 7:], atol=1e-6)


@every
def test_activations_move_with_the_spaces_their_site_names(name: str) -> None:
    """A scrambled model's activations are the model's own, moved: cov(x_B, x_A) = T cov(x_A, x_A) at every site."""
    folder = model(name)
    bound = describe(open_checkpoint(folder))
    move = scrambled(bound, seed=3)
    state = dict(move.produce(move.plan(None), lambda *_: None))
    other = MemoryCheckpoint("scrambled", state, bound.checkpoint.config)
    batch = data(folder)
    with float64_throughout():
        crossed = cross_statistics(other, folder, batches(batch))
        own = cross_statistics(folder, folder, batches(batch))
    assert set(crossed) == set(own) and len(own.sites) > 15
    moved = 0
    for site_name, site in own.sites.items():
        expected = own.moments[site_name].covariance()
        turned = move.transform.act_on_segment(expected.reshape(*site.sizes, -1), site.segment).reshape(expected.shape)
        got = crossed.moments[site_name].covariance()
        scale = float(turned.abs().max())
        assert float((got - turned).abs().max()) < 1e-8 * scale, site_name
        moved += not torch.allclose(turned, expected)
    assert moved > len(own.sites) // 2


@every
def test_every_space_inside_the_blocks_has_a_site(name: str) -> None:
    folder = model(name)
    bound = describe(open_checkpoint(folder))
    found = cross_statistics(folder, folder, batches(data(folder)))
    used = {s for layout in bound.layouts.values() for s in layout.spaces()}
    seen = {space for site in found.sites.values() for space in site.spaces}
    # Gains of norms on queries and keys move no activations that a layer reads; stacked experts have no sites.
    missing = {s for s in used - seen if not s.startswith("gain.")}
    stacked = {s for s in used if s.startswith(("ffn.", "up."))} if name == "mixtral" else set()
    assert missing == stacked
    assert {"stream"} <= {site.role for site, _ in found.of("residual")}


def test_units_of_experts_are_left_to_the_weights_and_that_is_told() -> None:
    folders = [model("mixtral", seed) for seed in (1, 0)]
    found = cross_statistics(*folders, batches(data(folders[1])))
    assert any("no activations to compare for 'ffn.0', 'ffn.1', 'up.0', 'up.1' " in note for note in found.notes)
    told = align(*folders, data=batches(data(folders[1])), evidence="activations").solver_notes
    assert any("no activations for expert.*, ffn.*, up.*: the weights decide there" in note for note in told)
    assert cross_statistics(model("llama", 1), model("llama"), batches(data(model("llama")))).notes == []


def test_a_units_that_never_changes_correlates_with_nothing() -> None:
    moments = CrossMoments.empty(2, 2, "cpu")
    moments.add(torch.tensor([[1.0, 0.1], [2.0, 0.1], [4.0, 0.1]]), torch.tensor([[1.0, 3.0], [2.0, 3.0], [4.0, 2.0]]))
    correlation = moments.correlation()
    torch.testing.assert_close(correlation[0, 0], torch.tensor(1.0, dtype=torch.float64))
    assert correlation[1].tolist() == [0.0, 0.0]
    assert moments.information()[0, 0] == pytest.approx(MOST_NATS) and moments.information()[1].tolist() == [0.0, 0.0]


def test_information_of_gaussian_units_is_what_nearest_neighbours_find_and_has_the_sign_of_their_correlation() -> None:
    """sklearn estimates it from distances between samples, and knows nothing of Gaussians."""
    draw = np.random.default_rng(0)
    a = draw.standard_normal((4000, 3))
    b = np.column_stack([0.8 * a[:, 0] + 0.6 * draw.standard_normal(4000), -a[:, 1] + draw.standard_normal(4000)])
    moments = CrossMoments.empty(2, 3, "cpu")
    for part in range(4):
        moments.add(*(torch.from_numpy(x[1000 * part : 1000 * (part + 1)]) for x in (b, a)))
    found = moments.information().numpy()
    estimated = np.stack([mutual_info_regression(a, unit, n_neighbors=10, random_state=0) for unit in b.T])
    np.testing.assert_allclose(np.abs(found), estimated, atol=0.05)
    exact = -np.log(1 - np.corrcoef(b.T, a.T)[:2, 2:] ** 2) / 2
    np.testing.assert_allclose(np.abs(found), exact, atol=1e-12)
    assert found[0, 0] > 0.4 and found[1, 1] < -0.25


def test_spaces_and_roles_choose_sites() -> None:
    folder = model("vit")
    found = cross_statistics(folder, folder, batches(data(folder)), spaces=["ffn.0"], roles=["input"])
    assert list(found) == ["vit.encoder.layer.0.output.dense.weight:in"]
    with pytest.raises(RequestError, match="no space 'ffn.9'"):
        cross_statistics(folder, folder, batches(data(folder)), spaces=["ffn.9"])
    with pytest.raises(RequestError, match="is not a role"):
        cross_statistics(folder, folder, batches(data(folder)), roles=["inputs"])


def test_models_of_two_kinds_have_nothing_in_common() -> None:
    first, second = model("bert"), model("gpt2")
    with pytest.raises(RequestError, match="no site in common"):
        cross_statistics(first, second, batches(data(first)))


def test_second_moments_of_one_model_are_its_cross_moments_with_itself() -> None:
    folder = model("llama")
    batch = data(folder)
    own, pair = (
        calibrate(folder, batches(batch), what={"activations"}),
        cross_statistics(folder, folder, batches(batch)),
    )
    for name, moments in pair.moments.items():
        count, total, product = own.moment(name)
        assert count == moments.count
        torch.testing.assert_close(product, moments.cross)
        torch.testing.assert_close(total, moments.sum_a)
