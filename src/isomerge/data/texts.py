"""Texts, pairs of texts and tagged sentences, one example each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.data.base import Batch, Content, Data, Wanted, draw
from isomerge.data.encode import Encoded, Encoder, collate, masked
from isomerge.data.examples import Example
from isomerge.data.task_heads import label_names, match_labels, task_of
from isomerge.errors import RequestError


class TextData(Data):
    """Examples in memory; tokens are made batch by batch with the model's own tokenizer."""

    def __init__(
        self, examples: Sequence[Example], name: str, *, tokenizer: Any = None, length: int | None = None
    ) -> None:
        super().__init__()
        if not examples:
            raise RequestError(f"While reading {name}: there is not one example in it.")
        self.name, self.size = name, len(examples)
        self._examples, self._tokenizer, self._length = examples, tokenizer, length
        self.words = isinstance(examples[0].text, tuple)
        self.kind = "tokens" if self.words else "pairs" if examples[0].pair is not None else "texts"
        self._labels = [example.label for example in examples]
        self.classes = None if self._are_numbers() else (sorted(_distinct(self._labels)) or None)

    def _are_numbers(self) -> bool:
        """Numbers to predict, not the numbers of classes: some have a fraction."""
        numbers = [_number(label) for label in self._labels if label is not None]
        known = [number for number in numbers if number is not None]
        return len(known) == len(numbers) and any(not number.is_integer() for number in known)

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for example in self._examples:
            digest.update(json.dumps([example.text, example.pair, example.label]).encode() + b"\n")
        return digest.hexdigest()

    def as_texts(self, checkpoint: Checkpoint) -> tuple[Encoder, list[str]]:
        if self.kind != "texts":
            return super().as_texts(checkpoint)
        encoder = Encoder.of(checkpoint, self._tokenizer, self._length)
        return encoder, [example.text for example in self._examples if isinstance(example.text, str)]

    def contents(self, limit: int | None = None, seed: int = 0) -> Iterator[Content]:
        named = self.classes is not None and not self.words
        for number in draw(self.size, self.used(limit), seed):
            example = self._examples[int(number)]
            text = example.text if isinstance(example.text, str) else " ".join(example.text)
            label = example.label[0] if isinstance(example.label, tuple) and len(example.label) == 1 else example.label
            one = named and label is not None and not isinstance(label, tuple)
            yield Content(text if example.pair is None else f"{text}\t{example.pair}", _text(label) if one else None)

    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        task = wanted.task or task_of(checkpoint.config)
        encoder = Encoder.of(checkpoint, self._tokenizer, self._length, words=self.words)
        targets = _Targets(self, checkpoint, task) if wanted.labels else None
        kept = targets.usable() if targets else np.arange(self.size)
        read = 0
        for group in wanted.order(len(kept)):
            encoded = [self._encode(encoder, int(n), task, wanted.seed, targets) for n in kept[group]]
            read += len(group)
            together = [encoded]
            if task in ("sequence", "regression") and not encoder.can_pad and len({len(e.ids) for e in encoded}) > 1:
                self.note("the model has no padding token, so examples were taken one at a time")
                together = [[one] for one in encoded]
            for part in together:
                yield {key: value.to(wanted.device) for key, value in collate(part, encoder, task).items()}
        if encoder.cut:
            self.note(f"{encoder.cut} of {read} examples are longer than {encoder.limit} tokens and were cut")

    def _encode(self, encoder: Encoder, number: int, task: str | None, seed: int, targets: _Targets | None) -> Encoded:
        example = self._examples[number]
        if task == "seq2seq":
            answer = example.pair if example.pair is not None else example.label
            answer = example.text if answer is None else answer
            encoded = encoder.text(example.text if isinstance(example.text, str) else " ".join(example.text))
            encoded.target = encoder.text(answer if isinstance(answer, str) else str(answer)).ids
        else:
            encoded = encoder.words(example.text) if isinstance(example.text, tuple) else (
                encoder.text(example.text, example.pair)
            )  # fmt: skip
        if targets is not None and task == "masked-lm":
            encoded.ids, encoded.labels = masked(encoded.ids, encoded.special, encoder.tokenizer, seed, number)
        elif targets is not None and task == "causal-lm":
            encoded.labels = list(encoded.ids)
        elif targets is not None and task == "seq2seq":
            encoded.labels = encoded.target
        elif targets is not None and targets.known:
            encoded.labels = targets.value(number, encoded)
        return encoded


class _Targets:
    """The labels of a text data set as numbers for one model."""

    def __init__(self, data: TextData, checkpoint: Checkpoint, task: str | None) -> None:
        self._data, self._task, self._labels = data, task, data._labels
        config = checkpoint.config
        self._several = task == "sequence" and config.get("problem_type") == "multi_label_classification"
        self._outputs = len(label_names(config))
        self._numbers: dict[str, int] = {}
        self.known = task in ("sequence", "token", "regression") and any(x is not None for x in self._labels)
        if not self.known:
            return
        missing = [number for number, label in enumerate(self._labels) if label is None]
        if missing:
            raise RequestError(
                f"Reading the labels of {data.name}: {len(missing)} of {data.size} examples have none, the first is "
                f"number {missing[0]}. Complete them, remove those rows, or name another column with the option label.",
                keys=("label",),
            )
        if task == "regression":
            self._require_numbers()
            return
        classes = sorted(_distinct(self._labels))
        self._numbers, notes = match_labels(classes, config, data.name)
        for text in notes:
            data.note(text)

    def _require_numbers(self) -> None:
        wrong = sorted({str(label) for label in self._labels if _number(label) is None})
        if wrong:
            raise RequestError(
                f"Reading the numbers to predict from {self._data.name}: {name_some(wrong)} is not a number. Name "
                "another column with the option label, or another task.",
                keys=("label", "task"),
            )

    def usable(self) -> np.ndarray:
        """All examples; for a model that gives one class, those with one."""
        several = [isinstance(x, tuple) and len(x) != 1 for x in self._labels]
        if not self.known or self._task != "sequence" or self._several or not any(several):
            return np.arange(len(self._labels))
        kept = np.flatnonzero(~np.array(several))
        self._data.note(
            f"{sum(several)} of {len(several)} examples have no class or several, and the model gives one: left out"
        )
        if not len(kept):
            raise RequestError(f"Reading the labels of {self._data.name}: no example has exactly one class.")
        return kept

    def value(self, number: int, encoded: Encoded) -> Any:
        label = self._labels[number]
        if self._task == "regression":
            return _number(label)
        if self._task == "token":
            assert isinstance(label, tuple)
            tags = [self._numbers[tag] for tag in label]
            return [-100 if word is None else tags[word] for word in encoded.first_of_word]
        names = label if isinstance(label, tuple) else (_text(label),)
        if self._several:
            return [float(k in {self._numbers[name] for name in names}) for k in range(self._outputs)]
        return self._numbers[names[0]]


def _distinct(labels: Sequence[Any]) -> set[str]:
    return {name for x in labels if x is not None for name in (x if isinstance(x, tuple) else (_text(x),))}


def _text(label: Any) -> str:
    """The name of a class. Tables made by pandas write the number of a class as 1.0."""
    number = _number(label) if isinstance(label, float) or "." in label else None
    return str(int(number)) if number is not None and number.is_integer() else str(label)


def _number(label: Any) -> float | None:
    try:
        return None if label is None or isinstance(label, tuple) else float(label)
    except ValueError:
        return None
