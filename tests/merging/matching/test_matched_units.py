"""PFNM and FedMA as methods: copies come back, and what has no match is kept in a wider native model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import isomerge
import models as tiny
from isomerge.errors import RequestError
from isomerge.evaluation.verify import verify
from merging.matching.unit_models import copied, feed_forwards, hidden, reordered, with_other_units
from merging.transport.model_pairs import batches, permuted
from models import mostly_slow

METHODS = ["pfnm", "fedma"]
FAMILIES = ["vit", "llama", "gpt2", "bert", "t5", "distilbert", "opt", "olmo2", "gemma2", "deberta", "neox", "qwen3"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "vit", "llama"))
def test_copies_of_a_model_give_it_back_bit_for_bit(name: str, method: str) -> None:
    model = tiny.model(name)
    merged = isomerge.merge([model, copied(model)], method=method)
    assert all(tiny.same_bytes(merged.state_dict()[n], t) for n, t in tiny.tensors(model).items())
    assert not merged.config_changes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_units_in_another_order_are_found(name: str, method: str) -> None:
    model = tiny.model(name)
    copies = [reordered(model, seed) for seed in (0, 1)]
    merged = isomerge.merge([model, *copies], method=method)
    state = merged.state_dict()
    assert all(torch.allclose(state[n].double(), t, rtol=0, atol=1e-15) for n, t in tiny.tensors(model).items())
    assert all(row["of_all"] == row["units"] for row in merged.report()["matched"].values())


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_a_model_in_another_basis_comes_back_after_its_alignment(name: str) -> None:
    model = tiny.model(name)
    merged = isomerge.merge([model, permuted(model)], method="pfnm", align=True)
    expected, got = tiny.logits(model), tiny.logits(model, merged.state_dict(), **merged.config_changes)
    assert tiny.difference(expected, got) < 1e-12


@pytest.mark.parametrize("name", ["vit", "llama"])
@pytest.mark.parametrize("strength", ["share", "full"])
def test_models_without_a_unit_in_common_stand_side_by_side(name: str, strength: str, tmp_path: Path) -> None:
    """With a share of its own each gives what the mean of their outputs is; at full strength their sum."""
    first = tiny.model(name)
    second = with_other_units(first, tiny.model(name, 1))
    options = {"sigma": 0.01, "strength": strength, "weights": [3, 1]}  # only equal units are one
    merged = isomerge.merge([first, second], method="pfnm", **options)
    out = tmp_path / "merged"
    merged.save(out)
    assert verify(out).verdict == "good"
    assert tiny.read_config(out)["intermediate_size"] == 14 == 2 * tiny.read_config(first)["intermediate_size"]
    inputs = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer in range(2):
        one, two, got = (hidden(folder, layer, inputs) for folder in (first, second, out))
        mean = 0.75 * one + 0.25 * two
        if strength == "full":
            bias = [tiny.tensors(f).get(f"vit.encoder.layer.{layer}.output.dense.bias", 0) for f in (first, second)]
            mean = (one - bias[0]) + (two - bias[1]) + 0.75 * bias[0] + 0.25 * bias[1]
        assert tiny.difference(mean, got) < 1e-12


def test_layers_that_need_fewer_units_are_filled_up_with_units_that_do_nothing(tmp_path: Path) -> None:
    first = tiny.model("llama")
    (up, down), _ = feed_forwards(first)
    other = tiny.tensors(tiny.model("llama", 1))
    second = tiny.variant(first, {name: other[name] for name in (*up, down)}, "one-layer")
    isomerge.merge([first, second], method="pfnm", sigma=0.01).save(tmp_path / "out")
    state = tiny.tensors(tmp_path / "out")
    filled, original = feed_forwards(first)[1], tiny.tensors(first)
    for name in filled[0]:
        assert torch.equal(state[name][:7], original[name]) and not state[name][7:].any() and len(state[name]) == 14
    assert torch.equal(state[filled[1]][:, :7], original[filled[1]]) and not state[filled[1]][:, 7:].any()
    inputs = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert tiny.difference(hidden(first, 1, inputs), hidden(tmp_path / "out", 1, inputs)) < 1e-14


def test_the_layerwise_method_looks_at_what_units_read_alone() -> None:
    """What units hand on is another's: they are the same to FedMA, and others to PFNM."""
    first = tiny.model("vit")
    downs = {down: 30 * tiny.tensors(tiny.model("vit", 1))[down] for _, down in feed_forwards(first)}
    second = reordered(tiny.variant(first, downs, "other-outputs"))
    counts = {
        method: [row["of_all"] for row in isomerge.merge([first, second], method=method).report()["matched"].values()]
        for method in METHODS
    }
    assert counts["fedma"] == [7, 7] and max(counts["pfnm"]) < 7


@pytest.mark.parametrize("method", METHODS)
def test_matched_weights_are_the_means_that_the_matching_says(method: str) -> None:
    """With room for no more units every unit has a partner: the best assignment, found by trying all."""
    import itertools

    first, second = tiny.model("vit"), with_other_units(tiny.model("vit"), tiny.model("vit", 1))
    merged = tiny.arrays(isomerge.merge([first, second], method=method, largest=1).state_dict())
    a, b = tiny.arrays(first), tiny.arrays(second)
    for up, down in feed_forwards(first):
        features = []
        for state in (a, b):
            rows = np.concatenate([state[n].reshape(7, -1) for n in up], 1)
            features.append(np.concatenate([rows, state[down].T], 1) if method == "pfnm" else rows)
        products = features[0] @ features[1].T  # with every unit matched, the gain is that of ‖x + y‖²
        best = max(itertools.permutations(range(7)), key=lambda p: sum(products[i, p[i]] for i in range(7)))
        for name in up:
            np.testing.assert_allclose(merged[name], (a[name] + b[name][list(best)]) / 2, rtol=1e-13)
        np.testing.assert_allclose(merged[down], (a[down] + b[down][:, list(best)]) / 2, rtol=1e-13)


def test_strangers_that_are_not_aligned_get_a_note() -> None:
    pair = [tiny.model("vit"), tiny.model("vit", 1)]
    notes = isomerge.merge(pair, method="pfnm").report()["notes"]
    assert any("were not aligned" in note for note in notes) and any("units 7 -> " in note for note in notes)
    assert not any("were not aligned" in n for n in isomerge.merge(pair, method="pfnm", align=True).report()["notes"])
    notes = isomerge.merge(pair, method="fedma", data=batches(pair[0], count=1)).report()["notes"]
    assert any("the data were not used" in note for note in notes)


@pytest.mark.parametrize(("options", "words"), [
    ({"sigma": 0}, "sigma is 0"), ({"growth": -1.0}, "growth is -1"), ({"largest": 0.5}, "factor of 1 or more"),
    ({"strength": "fulll"}, "Did you mean 'full'?"),
], ids=str)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("?", r"\?")):
        isomerge.merge([tiny.model("vit"), tiny.model("vit", 1)], method="pfnm", **options)


def test_experts_cannot_be_matched_unit_by_unit() -> None:
    with pytest.raises(RequestError, match="of a 'mixtral' model no feed-forward is known"):
        isomerge.merge([tiny.model("mixtral"), tiny.model("mixtral", 1)], method="fedma")
