"""Several vocabularies into one: which tokens the output has, at which ids, and which rows of which model fill them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isomerge.checkpoint.base import Checkpoint, failure
from isomerge.errors import RequestError
from isomerge.merging.vocabulary.files import declared_rows, has_tokenizer, tokens_in_files
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

NEXT_STEP = "Change the recipe's tokenizer block, or --tokenizer, accordingly."


def vocabulary_problems(
    models: Mapping[str, Checkpoint],
    *,
    source: str = "union",
    base: str | None = None,
    rules: Mapping[str, TokenRule] | None = None,
    pad_to_multiple_of: int | None = None,
) -> list[str]:
    """Everything that can be seen to be wrong from files alone, before anything is loaded.

    A vocabulary kept only in a binary file (tokenizer.model) is not looked into here; `merge_vocabularies` checks again
    with the loaded tokenizers.
    """
    rules = rules or {}
    problems = request_problems(
        list(models), source=source, base=base, rules=rules, pad_to_multiple_of=pad_to_multiple_of
    )
    vocabularies = {}
    for name, checkpoint in models.items():
        if not has_tokenizer(checkpoint):
            problems.append(no_tokenizer(checkpoint.name))
        tokens = tokens_in_files(checkpoint)
        rows = declared_rows(checkpoint.config)
        if rows is None and tokens is not None:
            rows = max(tokens.values(), default=-1) + 1
        if rows is not None:
            vocabularies[name] = ModelTokens(tokens, rows)
    return problems + rule_problems(rules, vocabularies)


def merge_vocabularies(
    models: Mapping[str, Checkpoint],
    *,
    source: str = "union",
    base: str | None = None,
    rules: Mapping[str, TokenRule] | None = None,
    pad_to_multiple_of: int | None = None,
    rows: Mapping[str, int] | None = None,
    trust_remote_code: bool = False,
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
        raise RequestError(str(failure(act, problems, next_step)).rstrip())

    loaded: dict[str, tuple[Any, ModelTokens]] = {}
    for name, checkpoint in models.items():
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
        length = (rows or {}).get(name) or table_rows(checkpoint, tokenizer, trust_remote_code=trust_remote_code)
        loaded[name] = (tokenizer, tokens_of(tokenizer, length))
    vocabularies = {name: vocabulary for name, (_, vocabulary) in loaded.items()}
    problems = rule_problems(rules, vocabularies)
    if problems:
        raise RequestError(str(failure(act, problems, NEXT_STEP)))

    first = base if base is not None else next(iter(models))
    donor = source if source in models else first
    original, vocabulary = loaded[donor]
    before = (dict(vocabulary.tokens or {}), dict(original.added_tokens_decoder))
    tokenizer = drop_tokens(original, vocabulary.without_row, models[donor].name, trust_remote_code=trust_remote_code)
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
