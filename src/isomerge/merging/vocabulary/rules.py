"""Per-token rules: where the row of one token comes from, and what can be wrong with such a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isomerge.errors import did_you_mean, near_miss


@dataclass(frozen=True)
class TokenSource:
    """`model`: that model's row of the same token. `zero`: zeros. `model_token`: that model's row of `token` or
    `token_id`."""

    kind: Literal["model", "zero", "model_token"]
    model: str | None = None
    token: str | None = None
    token_id: int | None = None


@dataclass(frozen=True)
class TokenRule:
    """`source` serves the models that lack the token (None: the general rule); with `force`, all models."""

    source: TokenSource | None
    force: bool = False


@dataclass(frozen=True)
class ModelTokens:
    """One model's vocabulary beside its table."""

    tokens: Mapping[str, int] | None
    """Token string → id, as the tokenizer says; None where the files alone cannot tell."""
    rows: int
    """How many rows the model's vocabulary tables have."""

    def row(self, token: str) -> int | None:
        """The token's row; None when the tokenizer does not know it or the table ends before it."""
        row = (self.tokens or {}).get(token)
        return row if row is not None and row < self.rows else None

    @property
    def with_row(self) -> dict[str, int]:
        """By id: a tokenizer hands its tokens out in a random order."""
        known = ((id, token) for token, id in (self.tokens or {}).items() if id < self.rows)
        return {token: id for id, token in sorted(known)}

    @property
    def without_row(self) -> list[str]:
        """Tokens the model could never look up: their ids lie beyond its table."""
        return [token for id, token in sorted((id, t) for t, id in (self.tokens or {}).items()) if id >= self.rows]


def request_problems(
    models: Sequence[str],
    *,
    source: str,
    base: str | None,
    rules: Mapping[str, TokenRule],
    pad_to_multiple_of: int | None,
) -> list[str]:
    """What is wrong with the request whatever the vocabularies hold."""
    problems = []
    if base is not None and base not in models:
        problems.append(f"the base model '{base}' is not among the models. {did_you_mean(base, models)}")
    if source not in ("union", "base", *models):
        problems.append(
            f"the tokenizer's source '{source}' is unknown. {did_you_mean(source, ['union', 'base', *models])}"
        )
    if pad_to_multiple_of is not None and pad_to_multiple_of < 0:
        problems.append(f"pad_to_multiple_of is {pad_to_multiple_of}; it has to be a positive number")
    for token, rule in rules.items():
        given = rule.source
        if given is None or given.kind == "zero":
            continue
        if given.model not in models:
            problems.append(
                f"token {token!r} is to come from '{given.model}', which is not among the models. "
                f"{did_you_mean(str(given.model), models)}"
            )
        if given.kind == "model_token" and (given.token is None) == (given.token_id is None):
            problems.append(f"token {token!r}: a source of kind model_token names either a token or a token_id")
    return problems


def rule_problems(rules: Mapping[str, TokenRule], vocabularies: Mapping[str, ModelTokens]) -> list[str]:
    """Rules that ask for a row nobody has. A vocabulary that is not known gives no problem here."""
    problems = []
    for token, rule in rules.items():
        if rule.source is None:
            if all(v.tokens is not None and v.row(token) is None for v in vocabularies.values()):
                problems.append(f"token {token!r} is in no model, so its rule has to name a source")
            continue
        vocabulary = vocabularies.get(rule.source.model or "")
        if vocabulary is not None:
            problems.extend(_source_problems(token, rule.source, vocabulary))
    return problems


def _source_problems(token: str, source: TokenSource, vocabulary: ModelTokens) -> list[str]:
    if source.token_id is not None:
        if 0 <= source.token_id < vocabulary.rows:
            return []
        return [
            f"token {token!r} is to take row {source.token_id} of '{source.model}', whose table has "
            f"{vocabulary.rows} rows, 0 to {vocabulary.rows - 1}"
        ]
    wanted = token if source.kind == "model" else source.token
    if wanted is None or vocabulary.tokens is None or vocabulary.row(wanted) is not None:
        return []
    if wanted in vocabulary.tokens:
        cause = f"whose table ends before it (id {vocabulary.tokens[wanted]} of {vocabulary.rows} rows)"
    else:
        cause = f"whose tokenizer does not know it. {near_miss(wanted, list(vocabulary.tokens))}".rstrip()
    return [f"token {token!r} is to take the row of {wanted!r} in '{source.model}', {cause}"]
