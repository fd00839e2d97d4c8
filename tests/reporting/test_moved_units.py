"""Which unit went where: against moves made by hand on the files, and against brute force."""

from __future__ import annotations

import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from isomerge.reporting.moved_units import LISTED, moved_units
from isomerge.symmetry.groups import Invertible, Permutation, Rotary, Rotation, SignedPermutation, SignedScale
from isomerge.symmetry.transform import Transform, random_transform
from reporting.outputs import page_of, record_of, said, workshop

UNITS = [3, 0, 1, 2, 4, 6, 5]
HEADS = [1, 2, 0]
LAYER = "vit.encoder.layer.1"


@cache
def scrambled() -> Path:
    """A copy of `first`: units and heads of one layer in another order, one head turned in one of its planes."""
    folder = workshop() / "scrambled"
    shutil.copytree(workshop() / "first", folder)
    state = load_file(folder / "model.safetensors")
    for part, axis in (("intermediate.dense.weight", 0), ("intermediate.dense.bias", 0), ("output.dense.weight", 1)):
        state[f"{LAYER}.{part}"] = np.ascontiguousarray(state[f"{LAYER}.{part}"].take(UNITS, axis))
    heads = [unit for head in HEADS for unit in range(4 * head, 4 * head + 4)]
    for part in ("query", "key", "value"):
        for kind in ("weight", "bias"):
            name = f"{LAYER}.attention.attention.{part}.{kind}"
            moved = state[name].take(heads, 0)
            if part != "value":  # the first head, by a right angle in its first plane
                moved[[0, 1]] = -moved[1], moved[0]
            state[name] = np.ascontiguousarray(moved)
    name = f"{LAYER}.attention.output.dense.weight"
    state[name] = np.ascontiguousarray(state[name].take(heads, 1))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@cache
def undone() -> Path:
    out = workshop() / "out-undone"
    said("align", scrambled().name, "first", "-o", out)
    return out


def spaces(folder: Path) -> dict[str, Any]:
    return {row["name"]: row["units"] for row in record_of(folder)["alignment"]["models"][0]["spaces"]}


def test_every_unit_is_told_with_the_place_it_came_from_and_goes_to() -> None:
    """Unit j of the copy is unit UNITS[j] of the original, and so it goes there."""
    found = spaces(undone())
    for space, order in (("ffn.1", UNITS), ("head.1", HEADS)):
        expected = {(place, unit) for place, unit in enumerate(order) if place != unit}
        assert {(entry["from"], entry["to"]) for entry in found[space]["listed"]} == expected
        assert (found[space]["changed"], found[space]["of"]) == (len(expected), len(order))
        far = [abs(entry["from"] - entry["to"]) for entry in found[space]["listed"]]
        assert far == sorted(far, reverse=True), "the farthest first"
    assert found["ffn.0"] is None and found["head.0"] is None, "what stays names nobody"


def test_a_turned_head_is_told_with_its_angle() -> None:
    """One of two planes by a right angle: cos φ = (0 + 0 + 1 + 1) / 4."""
    (entry,) = spaces(undone())["qk.1"]["listed"]
    assert (entry["from"], entry["to"]) == (0, HEADS[0]) and "factor" not in entry
    assert entry["angle"] == pytest.approx(math.degrees(math.acos(0.5)), rel=1e-3)


def test_the_page_lists_what_the_record_lists_by_layer() -> None:
    page, found = page_of(undone()), spaces(undone())
    table = page.tables["Which units of scrambled moved"]
    rows = {row[0]: [cell.replace("\u00a0", " ") for cell in row] for row in table[1:]}
    assert rows.keys() == {name for name, units in found.items() if units and units["changed"]}
    assert rows["ffn.1"][1] == "6 of 7"
    assert rows["ffn.1"][2] == " · ".join(f"{e['from']} → {e['to']}" for e in found["ffn.1"]["listed"])
    assert rows["qk.1"][2] == f"head 0 → {HEADS[0]}: 60.0°"
    layers = [known["data-layer"] for tag, known in page.elements if tag == "tr" and known.get("data-layer") == "1"]
    assert len(layers) >= len(rows)


def test_a_wide_space_names_the_farthest_and_counts_the_rest() -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    told = moved_units(Transform({"ffn.0": Permutation(1000)}, {"ffn.0": order}), "ffn.0")
    assert told is not None
    distance = np.abs(order.numpy() - np.arange(1000))
    assert told["changed"] == int((distance > 0).sum()) and told["of"] == 1000 and len(told["listed"]) == LISTED
    assert [abs(e["from"] - e["to"]) for e in told["listed"]] == sorted(distance, reverse=True)[:LISTED]
    assert all(order[e["to"]] == e["from"] for e in told["listed"])


def test_elements_per_unit_are_told_by_where_their_unit_comes_from() -> None:
    """Nested twice: experts, their units, and a factor for each unit."""
    groups = {
        "expert.0": Permutation(2), "ffn.0": Permutation(3, per="expert.0"),
        "up.0": SignedScale(1, per=("expert.0", "ffn.0")), "vo.0": Invertible(4, per="expert.0"),
        "qk.0": Rotary(4, per="expert.0"), "residual": Rotation(5), "pooler": SignedPermutation(3),
    }  # fmt: skip
    moves = random_transform(groups, seed=3)
    told = {name: moved_units(moves, name) for name in groups}
    assert all(told.values())
    experts, units, factors, matrices = (moves.elements[n] for n in ("expert.0", "ffn.0", "up.0", "vo.0"))
    assert told["up.0"]["names"] == ["expert", "ffn"] and told["up.0"]["changed"] == 6
    for entry in told["up.0"]["listed"]:
        place = (entry["within"][0], entry["to"])
        assert entry["from"] == units[place] and entry["factor"] == pytest.approx(float(factors[place]), rel=1e-3)
    for entry in told["vo.0"]["listed"]:
        g = matrices[entry["to"]].numpy()
        cosine = np.trace(g) / np.sqrt(4 * np.sum(g * g))
        assert entry["from"] == experts[entry["to"]]
        assert entry["angle"] == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-3)
        assert entry["factor"] == pytest.approx(np.sqrt(np.sum(g * g) / 4), rel=1e-3)
    assert told["residual"]["names"] == [] and list(told["residual"]["listed"][0]) == ["angle"]
    flipped = {e["to"] for e in told["pooler"]["listed"] if e.get("flipped")}
    assert flipped == {place for place, unit in enumerate(moves.elements["pooler"].tolist()) if unit < 0}


def test_a_rotary_head_is_turned_as_its_matrix_is() -> None:
    numbers = torch.polar(torch.ones(2, dtype=torch.float64), torch.tensor([0.0, math.pi / 2], dtype=torch.float64))
    told = moved_units(Transform({"qk.0": Rotary(4)}, {"qk.0": numbers}), "qk.0")
    assert told is not None and told["listed"] == [{"angle": pytest.approx(60.0)}]


def test_what_a_space_left_alone_is_not_counted() -> None:
    groups = {"head.0": Permutation(3), "vo.0": Invertible(2, per="head.0")}
    matrices = torch.eye(2, dtype=torch.float64).repeat(3, 1, 1)
    matrices[1] = 2 * torch.eye(2)
    told = moved_units(Transform(groups, {"vo.0": matrices}), "vo.0")
    assert told is not None and (told["changed"], told["of"]) == (1, 3)
    assert told["listed"] == [{"from": 1, "to": 1, "factor": 2.0}]
