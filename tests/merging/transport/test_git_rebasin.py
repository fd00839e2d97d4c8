"""Git Re-Basin's two matchings (Ainsworth et al., 2023), written down again with SciPy, against `isomerge.align`.

Activation matching: per layer, the permutation that minimises ‖Z_A − P Z_B‖², an assignment on Z_A Z_Bᵀ (or on their
correlations). Weight matching: layer by layer, the permutation that maximises ⟨A, P·B⟩ with all others held, again and
again until nothing moves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

import isomerge
import models as tiny
from merging.transport.model_pairs import batches, carried, largest_difference, model, permuted, seen

Arrays = dict[str, np.ndarray]
AT = "vit.encoder.layer.{}."


def matched_by_activations(anchor: Path, source: Path, measure: str) -> list[np.ndarray]:
    names = [f"vit.layers.{i}.mlp.fc2" for i in range(2)]
    data = batches(anchor)
    orders = []
    for a, b in zip(seen(anchor, names, data), seen(source, names, data), strict=True):
        scores = a.T @ b if measure == "l2" else np.corrcoef(a.T, b.T)[: a.shape[1], a.shape[1] :]
        orders.append(linear_sum_assignment(scores, maximize=True)[1])
    return orders


def reordered(state: Arrays, orders: list[np.ndarray]) -> Arrays:
    found = dict(state)
    for layer, order in enumerate(orders):
        at = AT.format(layer)
        for name in ("intermediate.dense.weight", "intermediate.dense.bias"):
            found[at + name] = found[at + name][order]
        found[at + "output.dense.weight"] = found[at + "output.dense.weight"][:, order]
    return found


@pytest.mark.parametrize("measure", ["l2", "correlation"])
def test_activation_matching_of_feed_forwards(measure: str) -> None:
    anchor, source = model("vit"), model("vit", 1)
    orders = matched_by_activations(anchor, source, measure)
    assert any(order.tolist() != list(range(7)) for order in orders)
    truth = reordered(tiny.arrays(source), orders)
    found = isomerge.align(
        source, anchor, level="permutation", only="ffn", data=batches(anchor), evidence="activations", measure=measure
    )
    state = tiny.arrays(dict(found.state_dict()))
    assert all(np.array_equal(state[name], truth[name]) for name in truth)


def test_transport_of_equal_widths_by_activations_is_activation_matching() -> None:
    anchor, source = model("vit"), model("vit", 1)
    truth = reordered(tiny.arrays(source), matched_by_activations(anchor, source, "l2"))
    state = tiny.arrays(carried(source, anchor, batches(anchor), only="ffn").state_dict())
    assert all(np.array_equal(state[name], truth[name]) for name in truth)


def test_activation_matching_after_rotations_places_units_as_before() -> None:
    anchor, source = model("vit"), model("vit", 1)
    rotated = isomerge.align(source, anchor, level="rotation", only="attention")
    between = tiny.variant(source, dict(rotated.state_dict()), "rotated")
    truth = reordered(tiny.arrays(between), matched_by_activations(anchor, source, "l2"))
    found = isomerge.align(
        between, anchor, level="permutation", only="ffn", data=batches(anchor), evidence="activations", measure="l2"
    )
    state = tiny.arrays(dict(found.state_dict()))
    assert all(np.array_equal(state[name], truth[name]) for name in truth)


# --- weight matching of a post-norm model: stream and feed-forwards ---------------------------------------------------
def axes(name: str) -> list[str | None]:
    """Which permutation each axis of a tensor moves by; heads keep theirs here."""
    layer = name.split("layer.")[1][0] if "layer." in name else ""
    if "intermediate" in name:
        return [f"ffn{layer}", "stream"] if name.endswith("weight") else [f"ffn{layer}"]
    if name.endswith("output.dense.weight") and "attention" not in name:
        return ["stream", f"ffn{layer}"]
    if "attention.self" in name:
        return [None, "stream"] if name.endswith("weight") else [None]
    if name.endswith("attention.output.dense.weight"):
        return ["stream", None]
    if "embeddings" in name and "LayerNorm" not in name:
        return [None, "stream"]
    if name.startswith("classifier"):
        return [None, "stream"] if name.endswith("weight") else [None]
    return ["stream"]


def moved(state: Arrays, orders: dict[str, np.ndarray], leave: str = "") -> Arrays:
    found = {}
    for name, tensor in state.items():
        for axis, space in enumerate(axes(name)):
            if space is not None and space != leave and space in orders:
                tensor = np.take(tensor, orders[space], axis)
        found[name] = tensor
    return found


def best_step(a: Arrays, b: Arrays, orders: dict[str, np.ndarray], space: str) -> np.ndarray:
    """The assignment for one space with all others held: Σ over its tensors of A Bᵀ along it."""
    total, still = 0.0, moved(b, orders, leave=space)
    for name in a:
        for axis in [k for k, s in enumerate(axes(name)) if s == space]:
            x, y = (np.moveaxis(m[name], axis, 0).reshape(m[name].shape[axis], -1) for m in (a, still))
            total = total + x @ y.T
    return linear_sum_assignment(total, maximize=True)[1]


def weight_matching(a: Arrays, b: Arrays) -> dict[str, np.ndarray]:
    width, units = len(a["bert.embeddings.LayerNorm.weight"]), len(a["bert.encoder.layer.0.intermediate.dense.bias"])
    sizes = {"stream": width, "ffn0": units, "ffn1": units}
    orders = {space: np.arange(size) for space, size in sizes.items()}
    for _ in range(100):
        before = {space: order.copy() for space, order in orders.items()}
        for space in sizes:
            orders[space] = best_step(a, b, orders, space)
        if all(np.array_equal(orders[s], before[s]) for s in sizes):
            return orders
    raise AssertionError("weight matching did not come to rest")


def alike(a: Arrays, b: Arrays) -> float:
    """⟨A, B⟩: what weight matching climbs."""
    return float(sum((a[n] * b[n]).sum() for n in a))


def test_weight_matching_puts_a_permuted_model_back() -> None:
    anchor = model("bert")
    found = isomerge.align(permuted(anchor), anchor, level="permutation")
    assert largest_difference(dict(found.state_dict()), tiny.tensors(anchor)) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_alignment_by_permutations_rests_where_weight_matching_rests_and_climbs_no_lower(seed: int) -> None:
    anchor, source = model("bert", 0, 32, 48), model("bert", seed, 32, 48)
    a, b = tiny.arrays(anchor), tiny.arrays(source)
    found = tiny.arrays(dict(isomerge.align(source, anchor, level="permutation").state_dict()))
    for space, size in (("stream", 32), ("ffn0", 48), ("ffn1", 48)):
        assert np.array_equal(best_step(a, found, {}, space), np.arange(size)), space
    matched = moved(b, weight_matching(a, b))
    assert alike(a, found) > alike(a, matched) > alike(a, b)  # it places heads and the units inside them, too


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_the_stream_held_both_find_the_one_best_order_of_the_units(seed: int) -> None:
    anchor, source = model("bert"), model("bert", seed)
    a, b = tiny.arrays(anchor), tiny.arrays(source)
    found = tiny.arrays(dict(isomerge.align(source, anchor, level="permutation", only="ffn").state_dict()))
    truth = moved(b, {space: best_step(a, b, {}, space) for space in ("ffn0", "ffn1")})
    assert all(np.array_equal(found[name], truth[name]) for name in truth)
