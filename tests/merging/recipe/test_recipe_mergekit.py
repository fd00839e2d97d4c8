"""Parameters are resolved as mergekit resolves them.

`mergekit_plans.json` holds what mergekit 0.1.5 planned: its `MergePlanner` was run on these recipes (random ones with
filters, gradients, slices and modules, and examples of its documentation's kinds) with three models a, b, c of five
layers and one, deep, of seven; of every layer three tensors are kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isomerge.merging.recipe import ModelReference
from merging.recipe.skeletons import decoder, plan, recipe

PLANS = json.loads(Path(__file__).with_name("mergekit_plans.json").read_text())
MODELS = {"deep": decoder(depth=7)}


@pytest.mark.parametrize("expected", PLANS, ids=[str(i) for i in range(len(PLANS))])
def test_every_tensor_has_the_inputs_and_options_that_mergekit_gives_it(expected: dict[str, Any]) -> None:
    found = plan(expected["recipe"], MODELS)
    for name, theirs in expected["tensors"].items():
        ours = found.tensors[name]
        inputs = [f"{i.model} {i.tensor}" for i in ours.inputs]
        base = f"{ours.base.model} {ours.base.tensor}" if ours.base else None
        assert inputs == [i for i in theirs["inputs"] if i != base], name
        for option, value in theirs["shared"].items():
            assert ours.options[option] == value, (name, option)
        for place, i in enumerate(ours.inputs):
            for option, value in theirs["each"][str(i.model)].items():
                assert ours.options[option][place] == value, (name, option, i.model)


@pytest.mark.parametrize("expected", PLANS, ids=[str(i) for i in range(len(PLANS))])
def test_the_depth_of_the_output_is_that_of_mergekit(expected: dict[str, Any]) -> None:
    found = plan(expected["recipe"], MODELS)
    donor = 7 if found.donor == ModelReference("deep") else 5
    assert found.config_changes.get("num_hidden_layers", donor) == expected["depth"]
    numbers = {int(name.split(".")[2]) for name in found.tensors if name.startswith("model.layers.")}
    assert numbers == set(range(expected["depth"]))


@pytest.mark.parametrize("expected", PLANS, ids=[str(i) for i in range(len(PLANS))])
def test_what_is_written_for_mergekit_says_the_same(expected: dict[str, Any]) -> None:
    read = recipe(expected["recipe"])
    text = read.mergekit_yaml()
    assert text is not None
    ours, theirs = plan(expected["recipe"], MODELS), plan(text, MODELS)
    for name, one in ours.tensors.items():
        assert (one.options, one.inputs, one.base) == (
            theirs.tensors[name].options, theirs.tensors[name].inputs, theirs.tensors[name].base,
        )  # fmt: skip


TWO = "base_model: a\nmodels:\n- model: a\n- model: b\n"


@pytest.mark.parametrize(
    "text",
    [
        f"merge_method: slerp\n{TWO}align: true\n",
        f"merge_method: slerp\n{TWO}seed: 3\n",
        f"merge_method: ties\n{TWO}parameters: {{paper: true}}\n",
        "merge_method: uniform_soup\nmodels:\n- model: a\n- model: b\n",
        "merge_method: linear\nbase_model: c\nmodels:\n- model: a\n- model: b\n",
    ],
)
def test_what_mergekit_has_not_is_not_written_for_it(text: str) -> None:
    assert recipe(text).mergekit_yaml() is None


def test_options_that_mergekit_demands_are_written_out() -> None:
    text = recipe("merge_method: slerp\n" + TWO + "parameters:\n  t:\n  - {filter: mlp, value: 0.1}\n").mergekit_yaml()
    assert text is not None
    assert "- filter: mlp\n    value: 0.1\n  - value: 0.5\n" in text
    assert "weight: 1.0" in (recipe("merge_method: linear\nmodels:\n- model: a\n- model: b\n").mergekit_yaml() or "")
