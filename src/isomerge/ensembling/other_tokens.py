"""A language model with another vocabulary in an ensemble: it reads the text in its own tokens, and what it predicts is
carried to the tokens of the first model, as `isomerge.merging.layerwise.token_matching` explains.

The text is what the first model's tokens decode to, so the two read the same up to the last token of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.data.encode import Encoded, Encoder, collate
from isomerge.data.parallel import PendingTexts, TokenReading, matched
from isomerge.ensembling.members import home_of
from isomerge.evaluation.tasks import logits_of
from isomerge.merging.layerwise.token_matching import TokenMatch, find_matches
from isomerge.running.stock import StockModel

BROKEN = "\ufffd"
"""What half a character decodes to."""


@dataclass(frozen=True)
class OtherVocabulary:
    """A member of another vocabulary, beside the first."""

    member: StockModel
    match: TokenMatch
    own: Encoder
    first: Encoder

    def logits(self, ids: Tensor, mask: Tensor | None, first: Tensor) -> Tensor:
        """What it predicts after each token of the first model's batch, as log-probabilities of its tokens.

        `first` are the first model's own logits: within tokens that the member cannot tell apart, they decide.
        """
        kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        texts, readings = [], []
        for row, valid in zip(ids.tolist(), kept.tolist(), strict=True):
            text, reading = self.read([id for id, real in zip(row, valid, strict=True) if real])
            texts.append(text)
            readings.append(reading)
        theirs = [TokenReading.of(self.own, text) for text in texts]
        batch = collate([Encoded(one.ids) for one in theirs], self.own, "causal-lm")
        batch = {name: value.to(home_of(self.member)) for name, value in batch.items()}
        said = logits_of(self.member.run(batch)).to(first.device)
        found = first.log_softmax(-1)
        for row, (text, mine, its) in enumerate(zip(texts, readings, theirs, strict=True)):
            at = matched(mine.ends, its.ends)
            left = [self._left(text.encode(), end, its.ends[k]) for end, k in zip(mine.ends, at, strict=True)]
            pending = torch.tensor(left, device=first.device)
            before = found[row, kept[row]].exp()
            carried = self.match.carried(said[row, torch.from_numpy(at)].softmax(-1), before, pending)
            found[row, kept[row]] = carried.log()
        return found

    def read(self, ids: Sequence[int]) -> tuple[str, TokenReading]:
        """The text of the first model's tokens, and the byte of it at which each ends."""
        text = self._decoded(ids).rstrip(BROKEN)
        reading = TokenReading.of(self.first, text)
        if reading.ids == list(ids):
            return text, reading
        # Its tokenizer would cut this text otherwise, as it may for text that a model has written.
        whole = text.encode()
        ends = []
        for count in range(1, len(ids) + 1):
            begun = self._decoded(ids[:count])
            known = whole.startswith(begun.encode())
            ends.append(len(begun.encode()) if known else len(whole) + 1)
        return text, TokenReading(list(ids), ends)

    def _decoded(self, ids: Sequence[int]) -> str:
        decoded: str = self.first.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return decoded

    def _left(self, text: bytes, end: int, read: int) -> int:
        """The number of the text that the first model has read and this one has not."""
        pending: PendingTexts = self.match.pending
        if end == read:
            return 0
        return pending.number(text[read:end]) if read < end <= len(text) else -1


def other_vocabularies(members: Sequence[StockModel], tokenizer: Any = None) -> dict[int, OtherVocabulary]:
    """The members whose vocabulary is not that of the first, by place."""
    matches = find_matches([one.checkpoint for one in members])
    if not matches:
        return {}
    first = Encoder.of(members[0].checkpoint, tokenizer, None)
    return {
        place: OtherVocabulary(members[place], match, Encoder.of(members[place].checkpoint, None, None), first)
        for place, match in matches.items()
    }
