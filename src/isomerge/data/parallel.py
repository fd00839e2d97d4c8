"""One text, read by models with different tokenizers: where in each reading as much has been read as in the first.

Positions are matched by the bytes of the text. Where the first model has read up to byte e, another one has the state
after its last token that ends at or before e. What lies between is *pending*: the first model knows it and the other
does not yet. A token that ends inside a character (bytes of an emoji) ends at that byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from isomerge.checkpoint.base import Checkpoint
from isomerge.data.base import Batch, Data, Wanted
from isomerge.data.encode import Encoded, Encoder, collate
from isomerge.data.task_heads import task_of
from isomerge.data.tokenizer import padding_id

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "pixel_values", "decoder_input_ids")
PLACES, PENDING, BYTES = "places", "pending", "bytes"
UNKNOWN = -1
"""Pending text that cannot be named: half a character, or more was read than by the first model."""


def part(name: str, who: int) -> str:
    """What a tensor of one model's reading is called in a batch."""
    return f"{who}:{name}"


def read_by(batch: Mapping[str, torch.Tensor], who: int) -> Batch:
    """What one model is given of a batch: its own tokens, or those of the first where it shares that vocabulary."""
    own = {name: batch[part(name, who)] for name in INPUTS if part(name, who) in batch}
    return own or {name: tensor for name, tensor in batch.items() if ":" not in name}


@dataclass
class PendingTexts:
    """Texts by the numbers that stand for them in batches; number 0 is that nothing is pending."""

    texts: list[str] = field(default_factory=lambda: [""])
    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    def number(self, text: bytes) -> int:
        try:
            known = text.decode()
        except UnicodeDecodeError:
            return UNKNOWN
        if known not in self._numbers:
            self._numbers[known] = len(self.texts)
            self.texts.append(known)
        return self._numbers[known]


@dataclass
class TokenReading:
    """One text as one model's tokens."""

    ids: list[int]
    ends: list[int]
    """The byte of the text at which each token ends; 0 for special tokens before it, one more than its length for those
    after it."""

    @classmethod
    def of(cls, encoder: Encoder, text: str) -> TokenReading:
        encoding = encoder.tokenizer(text, truncation=True, max_length=encoder.limit).encodings[0]
        ids = list(encoding.ids)
        if not ids:  # an empty text is an example, too
            return cls([padding_id(encoder.config, encoder.tokenizer)], [0])
        words = [at for at, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
        spans, tokens = [encoding.offsets[at] for at in words], [encoding.tokens[at] for at in words]
        ends = [0] * len(ids)
        for at, end in zip(words, byte_ends(text, spans, tokens), strict=True):
            ends[at] = end
        for at in range(words[-1] + 1 if words else len(ids), len(ids)):
            ends[at] = len(text.encode()) + 1
        return cls(ids, ends)

    def read(self, text: str) -> int:
        """How many bytes of the text it has come to."""
        return max((end for end in self.ends if end <= len(text.encode())), default=0)


def byte_ends(text: str, spans: Sequence[tuple[int, int]], tokens: Sequence[str]) -> list[int]:
    """The byte at which each token ends, from the characters it is made of. Tokens that share a character with the next
    one are parts of it, and their names say how many bytes they are: a letter for each, or as <0xE2>.

    >>> byte_ends("é!", [(0, 1), (0, 1), (1, 2)], ["Ã", "©", "!"])
    [1, 2, 3]
    """
    bytes_before = np.concatenate([[0], np.cumsum([len(letter.encode()) for letter in text])]).astype(int)
    ends = [int(bytes_before[end]) for _, end in spans]
    for at in range(len(spans) - 2, -1, -1):
        if spans[at + 1][0] < spans[at][1]:
            token = tokens[at + 1]
            ends[at] = ends[at + 1] - (1 if token.startswith("<0x") else len(token))
    return ends


def matched(first: Sequence[int], other: Sequence[int]) -> np.ndarray:
    """For each token of the first reading, given as ends, that of the other; its first one where it has read nothing.

    >>> matched([2, 3, 5], [1, 3, 4, 9]).tolist()
    [0, 1, 2]
    """
    return np.maximum(np.searchsorted(other, first, side="right") - 1, 0)


class ParallelTexts(Data):
    """Texts for a model and beside it for others of other vocabularies: in one batch, row by row the same texts."""

    kind = "texts"
    classes = None

    def __init__(self, data: Data, others: Mapping[int, Checkpoint], pending: PendingTexts) -> None:
        """`others`: by their places among the models. `pending` may be shared by several data sets."""
        super().__init__()
        self._data, self._others, self._pending = data, others, pending
        self.name, self.size, self.limit, self.notes, self.stamps = (
            data.name, data.size, data.limit, data.notes, data.stamps
        )  # fmt: skip

    @property
    def sha256(self) -> str:
        return self._data.sha256

    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        encoder, texts = self._data.as_texts(checkpoint)
        encoders = {who: Encoder.of(other, None, None) for who, other in self._others.items()}
        task = wanted.task or task_of(checkpoint.config)
        alone = task == "sequence" and not all(one.can_pad for one in [encoder, *encoders.values()])
        for group in wanted.order(len(texts)):
            for some in [[n] for n in group] if alone else [group]:
                batch = self._batch(encoder, encoders, [texts[int(n)] for n in some], task)
                yield {name: tensor.to(wanted.device) for name, tensor in batch.items()}

    def _batch(
        self, encoder: Encoder, encoders: Mapping[int, Encoder], texts: Sequence[str], task: str | None
    ) -> Batch:
        own = [TokenReading.of(encoder, text) for text in texts]
        others = {who: [TokenReading.of(one, text) for text in texts] for who, one in encoders.items()}
        for number, text in enumerate(texts):  # nobody is asked for what one has not read
            seen = min(readings[number].read(text) for readings in others.values())
            kept = [at for at, end in enumerate(own[number].ends) if end <= seen or end > len(text.encode())] or [0]
            own[number] = TokenReading([own[number].ids[at] for at in kept], [own[number].ends[at] for at in kept])
        batch = collate([Encoded(one.ids, [0] * len(one.ids)) for one in own], encoder, task)
        length = batch["input_ids"].shape[1]
        batch[part(BYTES, 0)] = _bytes(own, texts)
        for who, readings in others.items():
            tokens = collate([Encoded(one.ids, [0] * len(one.ids)) for one in readings], encoders[who], task)
            batch |= {part(name, who): tensor for name, tensor in tokens.items()}
            batch[part(BYTES, who)] = _bytes(readings, texts)
            places, pending = np.zeros((2, len(texts), length), int)
            for row, (mine, its, text) in enumerate(zip(own, readings, texts, strict=True)):
                at = matched(mine.ends, its.ends)
                places[row, : len(at)] = at
                pending[row, : len(at)] = self._left(text.encode(), mine.ends, [its.ends[k] for k in at])
            batch |= {part(PLACES, who): torch.from_numpy(places), part(PENDING, who): torch.from_numpy(pending)}
        return batch

    def _left(self, text: bytes, ends: Sequence[int], read: Sequence[int]) -> list[int]:
        return [
            0 if end == known else self._pending.number(text[known:end]) if known < end <= len(text) else UNKNOWN
            for end, known in zip(ends, read, strict=True)
        ]


def _bytes(readings: Sequence[TokenReading], texts: Sequence[str]) -> torch.Tensor:
    """How many bytes of each text a language model predicts: all that it reads but its first token."""
    counts = [one.read(text) - min(one.ends[0], one.read(text)) for one, text in zip(readings, texts, strict=True)]
    return torch.tensor(counts)
