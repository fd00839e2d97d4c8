"""The three models that mergekit was run on, and the rows of their merged tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Stored
from isomerge.merging.vocabulary import Vocabulary
from models import EMBEDDING, save_model, word_tokenizer


def animals(tmp: Path) -> dict[str, Checkpoint]:
    """The three models that mergekit 0.1.5 was run on; its results are quoted in test_against_mergekit.py."""
    return {
        "A": save_model(tmp / "A", word_tokenizer(["<unk>", "<s>", "</s>", "cat", "dog", "sun"]), first=100),
        "B": save_model(
            tmp / "B", word_tokenizer(["</s>", "<s>", "dog", "<unk>", "bird", "cat", "moon"], ["<x>"]), first=200
        ),
        "C": save_model(
            tmp / "C", word_tokenizer(["<unk>", "<s>", "</s>", "moon", "bird", "tree"]), first=300, rows=10
        ),
    }


def sources(models: Mapping[str, Checkpoint], tensor: str = EMBEDDING) -> dict[str, TensorSource]:
    return {name: Stored(checkpoint, tensor) for name, checkpoint in models.items()}


def whole(source: TensorSource, step: int = 3) -> Tensor:
    """All rows, asked for in blocks as the engine does."""
    if len(source.info.shape) < 2:
        return source.rows(0, 1).clone()
    length = source.info.shape[0]
    return torch.cat([source.rows(i, min(i + step, length)).clone() for i in range(0, length, step)])


def tables(vocabulary: Vocabulary, models: Mapping[str, Checkpoint], tensor: str = EMBEDDING) -> dict[str, Tensor]:
    return {name: whole(vocabulary.source(name, sources(models, tensor))) for name in models}
