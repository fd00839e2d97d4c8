"""A merge of models that have nothing in common says so: it succeeds, and what it makes does not work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from typer.testing import CliRunner

import isomerge
from isomerge.architectures import describe
from isomerge.cli.app import app
from isomerge.symmetry.moved import scrambled
from models import image_pair as pair
from models import model, noisy, tensors, variant
from samples import digits, in_two_documents


def is_inside(name: str, tensor: Tensor) -> bool:
    return tensor.ndim > 1 and any(word.isdigit() for word in name.split("."))


def cosine(first: Path, second: Path) -> float:
    """Over every matrix of a layer, in float64."""
    a, b = (
        np.concatenate([t.double().numpy().ravel() for n, t in sorted(tensors(path).items()) if is_inside(n, t)])
        for path in (first, second)
    )
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def said(first: Path, second: Path) -> str:
    return f"{cosine(first, second):.2f}".replace("-0.00", "0.00")


def told(merged: isomerge.Merged) -> list[str]:
    return [note for note in merged.report()["notes"] if "nothing in common" in note]


def notes_of(models: list[Any], **options: Any) -> list[str]:
    return told(isomerge.merge(models, **options))


@pytest.mark.parametrize("family", ["bert", "vit", "llama", "gpt2"])
def test_strangers_are_told_from_siblings(family: str) -> None:
    first, second = model(family, 0), model(family, 1)
    near = noisy(first, 0.2)
    assert cosine(first, second) < 0.1 < 0.5 < cosine(first, near)
    (note,) = notes_of([first, second])
    assert f"{second} (cosine {said(first, second)}) has nothing in common with the layers of {first}" in note
    assert "`align`" in note
    assert notes_of([first, near]) == []


def test_all_strangers_of_a_merge_are_named_at_once() -> None:
    first, second, third = (model("vit", seed) for seed in range(3))
    near = noisy(first, 0.2)
    (note,) = notes_of([first, second, near, third])
    assert str(second) in note and str(third) in note and " have nothing in common" in note
    assert str(near) not in note


def test_a_base_that_is_a_stranger_is_told_though_only_changes_are_merged() -> None:
    first, base = model("vit", 0), model("vit", 1)
    near = noisy(first, 0.2)
    (note,) = notes_of([first, near], method="ties", base=base)
    assert f"the layers of {base}" in note
    assert f"{near} (cosine {said(base, near)})" in note
    assert notes_of([near, noisy(first, 0.2, seed=8)], method="ties", base=first) == []


def test_aligned_models_are_no_strangers_any_more(tmp_path: Path) -> None:
    """One function in other clothes: a stranger as it is stored, and none once it is aligned."""
    first = model("llama", 0)
    move = scrambled(describe(isomerge.open_checkpoint(first)), seed=3)
    other = variant(first, dict(move.changed()), "scrambled")
    assert cosine(first, other) < 0.1
    assert len(notes_of([first, other])) == 1
    assert notes_of([first, other], align=True) == []
    isomerge.align(other, first).save(tmp_path / "moved")
    assert notes_of([first, tmp_path / "moved"]) == []


@pytest.mark.parametrize("method", [{"method": "reconstruct", "features": "joint"}, {"method": "ot_fusion"}])
def test_methods_for_whole_models_are_not_warned_of(method: dict[str, Any]) -> None:
    """They are made for strangers, and do not merge what stands in the same place."""
    assert notes_of(pair(), data=digits(), **method) == []
    assert len(notes_of(pair())) == 1


# --- what a note must not come from -----------------------------------------------------------------------------------
def stacked(*groups: list[tuple[Path, int, int]]) -> str:
    """A recipe of groups of layers: (model, first layer, the one after the last)."""
    rows = [
        "  - sources: [" + ", ".join(f"{{model: {path}, layer_range: [{a}, {b}]}}" for path, a, b in group) + "]"
        for group in groups
    ]
    return "\n".join(["merge_method: linear", "dtype: float64", "parameters: {weight: 0.5}", "slices:", *rows])


def test_different_layers_of_siblings_are_no_strangers() -> None:
    first = model("llama", 0, num_hidden_layers=4, intermediate_size=40)
    near = noisy(first, 0.05)
    assert told(isomerge.merge_recipe(stacked([(first, 0, 2), (near, 2, 4)]))) == []


def test_a_stack_is_judged_group_by_group() -> None:
    """The stranger is named wherever it stands, though no model is in all groups."""
    first, stranger = (model("llama", seed, num_hidden_layers=4, intermediate_size=40) for seed in (0, 1))
    near, other = noisy(first, 0.05), noisy(first, 0.05, seed=8)
    strange, known = [(first, 0, 2), (stranger, 0, 2)], [(near, 2, 4), (other, 2, 4)]
    for groups in ([strange, known], [[(near, 0, 2), (other, 0, 2)], [(first, 2, 4), (stranger, 2, 4)]]):
        (note,) = told(isomerge.merge_recipe(stacked(*groups)))
        assert note.startswith(f"{stranger} (cosine")


def test_tables_do_not_decide() -> None:
    first, second = model("llama", 0), model("llama", 1)
    tables = [name for name in tensors(first) if "embed_tokens" in name or "lm_head" in name]
    alike = variant(second, {name: tensors(first)[name] for name in tables}, "tables-of-another")
    assert len(notes_of([first, alike])) == 1, "strangers with the tables of one model"
    turned = variant(first, {name: 9 * tensors(first)[name].flip(0) for name in tables}, "tables-turned")
    assert notes_of([first, turned]) == [], "one model with tables in another order"


def test_a_model_that_does_not_count_is_no_stranger() -> None:
    first, second = model("vit", 0), model("vit", 1)
    assert notes_of([first, second], weights=[1.0, 0.0]) == []
    assert len(notes_of([first, second], weights=[0.9, 0.1])) == 1


def test_strangers_are_found_in_every_document() -> None:
    first, second = model("vit", 0), model("vit", 1)
    (note,) = told(isomerge.merge_recipe(in_two_documents(first, second, noisy(first, 0.05))))
    assert note.startswith(str(second))


def test_the_command_line_says_it_without_a_report_too(tmp_path: Path) -> None:
    first, second = pair()
    done = CliRunner().invoke(app, ["merge", first, second, "-o", str(tmp_path / "out"), "--no-report"])
    assert done.exit_code == 0 and "nothing in common" in done.output
