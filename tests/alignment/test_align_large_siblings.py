"""Large siblings are found on a sample before anything is solved; what moved is still solved as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import isomerge
from isomerge.alignment import siblings
from models import WIDE, model, noisy, same_bytes, tensors, variant

FOUND = siblings.NOTE
WIDE_HEADS = 4


@pytest.fixture(autouse=True)
def all_models_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "LARGE_MODEL", 0)


@pytest.mark.parametrize("family", ["vit", "bert", "llama"])
def test_a_large_sibling_is_left_bit_identical_without_a_solve(family: str) -> None:
    anchor = model(family, 0, torch.float32, **WIDE[family])
    source = noisy(anchor)
    alignment = isomerge.align(source, anchor=anchor)
    assert alignment.siblings and FOUND in alignment.solver_notes and not alignment.objective
    before, after = tensors(source), alignment.state_dict()
    assert before.keys() == after.keys() and all(same_bytes(before[n], after[n]) for n in before)


@pytest.mark.parametrize("share", [1.0, 0.25], ids=["whole", "a quarter"])
@pytest.mark.parametrize("what", ["units", "heads", "strangers"])
def test_what_has_to_move_is_seen(what: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if share < 1:
        monkeypatch.setattr(siblings, "SEEN", 0)
        monkeypatch.setattr(siblings, "LEAST_SHARE", share)
    anchor = model("vit", 0, torch.float32, **WIDE["vit"])
    if what == "strangers":
        source = model("vit", 1, torch.float32, **WIDE["vit"])
    else:
        source = variant(anchor, {n: swapped(n, t, what) for n, t in tensors(noisy(anchor)).items()}, what + str(share))
    alignment = isomerge.align(source, anchor=anchor)
    assert FOUND not in alignment.solver_notes and not alignment.siblings


def swapped(name: str, tensor: Tensor, what: str) -> Tensor:
    """Two feed-forward units of the first layer, or two heads, in each other's place."""
    if ".layer.0." not in name:
        return tensor
    names = {
        "units": {"intermediate.dense.weight": 0, "intermediate.dense.bias": 0, "0.output.dense.weight": 1},
        "heads": {
            **{f"attention.{x}.{kind}": 0 for x in ("query", "key", "value") for kind in ("weight", "bias")},
            "attention.output.dense.weight": 1,
        },
    }[what]
    axis = next((axis for ending, axis in names.items() if name.endswith(ending)), None)
    if axis is None or (what == "units" and "attention" in name):
        return tensor
    heads = tensor.shape[axis] // WIDE_HEADS if what == "heads" else 1
    order = torch.arange(tensor.shape[axis])
    order[:heads], order[heads : 2 * heads] = order[heads : 2 * heads].clone(), order[:heads].clone()
    return tensor.index_select(axis, order)
