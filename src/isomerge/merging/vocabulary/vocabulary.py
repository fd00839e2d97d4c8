"""The merged vocabulary: its tokens, its tables' rows, its files and what it changes in config.json."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.vocabulary.files import read_json, tokenizer_files
from isomerge.merging.vocabulary.renumber import TokenIds, config_changes, generation_changes
from isomerge.merging.vocabulary.report import count
from isomerge.merging.vocabulary.rules import ModelTokens, TokenRule
from isomerge.merging.vocabulary.tables import VocabularyTable
from isomerge.merging.vocabulary.tokenizers import save_tokenizer


class Vocabulary:
    """Made by `merge_vocabularies`."""

    size: int
    """Rows of the output's tables, with padding."""
    tokens: dict[str, int]
    """Token string → id in the output, by id."""
    identical: bool
    """All models share these tokens at these ids, in tables of this size, and no rule overrides a row: every table can
    be merged as it is stored."""
    report: dict[str, Any]
    """Counts for the record."""

    def __init__(
        self,
        *,
        models: Mapping[str, Checkpoint],
        vocabularies: Mapping[str, ModelTokens],
        tokenizer: Any,
        tokenizer_changed: bool,
        source: str,
        base: str | None,
        donor: str,
        joined: list[str],
        rules: Mapping[str, TokenRule],
        pad_to_multiple_of: int | None,
    ) -> None:
        self._models, self._vocabularies, self._rules = models, vocabularies, rules
        self._tokenizer, self._tokenizer_changed = tokenizer, tokenizer_changed
        self._base, self._donor = base, donor
        self.tokens = {token: id for id, token in sorted((id, token) for token, id in tokenizer.get_vocab().items())}
        ends = max(self.tokens.values()) + 1
        self.size = _rounded_up(ends, pad_to_multiple_of)
        lengths = {vocabulary.rows for vocabulary in vocabularies.values()}
        same_ids = all(vocabulary.with_row == self.tokens for vocabulary in vocabularies.values())
        # Rows beyond the tokens that all models have alike are theirs to keep: nothing here asks for a shorter table.
        self._keeps_rows = same_ids and len(lengths) == 1 and (not pad_to_multiple_of or lengths == {self.size})
        if self._keeps_rows:
            (self.size,) = lengths
        self.identical = self._keeps_rows and not any(rule.force for rule in rules.values())

        self._blank = torch.full((self.size,), not self._keeps_rows)
        self._blank[list(self.tokens.values())] = False
        self._rows = {name: self._rows_of(vocabulary) for name, vocabulary in vocabularies.items()}
        self._givers: dict[tuple[str, ...], Tensor] = {}
        self.report = count(
            self.tokens,
            vocabularies,
            rules,
            source=source,
            base=base,
            donor=donor,
            joined=joined,
            size=self.size,
            keeps_rows=self._keeps_rows,
        )

    def source(self, model: str, tensor_sources: Mapping[str, TensorSource], *, axis: int = 0) -> TensorSource:
        """One model's table (embedding, output head, its bias) in the output's vocabulary.

        `tensor_sources` is the same tensor of every model that has it: a row that `model` lacks comes from the others.
        `axis` is where the vocabulary lies: 0, but 1 in a bias of shape (1, vocabulary).
        """
        names = list(tensor_sources)
        label = getattr(tensor_sources[model], "label", f"a vocabulary tensor of {self._models[model].name}")
        self._require_matching(label, tensor_sources, axis)
        rows, others = self._rows[model], self._others(names, label)
        forced = [self.tokens[token] for token, rule in self._rules.items() if rule.force]
        if forced:
            rows = rows.index_fill(0, torch.tensor(forced), -1)
        for name, needed in [(model, rows), *zip(names, others, strict=True)]:
            length = tensor_sources[name].info.shape[axis]
            if int(needed.max()) >= length:
                raise CheckpointError(
                    f"While merging {label}: row {int(needed.max())} of '{name}' is needed, but its table has {length} "
                    f"rows where its config.json promises {self._vocabularies[name].rows}. Correct vocab_size there."
                )
        given = [tensor_sources[name] for name in names]
        return VocabularyTable(given, names.index(model), rows, others, self._blank, axis=axis)

    def save(self, folder: Path) -> list[Path]:
        """Write the tokenizer, chat template included: the donor's own files where nothing about it changed."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._tokenizer_changed:
            return save_tokenizer(self._tokenizer, folder)
        written = []
        for name, path in sorted(tokenizer_files(self._models[self._donor]).items()):
            written.append(folder / name)
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, written[-1])
        return written

    def config_changes(self) -> dict[str, Any]:
        """What to change in config.json (the base's, or the first model's): vocab_size and the ids of special tokens.
        A nested part with a change comes whole."""
        return {} if self._keeps_rows else config_changes(self._config_donor.config, self._ids, self.size)

    def generation_config_changes(self) -> dict[str, Any]:
        """The same for generation_config.json, whose ids would name other tokens."""
        files = {path.name: path for path in self._config_donor.side_files()}
        path = files.get("generation_config.json")
        return generation_changes(read_json(path), self._ids) if path and not self._keeps_rows else {}

    @property
    def _config_name(self) -> str:
        return self._base if self._base is not None else next(iter(self._models))

    @property
    def _config_donor(self) -> Checkpoint:
        return self._models[self._config_name]

    @property
    def _ids(self) -> TokenIds:
        roles = {
            role: self.tokens[token]
            for role, token in self._tokenizer.special_tokens_map.items()
            if isinstance(token, str) and token in self.tokens
        }
        old = self._vocabularies[self._config_name].tokens or {}
        return TokenIds({id: token for token, id in old.items()}, self.tokens, roles)

    def _rows_of(self, vocabulary: ModelTokens) -> Tensor:
        """(size,) the model's row of every output row, −1 where it has none."""
        if self._keeps_rows:
            return torch.arange(self.size)
        rows = [vocabulary.row(token) for token in self.tokens]
        own_rows = torch.full((self.size,), -1, dtype=torch.int64)
        own_rows[list(self.tokens.values())] = torch.tensor([-1 if row is None else row for row in rows])
        return own_rows

    def _others(self, names: list[str], label: str) -> Tensor:
        """(models, size) who gives a row to a model that lacks it: the base, else all that have it; or as a rule says.
        Kept for the next table: one large vocabulary takes megabytes here."""
        known = self._givers.get(tuple(names))
        if known is not None:
            return known
        give = torch.stack([self._rows[name] for name in names])
        if self._base in names:
            place = names.index(self._base)
            held = give[place] >= 0
            others = [i for i in range(len(names)) if i != place]
            for i in others:
                give[i, held] = -1
        for token, rule in self._rules.items():
            id, source = self.tokens[token], rule.source
            if source is None:
                continue
            give[:, id] = -1
            if source.model is None or source.kind == "zero":
                continue
            if source.model not in names:
                raise RequestError(
                    f"While merging {label}: token {token!r} is to come from '{source.model}', which has no such "
                    "tensor. Name a model that has it."
                )
            give[names.index(source.model), id] = self._given_row(token, rule)
        self._givers[tuple(names)] = give
        return give

    def _given_row(self, token: str, rule: TokenRule) -> int:
        source = rule.source
        assert source is not None and source.model is not None
        if source.token_id is not None:
            return source.token_id
        row = self._vocabularies[source.model].row(source.token if source.token is not None else token)
        assert row is not None, token  # `rule_problems` has made sure
        return row

    def _require_matching(self, label: str, sources: Mapping[str, TensorSource], axis: int) -> None:
        shapes = {name: source.info.shape for name, source in sources.items()}
        if len({shape[:axis] + shape[axis + 1 :] for shape in shapes.values()}) > 1:
            told = ", ".join(f"'{name}' {tuple(shape)}" for name, shape in shapes.items())
            raise RequestError(
                f"While merging {label}: beside the vocabulary the shapes have to be the same, and they are {told}. "
                "Merge models of one width."
            )


def _rounded_up(size: int, multiple: int | None) -> int:
    """
    >>> _rounded_up(100, 64), _rounded_up(128, 64), _rounded_up(100, None)
    (128, 128, 100)
    """
    return -(-size // multiple) * multiple if multiple else size
