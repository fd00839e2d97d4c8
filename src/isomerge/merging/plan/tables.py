"""Tables of different length, merged row by row: the rows that all models have, then the others of the longest.

Row i of a table of positions is position i in every model. Row i of a vocabulary table is the token with id i, which is
the same one in all models only if their tokenizers agree.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.data.tokenizer import POSITIONS
from isomerge.merging.plan.model_parts import VISION, values_of
from isomerge.merging.plan.tensor_plan import TensorInput
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.vocabulary.files import other_tokens

POSITION_TABLE = re.compile(r"(^|[._])(position_embeddings?|embed_positions|wpe|pos_embed(dings?)?)\.weight$")
WORDS = ("vocab_size",)


def counts_positions(tables: Sequence[tuple[Checkpoint, str]]) -> bool:
    """Whether row i of each is position i: tables as long as config.json says, up to one constant (OPT has two rows
    more). The patches of images lie on a grid, and of bare weights nothing is known."""
    beyond = set()
    for checkpoint, name in tables:
        stated = next(values_of(checkpoint.config, POSITIONS), None)
        if stated is None or not POSITION_TABLE.search(name) or VISION.search(name):
            return False
        beyond.add(checkpoint.tensors[name].shape[0] - stated)
    return len(beyond) == 1


class UnequalTables:
    """The tables of one plan that differ in length: whose rows go beyond the common part, and what that changes."""

    def __init__(self) -> None:
        self.tokens_of: ModelReference | None = None
        """The model with the longest vocabulary tables."""
        self._lengths: dict[tuple[tuple[ModelReference, int], ...], list[str]] = defaultdict(list)
        self._other_tokens: dict[tuple[tuple[str, ...], int], list[str]] = {}

    def why_not(self, tables: Mapping[TensorInput, Checkpoint], vocabulary: bool) -> str | None:
        """Why their rows must not be merged in their order; None where they can be."""
        if not vocabulary:
            return None if counts_positions([(c, given.tensor) for given, c in tables.items()]) else ""
        common = min(checkpoint.tensors[given.tensor].shape[0] for given, checkpoint in tables.items())
        key = (tuple(checkpoint.name for checkpoint in tables.values()), common)
        if key not in self._other_tokens:
            self._other_tokens[key] = other_tokens(list(tables.values()), common)
        return "; ".join(self._other_tokens[key]) or None

    def add(
        self, name: str, tables: Mapping[TensorInput, Checkpoint], vocabulary: bool, config: Mapping[str, Any]
    ) -> tuple[TensorInput, dict[str, Any]]:
        """The longest table, and what config.json has to say for its length. Of equally long ones the first counts."""
        rows = {given: checkpoint.tensors[given.tensor].shape[0] for given, checkpoint in tables.items()}
        longest = max(rows, key=rows.__getitem__)
        self._lengths[tuple((given.model, count) for given, count in rows.items())].append(name)
        if vocabulary:
            self.tokens_of = longest.model
        return longest, _lengths_of(tables[longest].config, config, WORDS if vocabulary else POSITIONS)

    def notes(self) -> list[str]:
        said = []
        for lengths, names in self._lengths.items():
            rows = dict(lengths)
            owner = max(rows, key=rows.__getitem__)
            told = ", ".join(f"{count} in {model}" for model, count in rows.items())
            said.append(
                f"tables of different length ({name_some(names, 3)}; rows: {told}): the first {min(rows.values())} "
                f"rows are merged, and the others are those of {owner}, unmerged"
            )
        return said


def _lengths_of(longest: Mapping[str, Any], donor: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The entries among `keys` that the donor's config.json takes over from that of the longest table."""

    def changed(own: Any, theirs: Any) -> dict[str, Any]:
        if not isinstance(own, Mapping) or not isinstance(theirs, Mapping):
            return {}
        return {key: theirs[key] for key in keys if key in own and theirs.get(key, own[key]) != own[key]}

    changes = changed(donor, longest)
    if nested := changed(donor.get("text_config"), longest.get("text_config")):
        changes["text_config"] = {**donor["text_config"], **nested}
    return changes
