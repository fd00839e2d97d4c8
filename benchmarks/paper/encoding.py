"""Texts as numbers of tokens: what a model of the language experiments reads, in padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from corpora import CORPORA, read
from parsers import Example
from torch import Tensor

IGNORED = -100
"""The label of what is not asked: how torch marks it, too."""


def load_tokenizer(base: str) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    except (ImportError, ValueError) as error:
        raise SystemExit(
            f"Loading the tokenizer of {base}: {str(error).splitlines()[0]} Install sentencepiece and protobuf, or put "
            "the tokenizer.json beside the model."
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode(tokenizer: Any, task: str, examples: Sequence[Example], length: int) -> list[dict[str, Any]]:
    """Numbers of tokens and targets. A word's tag belongs to one of its tokens; words that were cut off have none.

    A tokenizer without a separator is that of a model that reads from left to right, and words carry the space before
    them. There a pair of texts is two lines, and a word is tagged where it ends: before, the model has not read it.
    """
    given, targets = [list(side) for side in zip(*examples, strict=True)]
    onward = tokenizer.sep_token is None
    options: dict[str, Any] = {"truncation": True, "max_length": length}
    if task == "ner":
        # One place is enough for a word that the tokenizer makes nothing of, and keeps words and tags in step.
        before = " " if onward else ""
        split = [[before + (word or "?") for word in words] for words in given]
        found = tokenizer(split, is_split_into_words=True, **options)
    elif isinstance(given[0], tuple) and onward:
        found = tokenizer([f"{one}\n{other}" for one, other in given], **options)
    elif isinstance(given[0], tuple):
        found = tokenizer([one for one, _ in given], [other for _, other in given], **options)
    else:
        found = tokenizer(given, **options)
    rows = []
    for place, target in enumerate(targets):
        row = {key: values[place] for key, values in found.items()}
        row["labels"] = _tagged(found.word_ids(place), target, onward) if task == "ner" else target
        rows.append(row)
    return rows


def _tagged(words: Sequence[int | None], tags: Sequence[int], last: bool) -> list[int]:
    """The tag of each word at its first token, or its last; other tokens are not asked.

    >>> _tagged([None, 0, 0, 1, None], [3, 0], last=False)
    [-100, 3, -100, 0, -100]
    >>> _tagged([0, 0, 1], [3, 0], last=True)
    [-100, 3, 0]
    """
    beside = [*words[1:], None] if last else [None, *words[:-1]]
    return [IGNORED if w is None or w == b else tags[w] for w, b in zip(words, beside, strict=True)]


def batch_of(rows: Sequence[Mapping[str, Any]], padding: int) -> dict[str, Tensor]:
    """Padded to the longest."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": padding, "labels": IGNORED}
    found = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if isinstance(values[0], list):
            values = [value + [fill.get(key, 0)] * (longest - len(value)) for value in values]
        found[key] = torch.tensor(values)
    return found


class Inputs:
    """Encoded sets of one base, each read and encoded once."""

    def __init__(self, base: str, data: Path | None, trained: int | None, tested: int | None, length: int) -> None:
        """`trained` and `tested` are the most examples of the two splits."""
        self._tokenizer = load_tokenizer(base)
        self._data, self._length = data, length
        self._limits = {"train": trained, "test": tested}
        self._known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def rows(self, corpus: str, split: str) -> list[dict[str, Any]]:
        if (corpus, split) not in self._known:
            examples = read(corpus, split, self._data, self._limits[split])
            self._known[corpus, split] = encode(self._tokenizer, CORPORA[corpus].task, examples, self._length)
        return self._known[corpus, split]

    def batches(self, corpus: str, split: str, size: int, order: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        rows = self.rows(corpus, split)
        for start in range(0, len(order), size):
            yield batch_of([rows[place] for place in order[start : start + size]], self._tokenizer.pad_token_id)

    def passes(self, corpus: str, limit: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
        """The first training examples, as often as a merge wants them."""
        order = self.by_length(corpus, "train", range(min(limit, len(self.rows(corpus, "train")))))
        return lambda: self.batches(corpus, "train", 32, order)

    def shuffled(self, corpus: str, size: int, generator: torch.Generator, near: int = 1) -> list[list[int]]:
        """Training batches for one epoch, random; but out of so many batches' worth of texts, these are made by length:
        padding costs as much as text."""
        rows = self.rows(corpus, "train")
        places = torch.randperm(len(rows), generator=generator).tolist()
        found: list[list[int]] = []
        for start in range(0, len(places), near * size):
            alike = sorted(places[start : start + near * size], key=lambda place: len(rows[place]["input_ids"]))
            found += [alike[k : k + size] for k in range(0, len(alike), size)]
        return [found[place] for place in torch.randperm(len(found), generator=generator).tolist()]

    def by_length(self, corpus: str, split: str, places: Iterable[int] | None = None) -> list[int]:
        """These places, or all, from the longest text to the shortest: batches have little padding, and memory that a
        GPU gave for the first of them serves the others."""
        rows = self.rows(corpus, split)
        return sorted(range(len(rows)) if places is None else places, key=lambda place: -len(rows[place]["input_ids"]))
