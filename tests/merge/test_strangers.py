"""A merge of models that have nothing in common says so: it succeeds, and what it makes does not work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isomerge
from align.tiny import model, noisy, tensors, variant
from isomerge.align.scramble import scrambled
from isomerge.architectures import describe
from whole.digits import digits, pair


def cosine(first: Path, second: Path) -> float:
    """Over everything of two axes and more, in float64."""
    a, b = (
        np.concatenate([t.double().numpy().ravel() for _, t in sorted(tensors(path).items()) if t.ndim > 1])
        for path in (first, second)
    )
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def notes_of(out: Path, models: list[Any], **options: Any) -> list[str]:
    merged = isomerge.merge(models, **options)
    merged.save(out)
    return [note for note in merged.report()["notes"] if "nothing in common" in note]


@pytest.mark.parametrize("family", ["bert", "vit", "llama", "gpt2"])
def test_strangers_are_told_from_siblings(family: str, tmp_path: Path) -> None:
    first, second = model(family, 0), model(family, 1)
    near = noisy(first, 0.2)
    assert cosine(first, second) < 0.1 < 0.5 < cosine(first, near)
    (note,) = notes_of(tmp_path / "out", [first, second])
    assert f"{second} (cosine {cosine(first, second):.2f}) has nothing in common with the weights of {first}" in note
    assert "--align" in note
    assert notes_of(tmp_path / "good", [first, near]) == []


def test_all_strangers_of_a_merge_are_named_at_once(tmp_path: Path) -> None:
    first, second, third = (model("vit", seed) for seed in range(3))
    near = noisy(first, 0.2)
    (note,) = notes_of(tmp_path / "out", [first, second, near, third])
    assert str(second) in note and str(third) in note and " have nothing in common" in note
    assert str(near) not in note


def test_a_base_that_is_a_stranger_is_told_though_only_changes_are_merged(tmp_path: Path) -> None:
    first, base = model("vit", 0), model("vit", 1)
    near = noisy(first, 0.2)
    (note,) = notes_of(tmp_path / "out", [first, near], method="ties", base=base)
    assert f"the weights of {base}" in note
    assert f"{near} (cosine {cosine(base, near):.2f})" in note
    assert notes_of(tmp_path / "good", [near, noisy(first, 0.2, seed=8)], method="ties", base=first) == []


def test_aligned_models_are_no_strangers_any_more(tmp_path: Path) -> None:
    """One function in other clothes: a stranger as it is stored, and none once it is aligned."""
    first = model("llama", 0)
    move = scrambled(describe(isomerge.open_checkpoint(first)), seed=3)
    other = variant(first, dict(move.changed()), "scrambled")
    assert cosine(first, other) < 0.1
    assert len(notes_of(tmp_path / "out", [first, other])) == 1
    assert notes_of(tmp_path / "at once", [first, other], align=True) == []
    isomerge.align(other, first).save(tmp_path / "moved")
    assert notes_of(tmp_path / "after", [first, tmp_path / "moved"]) == []


@pytest.mark.parametrize("method", [{"method": "reconstruct", "features": "joint"}, {"method": "ot_fusion"}])
def test_methods_for_whole_models_are_not_warned_of(method: dict[str, Any], tmp_path: Path) -> None:
    """They are made for strangers, and do not merge what stands in the same place."""
    assert notes_of(tmp_path / "out", pair(), data=digits(), **method) == []
    assert len(notes_of(tmp_path / "plain", pair())) == 1
