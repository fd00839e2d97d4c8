"""Sound: any element of any declared space leaves the outputs of the stock model as they are."""

import copy

import pytest
import torch

from architectures.row_models import (
    build,
    difference,
    every_case,
    load,
    moved,
    moving,
    one_of_each_family,
    outputs,
    state,
)
from isomerge.symmetry.transform import random_transform
from precision import float64_throughout

EXACT, STOCK = 1e-10, 1e-5


def written(case, gauge, seed=3):
    """A random element of every space, written in the canonical form, in the model's own gauge, or in another's."""
    model = case.bound()
    form = moving(model)
    provider = moved(form, random_transform(model.architecture.spaces, seed))
    if gauge == "canonical":
        return state(model, provider)
    frame = form if gauge == "own" else moving(case.bound(seed=1))
    return state(model, lambda name: frame.in_gauge(name, provider))


@pytest.mark.parametrize("gauge", ["canonical", "own", "another"])
@every_case()
def test_random_elements_leave_the_outputs_unchanged(case, gauge):
    with float64_throughout():
        before = outputs(build(case.row.id), case.row)
        after = outputs(load(case, written(case, gauge)), case.row)
        assert difference(before, after) <= EXACT


@pytest.mark.parametrize("case", one_of_each_family(), ids=lambda case: case.id)
def test_each_kind_of_space_alone_leaves_the_outputs_unchanged(case):
    model = case.bound()
    kinds = {}
    for space in model.architecture.movable():
        kinds.setdefault(space.rstrip("0123456789"), []).append(space)
    with float64_throughout():
        before = outputs(build(case.row.id), case.row)
        for kind, spaces in kinds.items():
            form = moving(model, spaces)
            provider = moved(form, random_transform(model.architecture.spaces, 5, spaces))
            after = outputs(load(case, state(model, lambda n, f=form, p=provider: f.in_gauge(n, p))), case.row)
            assert difference(before, after) <= EXACT, kind


@every_case()
def test_the_stock_code_in_float32_agrees_to_rounding(case):
    before = outputs(copy.deepcopy(build(case.row.id)).to(torch.float32), case.row)
    single = {name: tensor.to(torch.float32) for name, tensor in written(case, "another").items()}
    assert difference(before, outputs(load(case, single, torch.float32), case.row)) <= STOCK
