"""Which tokens of the new vocabulary the model knows, and of which pieces the others consist."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.data.parallel import PendingTexts
from isomerge.data.tokenizer import tokenizer_for
from isomerge.errors import RequestError
from isomerge.merging.layerwise.token_matching import TokenMatch, TokenTexts


@dataclass(frozen=True)
class NewTokens:
    """The new vocabulary in terms of the old one."""

    size: int
    """Rows of the new tables."""
    kept: dict[int, int]
    """New id -> old id, of tokens that both have: the same text, name or role."""
    pieces: dict[int, list[int]]
    """New id -> old ids that make up its text, of all others; nothing where the old tokenizer cannot write it."""

    @property
    def blank(self) -> Tensor:
        """Rows of the new tables without a token."""
        found = torch.ones(self.size, dtype=torch.bool)
        found[list(self.kept) + list(self.pieces)] = False
        return found


def new_tokens(model: Checkpoint, donor: Checkpoint, rows: int, donor_rows: int, size: int) -> NewTokens:
    """`rows` of the model's table, `donor_rows` of the donor's, and `size` rows of the new one."""
    old = TokenTexts(model, tokenizer_for(model), rows)
    new = TokenTexts(donor, tokenizer_for(donor), min(donor_rows, size))
    match = TokenMatch(new, old, model.name, PendingTexts())
    kept, pieces = {}, {}
    for id in new.names:
        like = match.like(id)
        if like is not None:
            kept[id] = like
        else:
            pieces[id] = match.pieces[id]
    if not kept:
        raise RequestError(
            f"Transplanting: the tokenizers of {model.name} and {donor.name} have no token in common, so nothing says "
            "how one vocabulary is written in the other. Take a donor whose tokens overlap.",
            keys=("tokenizer",),
        )
    return NewTokens(size, kept, pieces)
