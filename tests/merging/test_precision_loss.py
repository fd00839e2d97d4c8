"""Precision that a merge loses by the dtype of its first model is named, unless somebody asked for that dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from models import model, tensors

WIDE, NARROW = model("bert", 0, torch.float32), model("bert", 1, torch.bfloat16)
OTHER, SECOND = model("bert", 2, torch.float32), model("bert", 3, torch.bfloat16)


def saved(out: Path, models: list[Path], options: dict[str, Any], **saving: Any) -> tuple[list[str], torch.dtype]:
    merged = isomerge.merge(models, **options)
    merged.save(out, **saving)
    notes = [note for note in merged.report()["notes"] if "precision" in note]
    return notes, tensors(out)["classifier.weight"].dtype


def test_it_is_named_with_the_way_to_keep_it(tmp_path: Path) -> None:
    (note,), dtype = saved(tmp_path / "out", [NARROW, WIDE], {})
    assert dtype == torch.bfloat16
    assert f"stored in bfloat16, as the base or the first model is, and '{WIDE}' in float32" in note
    assert "`out_dtype` float32" in note and note in (tmp_path / "out" / "isomerge.json").read_text()


def test_it_is_said_of_what_was_written_and_not_of_an_earlier_copy(tmp_path: Path) -> None:
    merged = isomerge.merge([NARROW, WIDE])
    merged.save(tmp_path / "first")
    merged.save(tmp_path / "second", out_dtype=torch.float32)
    assert "precision" in (tmp_path / "first" / "isomerge.json").read_text()
    assert "precision" not in (tmp_path / "second" / "isomerge.json").read_text()
    assert tensors(tmp_path / "second")["classifier.weight"].dtype == torch.float32


def test_a_document_that_asks_for_a_dtype_gets_it_without_a_word(tmp_path: Path) -> None:
    text = f"name: half\nmerge_method: linear\ndtype: bfloat16\nmodels: [{{model: {WIDE}}}, {{model: {OTHER}}}]\n---\n"
    text += f"merge_method: linear\nmodels: [{{model: {NARROW}}}, {{model: half}}]\n"
    merged = isomerge.merge_recipe(text)
    merged.save(tmp_path / "out")
    assert not [note for note in merged.report()["notes"] if "precision" in note]


@pytest.mark.parametrize(
    ("models", "options", "saving", "dtype"),
    [
        ([WIDE, NARROW], {}, {}, torch.float32),
        ([NARROW, SECOND], {"base": WIDE}, {}, torch.bfloat16),
        ([NARROW, WIDE], {}, {"out_dtype": "float32"}, torch.float32),
        ([NARROW, WIDE], {}, {"out_dtype": "bfloat16"}, torch.bfloat16),
        ([WIDE, NARROW], {}, {"out_dtype": "bfloat16"}, torch.bfloat16),
    ],
    ids=[
        "nothing is lost",
        "the base gives its config alone",
        "it is kept",
        "it was asked for",
        "all are rounded as asked",
    ],
)
def test_nothing_is_said_where_nothing_is_lost_unasked(
    models: list[Path], options: dict[str, Any], saving: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    assert saved(tmp_path / "out", models, options, **saving) == ([], dtype)
