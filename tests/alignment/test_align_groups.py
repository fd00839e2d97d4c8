"""Every element found belongs to its group, and the sweep only ever climbs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import isomerge
from isomerge.symmetry.groups import Group
from models import MODELS, difference, logits, model, mostly_slow, tensors

ALLOWED = {"permutation": {"permutation"}, "rotation": {"permutation", "rotation", "rotary"}}


def belongs(group: Group, g: Tensor) -> bool:
    """Membership from first principles, by the group's name."""
    n = group.size
    eye = torch.eye(n, dtype=torch.float64)
    if group.name in ("permutation", "signed permutation"):
        places = g if group.name == "permutation" else g.abs() - 1
        return places.dtype == torch.int64 and all(sorted(p) == list(range(n)) for p in places.reshape(-1, n).tolist())
    if not torch.isfinite(torch.view_as_real(g) if g.is_complex() else g).all():
        return False
    if group.name in ("rotation", "rotation fixing 1"):
        orthogonal = bool(((g @ g.mT) - eye).abs().max() <= 1e-9)
        return orthogonal and (group.name == "rotation" or bool((g.sum(-1) - 1).abs().max() <= 1e-9))
    if group.name == "invertible":
        return bool(((g @ torch.linalg.inv(g)) - eye).abs().max() <= 1e-8)
    if group.name == "rotary":
        fits = bool((g.abs() > 0).all())
        if not group.scale:
            fits = fits and bool((g.abs() - 1).abs().max() <= 1e-9)
        if group.phase != "any":
            fits = fits and bool((g.imag == 0).all())
        return fits and (group.phase != "none" or bool((g.real > 0).all()))
    assert group.name in ("scale", "signed scale"), group.name
    return bool((g > 0).all()) if group.name == "scale" else bool((g != 0).all())


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", mostly_slow(MODELS, "vit", "bert", "llama", "t5"))
def test_every_element_belongs_to_its_group_no_larger_than_the_level_names_and_the_function_stays(
    family: str, level: str
) -> None:
    source = model(family, 1)
    alignment = isomerge.align(source, anchor=model(family, 0), level=level)
    elements, spaces = alignment.transform.elements, alignment.transform.spaces
    assert elements
    for name, element in elements.items():
        group = spaces[name]
        batch = tuple(spaces[parent].size for parent in group.per)
        assert tuple(element.shape[: len(batch)]) == batch, name
        assert belongs(group, element) and group.contains(element), name
    assert {spaces[s].name for s in elements} <= ALLOWED.get(level, {g.name for g in spaces.values()})
    found = alignment.state_dict()
    assert all(torch.isfinite(t).all() for t in found.values())
    untied = {"tie_word_embeddings": False} if alignment.untied else {}
    assert difference(logits(source), logits(source, found, **untied)) <= 1e-10


@pytest.mark.parametrize("level", ["permutation", "full"])
@pytest.mark.parametrize("family", mostly_slow(MODELS, "vit", "bert", "llama", "t5"))
def test_the_objective_never_falls(family: str, level: str) -> None:
    steps = isomerge.align(model(family, 1), anchor=model(family, 0), level=level).objective
    assert steps and all(math.isfinite(x) for x in steps)
    assert all(after >= before - 1e-10 * abs(before) for before, after in itertools.pairwise(steps)), steps


@pytest.mark.parametrize("family", ["vit", "llama"])
def test_more_sweeps_are_never_worse(family: str) -> None:
    anchor, source = model(family, 0), model(family, 1)
    last = [isomerge.align(source, anchor=anchor, sweeps=n).report()["objective"][-1] for n in (1, 2, 4, 15)]
    assert all(b >= a - 1e-10 * abs(a) for a, b in itertools.pairwise(last)), last


@pytest.mark.parametrize("family", mostly_slow(MODELS, "vit", "bert", "llama", "t5"))
def test_apply_moves_another_copy_as_the_source_moved(family: str) -> None:
    """`apply` on the source itself gives the same weights; on the stock module it gives the same function."""
    source = model(family, 1)
    alignment = isomerge.align(source, anchor=model(family, 0))
    once, again = alignment.state_dict(), alignment.apply(str(source))
    assert once.keys() == again.keys() and all(torch.equal(once[n], again[n]) for n in once)


@pytest.mark.parametrize("family", ["vit", "llama"])
def test_the_report_measures_the_distance_of_the_files(family: str) -> None:
    anchor, source = model(family, 0), model(family, 1)
    alignment = isomerge.align(source, anchor=anchor)
    a, b, out = tensors(anchor), tensors(source), alignment.state_dict()
    a = {n: t for n, t in a.items() if t.ndim > 1 and any(word.isdigit() for word in n.split("."))}
    size = sum(float(t.square().sum()) for t in a.values())
    before = math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a) / size)
    after = math.sqrt(sum(float((a[n] - out[n]).square().sum()) for n in a) / size)
    report = alignment.report()["distance"]
    assert math.isclose(report["before"], before, rel_tol=1e-9) and math.isclose(report["after"], after, rel_tol=1e-9)
