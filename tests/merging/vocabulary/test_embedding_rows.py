"""Rows by token strings, against a brute force over dictionaries; reads that stay small; vectors; dtypes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.run.rows import InMemory, TensorSource
from isomerge.merging.vocabulary import TokenRule, TokenSource, merge_vocabularies
from isomerge.merging.vocabulary.tables import VocabularyTable
from merging.vocabulary.animals import animals, sources, tables, whole
from models import EMBEDDING, save_model, word_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]


def random_models(tmp: Path, seed: int, dtypes: tuple[torch.dtype, ...]) -> dict[str, Checkpoint]:
    """Models over random parts of one dictionary, each in an order of its own."""
    draw = random.Random(seed)
    words = [f"w{i}" for i in range(40)]
    models = {}
    for name, dtype in zip("ABC", dtypes, strict=True):
        own = draw.sample(words, 25) + SPECIALS
        draw.shuffle(own)
        rows = len(own) + draw.randrange(5)
        models[name] = save_model(tmp / name, word_tokenizer(own), rows=rows, seed=draw.randrange(99), dtype=dtype)
    return models


def rows_by_token(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The truth: transformers' own tokenizer and the stored table, without any of isomerge's vocabulary code."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(checkpoint.folder).get_vocab()
    table = checkpoint.read(EMBEDDING).double()
    return {token: table[id] for token, id in tokens.items() if id < len(table)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("base", ["A", "B", None])
@pytest.mark.parametrize("source", ["union", "base", "C"])
def test_every_row_is_the_one_its_token_string_names(tmp_path: Path, seed: int, base: str | None, source: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32) if seed % 2 else (torch.float32,) * 3
    models = random_models(tmp_path, seed, dtypes)
    vocabulary = merge_vocabularies(models, source=source, base=base, pad_to_multiple_of=16)
    truth = {name: rows_by_token(checkpoint) for name, checkpoint in models.items()}
    for name, table in tables(vocabulary, models).items():
        assert table.shape[0] == vocabulary.size and vocabulary.size % 16 == 0
        expected = {}
        for token in vocabulary.tokens:
            givers = [truth[n][token] for n in models if token in truth[n]]
            if token in truth[name]:
                expected[token] = truth[name][token]
            elif base is not None and token in truth[base]:
                expected[token] = truth[base][token]
            else:
                expected[token] = torch.stack(givers).mean(0)
        for token, id in vocabulary.tokens.items():
            torch.testing.assert_close(table[id].double(), expected[token], rtol=1e-6, atol=1e-8)
            if token in truth[name]:
                assert torch.equal(table[id].double(), expected[token])  # its own rows are copied bit by bit
        mean = torch.stack(list(expected.values())).mean(0)
        for row in table[len(vocabulary.tokens) :]:
            torch.testing.assert_close(row.double(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_blocks_of_any_size_give_the_same_rows(tmp_path: Path, step: int) -> None:
    models = random_models(tmp_path, 0, (torch.float32,) * 3)
    vocabulary = merge_vocabularies(models, source="union", pad_to_multiple_of=64)
    source = vocabulary.source("B", sources(models))
    assert torch.equal(whole(source, step), whole(source, 7))


class Recorded:
    """A source that hands out one buffer again and again, as a file does, and notes what was asked."""

    def __init__(self, tensor: Tensor) -> None:
        self.info = TensorInfo.of(tensor)
        self._tensor = tensor
        self._buffer = torch.empty_like(tensor)
        self.asked: list[tuple[int, int]] = []

    def rows(self, start: int, stop: int) -> Tensor:
        self.asked.append((start, stop))
        self._buffer.fill_(float("nan"))
        self._buffer[start:stop] = self._tensor[start:stop]
        return self._buffer[start:stop]


def alone(stored: TensorSource, order: Tensor) -> VocabularyTable:
    nobody = torch.full((1, len(order)), -1)
    return VocabularyTable([stored], 0, order, nobody, torch.zeros(len(order), dtype=torch.bool))


def test_a_block_reads_only_the_rows_it_needs() -> None:
    stored = Recorded(torch.randn(400, 2**14))
    order = torch.cat([torch.arange(200, 220), torch.tensor([5, 399, 7])])
    table = alone(stored, order)
    assert torch.equal(table.rows(0, 23), stored._tensor[order])
    assert sum(stop - start for start, stop in stored.asked) == 23
    assert sorted(stored.asked) == [(5, 6), (7, 8), (200, 220), (399, 400)]


def test_reads_of_a_shuffled_table_stay_within_a_block() -> None:
    stored = Recorded(torch.randn(30000, 64))
    order = torch.randperm(30000, generator=torch.Generator().manual_seed(0))
    table = alone(stored, order)
    assert torch.equal(table.rows(100, 8100), stored._tensor[order[100:8100]])
    assert max(stop - start for start, stop in stored.asked) * 64 <= 2**19
    assert len(stored.asked) < 10


def test_a_vector_and_a_bias_of_one_row_follow_the_vocabulary(tmp_path: Path) -> None:
    models = random_models(tmp_path, 1, (torch.float32,) * 3)
    vocabulary = merge_vocabularies(models, source="union", base="A", pad_to_multiple_of=16)
    biases = {name: torch.randn(c.tensors[EMBEDDING].shape[0]) for name, c in models.items()}
    as_table = {name: InMemory(bias[:, None]) for name, bias in biases.items()}
    for name in models:
        expected = whole(vocabulary.source(name, as_table))[:, 0]
        vector = vocabulary.source(name, {n: InMemory(b) for n, b in biases.items()})
        row = vocabulary.source(name, {n: InMemory(b[None]) for n, b in biases.items()}, axis=1)
        assert vector.info.shape == (vocabulary.size,) and row.info.shape == (1, vocabulary.size)
        torch.testing.assert_close(vector.rows(0, vocabulary.size), expected)
        torch.testing.assert_close(row.rows(0, 1)[0], expected)


def test_a_mean_of_half_precision_rows_is_taken_in_float32(tmp_path: Path) -> None:
    models = random_models(tmp_path, 2, (torch.bfloat16,) * 3)
    vocabulary = merge_vocabularies(models, source="union")
    truth = {name: rows_by_token(checkpoint) for name, checkpoint in models.items()}
    shared = sorted((truth["B"].keys() & truth["C"].keys()) - truth["A"].keys())
    assert shared
    id = vocabulary.tokens[shared[0]]
    row = vocabulary.source("A", sources(models)).rows(id, id + 1)[0]
    assert row.dtype == torch.float32
    assert torch.equal(row.double(), (truth["B"][shared[0]] + truth["C"][shared[0]]) / 2)


def test_minus_zero_survives() -> None:
    table = alone(InMemory(-torch.zeros(2, 2)), torch.tensor([1, 0]))
    assert torch.signbit(table.rows(0, 2)).all()


def test_a_zero_token_is_zeros_for_all_and_crashes_nothing(tmp_path: Path) -> None:
    # mergekit 0.1.4 crashed on `kind: zero`.
    models = {name: c for name, c in animals(tmp_path).items() if name in "AB"}
    zero = TokenRule(TokenSource("zero"))
    vocabulary = merge_vocabularies(models, source="base", base="A", rules={"<new>": zero, "cat": zero})
    for name, table in tables(vocabulary, models).items():
        assert not table[vocabulary.tokens["<new>"]].any()
        # all models have 'cat' and nothing forces it
        assert table[vocabulary.tokens["cat"], 0].item() == {"A": 103.0, "B": 205.0}[name]


def test_force_without_a_source_gives_all_models_the_general_row(tmp_path: Path) -> None:
    # mergekit raises NotImplementedError here.
    models = animals(tmp_path)
    forced = {"cat": TokenRule(None, force=True)}
    with_base = merge_vocabularies(models, source="union", base="A", rules=forced)
    without = merge_vocabularies(models, source="union", rules=forced)
    for name in models:
        assert tables(with_base, models)[name][with_base.tokens["cat"], 0].item() == 103.0
        assert tables(without, models)[name][without.tokens["cat"], 0].item() == (103.0 + 205.0) / 2


def test_a_model_without_the_tensor_gives_no_rows(tmp_path: Path) -> None:
    models = animals(tmp_path)
    rules = {"moon": TokenRule(TokenSource("model", "C"))}
    vocabulary = merge_vocabularies(models, source="union", base="A")
    two = {name: source for name, source in sources(models).items() if name != "A"}
    assert whole(vocabulary.source("C", two))[vocabulary.tokens["cat"], 0].item() == 205.0
    with pytest.raises(RequestError, match=r"'moon' is to come from 'C', which has no such tensor"):
        ruled = merge_vocabularies(models, source="union", base="A", rules=rules)
        ruled.source("A", {name: source for name, source in sources(models).items() if name != "C"})


def test_a_table_shorter_than_its_config_is_never_cut_silently(tmp_path: Path) -> None:
    models = animals(tmp_path)
    vocabulary = merge_vocabularies(models, source="union", base="A")
    short = {**sources(models), "B": InMemory(torch.zeros(4, 8))}
    with pytest.raises(CheckpointError, match=r"of 'B' is needed, but its table has 4 rows.*promises 8"):
        vocabulary.source("B", short)


def test_tables_of_different_widths_are_refused(tmp_path: Path) -> None:
    models = animals(tmp_path)
    vocabulary = merge_vocabularies(models, source="union", base="A")
    with pytest.raises(RequestError, match=r"shapes have to be the same.*'B' \(8, 5\)"):
        vocabulary.source("A", {**sources(models), "B": InMemory(torch.zeros(8, 5))})
