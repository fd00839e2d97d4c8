"""Fused models: of the anchor's shape, loadable by the stock class, and the mean they say they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import isomerge
import models as tiny
from isomerge import architectures
from merging.transport.model_pairs import FAMILIES, batches, carried, fuse, largest_difference, model


@pytest.mark.parametrize("cost", ["weights", "activations"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_other_widths_fuse_to_the_shape_of_the_anchor(family: str, cost: str, tmp_path: Path) -> None:
    narrow, wide = model(family, 0, 32, 48), model(family, 1, 48, 64)
    for anchor, source in ((narrow, wide), (wide, narrow)):
        data = batches(anchor, count=1) if cost == "activations" else None
        found = fuse([anchor, source], data, cost=cost)
        out = tmp_path / anchor.name
        found.save(out)
        saved = tiny.tensors(out)
        assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in tiny.tensors(anchor).items()}
        assert bool(tiny.logits(out).isfinite().all())
        report = found.report()
        assert not report["exact"] and any("approximately" in note for note in report["notes"])
        assert report["sources"][0]["distance"]["before"] is None
        assert report["sources"][0]["distance"]["after"] < 1.4
        units = {row["name"]: row["units"] for row in report["sources"][0]["spaces"]}
        assert units["ffn.0"] == ([64, 48] if anchor == narrow else [48, 64])


def test_only_feed_forwards_of_another_width_fuse_too() -> None:
    anchor, source = model("bert", 0, 32, 48), model("bert", 1, 32, 64)
    found = carried(source, anchor, only="ffn")
    before, after = tiny.tensors(source), found.state_dict()
    attention = [n for n in before if "attention" in n or "embeddings" in n]
    assert attention and all(torch.equal(before[n], after[n]) for n in attention)
    assert after["bert.encoder.layer.0.intermediate.dense.weight"].shape == (48, 32)


def test_a_fused_model_is_the_weighted_mean_of_the_carried_ones() -> None:
    folders = [model("vit", seed) for seed in range(3)]
    data = batches(folders[0])
    found = fuse(folders, data, weights=[1, 1, 2], residual="averaging")
    states = [tiny.tensors(folders[0])] + [
        carried(folder, folders[0], data, residual="averaging").state_dict() for folder in folders[1:]
    ]
    mean = {n: sum(w * state[n] for w, state in zip((0.25, 0.25, 0.5), states, strict=True)) for n in states[0]}
    assert largest_difference(found.state_dict(), mean) < 1e-12
    assert found.report()["weights"] == [0.25, 0.25, 0.5]
    assert found.report()["examples"] == 32


@pytest.mark.parametrize("options", [
    {"solver": "sinkhorn", "regularisation": 0.5}, {"solver": "sinkhorn", "heads": "fixed", "only": "attention"},
    {"mass": "importance"},
    {"heads": "across"}, {"residual": "averaging"}, {"residual": "weighted"}, {"residual": "weighted_units"},
], ids=str)  # fmt: skip
def test_what_is_not_a_permutation_is_called_an_approximation(options: dict[str, Any]) -> None:
    anchor, source = model("vit"), model("vit", 1)
    for data in (None, batches(anchor)):
        found = carried(source, anchor, data, **options)
        assert not found.report()["exact"]
        assert tiny.difference(tiny.logits(source), tiny.logits(anchor, found.state_dict())) > 1e-3


def test_a_small_regularisation_gives_what_the_hard_solver_gives() -> None:
    anchor, source = model("vit"), model("vit", 1)
    data = batches(anchor)
    hard = carried(source, anchor, data, only="ffn").state_dict()
    apart = [
        largest_difference(
            carried(source, anchor, data, only="ffn", solver="sinkhorn", regularisation=r).state_dict(), hard
        )
        for r in (0.5, 0.05, 0.0002)
    ]
    assert apart[0] > apart[2] and apart[1] > apart[2] and apart[2] < 1e-6


def test_units_across_heads_are_one_assignment_over_all_of_them() -> None:
    from scipy.optimize import linear_sum_assignment

    anchor, source = model("vit"), model("vit", 1)
    found = tiny.arrays(carried(source, anchor, heads="across", only="attention").state_dict())
    a, b = tiny.arrays(anchor), tiny.arrays(source)
    at = "vit.encoder.layer.0.attention."
    rows = [np.c_[m[at + "attention.value.weight"], m[at + "attention.value.bias"]] for m in (a, b)]
    distances = ((rows[0][:, None] - rows[1][None]) ** 2).sum(-1)
    order = linear_sum_assignment(distances)[1]
    np.testing.assert_array_equal(found[at + "attention.value.weight"], b[at + "attention.value.weight"][order])
    np.testing.assert_array_equal(found[at + "output.dense.weight"], b[at + "output.dense.weight"][:, order])


def test_the_policy_of_the_stream_weighs_the_plans_of_its_writers() -> None:
    from isomerge.merging.transport.evidence import UnitDistances
    from isomerge.merging.transport.solver import TransportSolver
    from isomerge.merging.transport.unit_plans import stream_plan

    orders = [[0, 1, 2], [1, 0, 2]]
    sizes = [3.0, 1.0]
    eye = torch.eye(3, dtype=torch.float64)
    seen = []
    for order, size in zip(orders, sizes, strict=True):
        x, y = size * eye, size * eye[order]  # unit j of the source is unit order[j] of the anchor
        seen.append(UnitDistances.of("", ["residual"], ([3], [3]), x @ y.T, x.square().sum(1), y.square().sum(1)))
    plans = [eye[order].T / 3 for order in orders]
    solver = TransportSolver()
    torch.testing.assert_close(stream_plan("averaging", seen, solver), (plans[0] + plans[1]) / 2)
    torch.testing.assert_close(stream_plan("weighted", seen, solver), 0.75 * plans[0] + 0.25 * plans[1])
    torch.testing.assert_close(stream_plan("weighted_units", seen, solver), 0.75 * plans[0] + 0.25 * plans[1])
    torch.testing.assert_close(stream_plan("first", seen, solver), plans[0])


@pytest.mark.parametrize("family", ["vit", "llama"])
def test_rotations_first_then_transport_of_the_feed_forwards(family: str) -> None:
    anchor, source = model(family), model(family, 1)
    data = batches(anchor)
    align = {"level": "rotation", "only": "attention"}
    found = carried(source, anchor, data, only="ffn", align=align)
    report = found.report()
    assert report["exact"]
    assert tiny.difference(tiny.logits(source), tiny.logits(anchor, found.state_dict())) < 1e-9
    far = report["sources"][0]["distance"]
    rotated = isomerge.align(source, anchor, **align).report()["distance"]
    assert far["before"] == pytest.approx(rotated["before"]) and far["aligned"] == pytest.approx(rotated["after"])
    # Rotations leave what feed-forward units do as it was, so they are carried as without them.
    alone = carried(source, anchor, data, only="ffn").state_dict()
    units = [n for n in alone if "mlp" in n or "intermediate" in n]
    assert units and largest_difference({n: found.state_dict()[n] for n in units}, {n: alone[n] for n in units}) < 1e-12


def test_the_method_of_recipes_gives_what_the_function_gives() -> None:
    anchor, source = model("vit"), model("vit", 1)
    data = batches(anchor)
    found = isomerge.merge(
        [str(anchor), str(source)], method="ot_fusion", data=data, residual="averaging", weight=[3, 1]
    )
    truth = fuse([anchor, source], data, residual="averaging", weights=[3, 1]).state_dict()
    assert largest_difference(dict(found.state_dict()), truth) == 0
    assert found.report()["method"] == "ot_fusion" and not found.report()["exact"]


@pytest.mark.parametrize("with_data", [False, True])
def test_an_architecture_without_a_specification_is_carried_in_what_is_proven(
    with_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(architectures.FAMILIES, "starcoder2")
    kind = transformers.Starcoder2ForCausalLM
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    words = {"vocab_size": 31, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    modules = []
    for seed in range(3):
        torch.manual_seed(seed)
        modules.append(kind(kind.config_class(**sizes, **words, intermediate_size=24)).double().eval())
    tokens = torch.arange(3, 30).reshape(3, 9)
    data = (lambda: iter([{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}])) if with_data else None
    found = carried(modules[1], modules[0], data)
    assert found.report()["exact"] and any("has no specification" in note for note in found.report()["notes"])
    found.load_into(modules[2])
    with torch.no_grad():
        expected, got = modules[1](tokens).logits, modules[2](tokens).logits
    assert tiny.difference(expected, got) < 1e-6  # its norms go down to float32 inside
    weights = [m.model.layers[0].mlp.c_fc.weight for m in (modules[1], modules[2])]
    assert not torch.equal(*weights)  # units change places and, where data say how, directions of the stream
    assert torch.allclose(*(w.flatten().sort().values for w in weights), atol=1e-6)


def test_a_module_in_memory_fuses_and_takes_the_result() -> None:
    folder = model("gpt2")
    modules = [transformers.GPT2LMHeadModel.from_pretrained(f, dtype=torch.float64) for f in (folder, model("gpt2", 1))]
    found = fuse(modules)
    found.load_into(modules[0])
    truth = fuse([folder, model("gpt2", 1)]).state_dict()
    state = modules[0].state_dict()
    assert all(torch.equal(state[n], t) for n, t in truth.items())
