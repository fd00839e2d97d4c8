"""Another tokenizer for a model: the rows that mergekit-tokensurgeon makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isomerge.cli.app import app
from models import pair_tokenizer, save_model, tensors, vocabulary_of
from peers.side_by_side import TABLES

pytestmark = pytest.mark.peers

CLOSE = 1e-4
"""mergekit computes in float32 without a second orthogonalisation."""


@pytest.mark.parametrize("method", ["omp", "subword", "mean", "zero"])
def test_rows_are_those_mergekit_makes(mergekit: Any, tmp_path: Path, method: str) -> None:
    letters = "abcdefghijkl"
    pairs = [("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "f"), ("k", "l")]
    save_model(tmp_path / "model", pair_tokenizer(letters, []), seed=1)
    save_model(tmp_path / "donor", pair_tokenizer(letters[::-1], pairs), seed=2, hidden_size=16, num_attention_heads=4)
    line = [str(tmp_path / "model"), str(tmp_path / "donor")]
    flags = ["--k", "5", "--approximation-method", method]
    mergekit.run("mergekit-tokensurgeon", [*line, str(tmp_path / "theirs"), *flags])
    done = CliRunner().invoke(app, ["mergekit-tokensurgeon", *line, str(tmp_path / "ours"), *flags, "--quiet"])
    assert done.exit_code == 0, done.output
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and vocabulary_of(tmp_path / "ours") == vocabulary_of(tmp_path / "theirs")
    for name in theirs:
        tolerance = CLOSE if name in TABLES else 0
        assert float((ours[name] - theirs[name]).abs().max()) <= tolerance * float(theirs[name].abs().max()), name
