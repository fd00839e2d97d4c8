"""`selftest` proves a specification on the model at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import isomerge
from models import model, mostly_slow, variant


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", mostly_slow(["vit", "bert", "gpt2", "llama", "mixtral", "t5"], "vit", "llama"))
def test_a_scrambled_model_computes_the_same_and_is_recovered(family: str, level: str) -> None:
    found = isomerge.selftest(model(family, 0), level=level)
    assert found["unchanged"] is True and found["max_output_difference"] <= 1e-5
    assert found["scrambled_distance"] > 0.1
    assert found["recovered_distance"] <= 1e-5


def test_a_selftest_fails_when_the_file_does_not_hold_what_the_config_promises() -> None:
    broken = variant(model("vit", 0), {}, "headless", drop=("classifier.bias",))
    found = isomerge.selftest(broken)
    assert found["unchanged"] is None and "classifier.bias" in found["max_output_difference_reason"]


def test_the_selftest_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    isomerge.selftest(model("vit", 0))
    assert list(tmp_path.iterdir()) == []
