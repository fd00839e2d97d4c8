"""Models whose tables of positions differ in length: what `check` says of them, and that the way it names works."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import isomerge
from commands import said
from models import model

TABLES = {
    "roberta": (
        "max_position_embeddings",
        "roberta.embeddings.position_embeddings.weight",
        "RobertaForTokenClassification",
    ),
    "gpt2": ("n_positions", "transformer.wpe.weight", "GPT2LMHeadModel"),
}


@pytest.mark.parametrize("family", [*TABLES])
def test_the_way_that_check_names_merges_tables_of_different_length(family: str, tmp_path: Path) -> None:
    key, table, kind = TABLES[family]
    short, long = model(family, 0, torch.float32), model(family, 1, torch.float32, **{key: 40})
    found = isomerge.check(short, long)
    rows = len(load_file(short / "model.safetensors")[table])
    (told,) = [reason for reason in found.reasons if "different length" in reason]
    assert f"the first {rows} rows are merged" in told and str(long) in told and rows < 40
    program, *words = shlex.split(found.suggestion)
    assert program == "isomerge"
    words.remove("--align")  # whose rows are in another order; the mean as it is can be computed by hand
    said(*words, "--no-report", folder=tmp_path)
    merged = load_file(tmp_path / "merged" / "model.safetensors")[table]
    parts = [load_file(folder / "model.safetensors")[table] for folder in (short, long)]
    assert torch.allclose(merged[:rows], (parts[0] + parts[1][:rows]) / 2, atol=1e-6)
    assert torch.equal(merged[rows:], parts[1][rows:])
    stock, about = getattr(transformers, kind).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(about.values()) and stock.config.to_dict()[key] == 40
