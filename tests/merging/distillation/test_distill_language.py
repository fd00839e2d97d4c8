"""Language models as teachers: tied tables, encoders and decoders, and vocabularies that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import isomerge
from isomerge.errors import RequestError
from merging.layerwise.reconstructions import data, load
from merging.layerwise.test_vocabularies import random_model, renumbered, vocabularies
from models import model, read_config, tensors
from precision import float64_throughout


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_a_stock_class_loads_the_student(tmp_path: Path, family: str) -> None:
    tied = {"tie_word_embeddings": True} if family == "gpt2" else {}
    folders = [model(family, seed, torch.float32, **tied) for seed in (0, 1)]
    made = isomerge.distill(
        folders[:1], folders[1], data=data(folders[0], 2, size=8), steps=30, rate=0.01, progress=False
    )
    made.save(tmp_path / "out")
    kind = getattr(transformers, read_config(folders[0])["architectures"][0])
    stock, about = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert set(tensors(tmp_path / "out")) == set(tensors(folders[1]))
    rows = made.details["distilled"]["held_out"]
    assert rows[-1]["distance"] < 0.9 * rows[0]["distance"]
    batch = data(folders[0], 1, size=2)[0]
    same = load(folders[1], made.state_dict(), dtype=torch.float32)(**batch).logits
    torch.testing.assert_close(stock.eval()(**batch).logits, same, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `vocabularies` has it, but the model of another vocabulary has no tokenizer."""
    home = vocabularies(tmp_path_factory.mktemp("vocabularies"))
    for file in (home / "d").rename(home / "bare").glob("tokenizer*"):
        file.unlink()
    return home


def student(folder: Path, teachers: str, **options: Any) -> Any:
    given: dict[str, Any] = {"data": str(folder / "texts.jsonl"), "goals": "mean", "steps": 4, "rate": 0.01, **options}
    with float64_throughout():
        return isomerge.distill([folder / name for name in teachers], folder / "a", progress=False, **given)


@pytest.mark.parametrize("goals", ["mean", "expert"])
def test_a_teacher_whose_tokens_have_other_numbers_teaches_the_same(folder: Path, goals: str) -> None:
    same, other = (student(folder, names, goals=goals) for names in ("ab", "ac"))
    states = [result.state_dict() for result in (same, other)]
    assert max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]) < 1e-6
    assert any("vocabulary of its own" in note for note in other.notes)


def test_classifiers_read_texts_in_their_own_tokens(folder: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        random_model(tmp_path / name, 280, seed, "BertForSequenceClassification")
    renumbered(tmp_path / "b", tmp_path / "c")
    (tmp_path / "texts.jsonl").write_text((folder / "texts.jsonl").read_text())
    same, other = (student(tmp_path, name).state_dict() for name in "bc")
    assert max(float((same[name] - other[name]).abs().max()) for name in same) < 1e-8


def test_another_vocabulary_without_its_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="the vocabularies of the models differ"):
        isomerge.distill([folder / "bare"], folder / "a", data=str(folder / "texts.jsonl"), progress=False)
