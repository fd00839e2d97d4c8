"""Texts to token ids and token ids to batches, as one model takes them; which tokens a masked model must guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from isomerge.checkpoint.base import Checkpoint
from isomerge.data.base import Batch
from isomerge.data.tokenizer import context, padding_id, tokenizer_for
from isomerge.errors import RequestError


@dataclass
class Encoded:
    """One example as tokens."""

    ids: list[int]
    types: list[int] = field(default_factory=list)
    """Which of two texts a token belongs to."""
    special: list[int] = field(default_factory=list)
    """1 for tokens that the tokenizer added."""
    first_of_word: list[int | None] = field(default_factory=list)
    """The number of the word where its first token stands, None at the other tokens."""
    target: list[int] | None = None
    """What an encoder-decoder is to say."""
    labels: Any = None


@dataclass
class Encoder:
    """A tokenizer bound to a model's config. `cut` counts the texts that were too long."""

    tokenizer: Any
    config: Mapping[str, Any]
    limit: int
    cut: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint, given: Any, length: int | None, *, words: bool = False) -> Encoder:
        tokenizer = tokenizer_for(checkpoint, given, words=words)
        if words and not getattr(tokenizer, "is_fast", False):
            raise RequestError(f"Reading tagged words for {checkpoint.name}: its tokenizer cannot tell words apart.")
        limit = context(checkpoint.config, tokenizer)
        return cls(tokenizer, checkpoint.config, limit if length is None else min(length, limit))

    @property
    def can_pad(self) -> bool:
        """Whether a classifier finds the end of a padded text."""
        return self.config.get("pad_token_id") is not None

    @property
    def has_types(self) -> bool:
        return int(self.config.get("type_vocab_size") or 0) > 1

    def text(self, text: str, pair: str | None = None) -> Encoded:
        encoding = self.tokenizer(
            text, pair, truncation=True, max_length=self.limit, return_token_type_ids=True,
            return_special_tokens_mask=True,
        )  # fmt: skip
        # The tokenizer does not say whether it cut, except by filling the limit exactly.
        if len(encoding["input_ids"]) == self.limit:
            self.cut += len(self.tokenizer(text, pair, verbose=False)["input_ids"]) > self.limit
        return self._encoded(encoding)

    def words(self, words: Sequence[str]) -> Encoded:
        encoding = self.tokenizer(
            list(words), is_split_into_words=True, truncation=True, max_length=self.limit, return_token_type_ids=True,
            return_special_tokens_mask=True,
        )  # fmt: skip
        encoded = self._encoded(encoding)
        seen: set[int] = set()
        for word in encoding.word_ids():
            encoded.first_of_word.append(None if word is None or word in seen else word)
            if word is not None:
                seen.add(word)
        if len(encoded.ids) == self.limit and max(seen, default=-1) < len(words) - 1:
            self.cut += 1
        return encoded

    def _encoded(self, encoding: Any) -> Encoded:
        ids = list(encoding["input_ids"])
        if not ids:
            # An empty text still is an example: give the model its end or its beginning to read.
            ids = [padding_id(self.config, self.tokenizer)]
            return Encoded(ids, [0], [1])
        return Encoded(
            ids, list(encoding.get("token_type_ids") or [0] * len(ids)), list(encoding["special_tokens_mask"])
        )


def collate(examples: Sequence[Encoded], encoder: Encoder, task: str | None) -> Batch:
    """Padded on the right to the longest of the batch."""
    padding = padding_id(encoder.config, encoder.tokenizer)
    batch = {
        "input_ids": _padded([e.ids for e in examples], padding),
        "attention_mask": _padded([[1] * len(e.ids) for e in examples], 0),
    }
    if encoder.has_types:
        batch["token_type_ids"] = _padded([e.types for e in examples], 0)
    if encoder.config.get("is_encoder_decoder") and task in ("seq2seq", None):
        start = encoder.config.get("decoder_start_token_id")
        start = padding if start is None else int(start)
        targets = [[start, *(e.target or e.ids)[:-1]] for e in examples]
        batch["decoder_input_ids"] = _padded(targets, padding)
    labels = [e.labels for e in examples]
    if labels[0] is None:
        return batch
    if isinstance(labels[0], list) and task != "sequence":
        batch["labels"] = _padded(labels, -100)
    else:
        batch["labels"] = torch.tensor(labels)
    return batch


def _padded(rows: Sequence[Sequence[int]], filling: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows])


SHARE = 0.15  # of the tokens are to be guessed: 8 in 10 hidden, 1 in 10 replaced by any token, 1 in 10 left


def masked(
    ids: Sequence[int], special: Sequence[int], tokenizer: Any, seed: int, number: int
) -> tuple[list[int], list[int]]:
    """Inputs and labels (−100 where nothing is asked) of example `number`."""
    if tokenizer.mask_token_id is None:
        raise RequestError("Masking texts for a masked language model: its tokenizer has no mask token.")
    random = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), number]))
    chance, kind, other = random.random(len(ids)), random.random(len(ids)), random.integers(0, len(tokenizer), len(ids))
    free = ~np.asarray(special, bool)
    asked = free & (chance < SHARE)
    if free.any() and not asked.any():
        asked[np.flatnonzero(free)[np.argmin(chance[free])]] = True  # every example asks for something
    given = np.asarray(ids)
    inputs = np.where(asked & (kind < 0.8), tokenizer.mask_token_id, np.where(asked & (kind >= 0.9), other, given))
    return inputs.tolist(), np.where(asked, given, -100).tolist()
