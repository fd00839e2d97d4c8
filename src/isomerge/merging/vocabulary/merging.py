"""Several vocabularies into one: which tokens the output has, at which ids, and which rows of which model fill them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isomerge.checkpoint.base import Checkpoint, failure
from isomerge.errors import RequestError
from isomerge.merging.vocabulary.files import has_tokenizer
from isomerge.merging.vocabulary.rules import ModelTokens, TokenRule, request_problems, rule_problems
from isomerge.merging.vocabulary.tokenizers import (
    add_union,
    drop_tokens,
    load_tokenizer,
    no_tokenizer,
    restore_specials,
    table_rows,
    tokens_of,
)
from isomerge.merging.vocabulary.vocabulary import Vocabulary

NEXT_STEP = "Change tokenizer accordingly."


def merge_vocabularies(
    models: Mapping[str, Checkpoint],
    *,
    source: str = "union",
    base: str | None = None,
    rules: Mapping[str, TokenRule] | None = None,
    pad_to_multiple_of: int | None = None,
    rows: Mapping[str, int] | None = None,
) -> Vocabulary:
    """One vocabulary for all models, matched by token strings.

    `source`: "union" (the base's tokenizer and what the others have beside it), "base", or a key of `models`, whose
    tokenizer is taken as it is. Without a `base`, the first model is meant. Tokens that only `rules` name are appended.
    `rows` says how long a model's tables are where that is known better than from its config.json.
    """
    rules = rules or {}
    act = "merging vocabularies"
    problems = request_problems(
        list(models), source=source, base=base, rules=rules, pad_to_multiple_of=pad_to_multiple_of
    )
    next_step = NEXT_STEP if problems else ""
    problems.extend(no_tokenizer(c.name) for c in models.values() if not has_tokenizer(c))
    if problems:
        raise RequestError(str(failure(act, problems, next_step)).rstrip(), keys=("tokenizer",))

    loaded: dict[str, tuple[Any, ModelTokens]] = {}
    for name, checkpoint in models.items():
        tokenizer = load_tokenizer(checkpoint)
        length = (rows or {}).get(name) or table_rows(checkpoint, tokenizer)
        loaded[name] = (tokenizer, tokens_of(tokenizer, length))
    vocabularies = {name: vocabulary for name, (_, vocabulary) in loaded.items()}
    problems = rule_problems(rules, vocabularies)
    if problems:
        raise RequestError(str(failure(act, problems, NEXT_STEP)), keys=("tokenizer",))

    first = base if base is not None else next(iter(models))
    donor = source if source in models else first
    original, vocabulary = loaded[donor]
    before = (dict(vocabulary.tokens or {}), dict(original.added_tokens_decoder))
    tokenizer = drop_tokens(original, vocabulary.without_row, models[donor].name)
    joined: list[str] = []
    if source == "union":
        ordered = {name: loaded[name] for name in [first, *(other for other in models if other != first)]}
        joined = add_union(tokenizer, donor, ordered)
    known = tokenizer.get_vocab()
    new = [token for token in rules if token not in known]
    tokenizer.add_tokens(new)
    restore_specials(tokenizer, original)
    return Vocabulary(
        models=models,
        vocabularies=vocabularies,
        tokenizer=tokenizer,
        tokenizer_changed=before != (tokenizer.get_vocab(), dict(tokenizer.added_tokens_decoder)),
        source=source,
        base=base,
        donor=donor,
        joined=joined,
        rules=rules,
        pad_to_multiple_of=pad_to_multiple_of,
    )
