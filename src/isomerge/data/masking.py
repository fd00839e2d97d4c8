"""Which tokens a masked language model must guess: drawn per example, so that batches and order change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isomerge.errors import RequestError

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
