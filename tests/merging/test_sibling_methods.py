"""The newest methods for siblings, as they are asked for: by flags, by recipes, one model written again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isomerge
from calibration.hooks import data, stock
from cli.invoke import told
from isomerge.errors import RequestError
from isomerge.merging.recipe import load_recipe
from models import model, tensors


@pytest.mark.parametrize(
    "flags",
    [
        "--method knots --inner tsv",
        "--method core_space --inner ties --density 0.5,0.3",
        "--method emr --task 2",
        "--method consensus_ties --no-elect --task 1",
        "--method ace --epsilon 0.1",
        "--method localize_and_stitch --density 0.2",
    ],
)
def test_flags_give_a_model_that_loads_in_its_stock_class(flags: str, tmp_path: Path) -> None:
    first, second, base = (model("vit", seed) for seed in range(3))
    code, text = told(f"merge {first} {second} --base {base} {flags} -o {tmp_path / 'out'}")
    assert code == 0, text
    with torch.no_grad():
        assert stock(tmp_path / "out")(**data(base)).logits.isfinite().all()


def test_a_model_written_again_is_nearer_to_its_own_than_the_elected_vector() -> None:
    models, base = [model("bert", 0), model("bert", 1)], model("bert", 2)
    unified = isomerge.merge(models, method="emr", base=base).state_dict()
    for task, folder in enumerate(models, start=1):
        again = isomerge.merge(models, method="emr", base=base, task=task).state_dict()
        own = tensors(folder)
        assert sum(float((again[n] - own[n]).square().sum()) for n in own) < sum(
            float((unified[n] - own[n]).square().sum()) for n in own
        )


def test_a_recipe_with_an_unknown_inner_method_names_the_known_ones() -> None:
    recipe = "merge_method: knots\nbase_model: b\nmodels: [{model: a}]\nparameters: {inner: slerp}\n"
    with pytest.raises(RequestError, match=r"4.*'inner' must be one of task_arithmetic, ties.* and is 'slerp'"):
        load_recipe(recipe)
