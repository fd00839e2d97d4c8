"""What a recipe says about tokens, put to the code that merges vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from isomerge.checkpoint import Checkpoint
from isomerge.merge.opening import open_model
from isomerge.merge.recipe import ModelReference, Recipe, RecipePlan

if TYPE_CHECKING:
    from isomerge.merge.recipe.definitions import TokenSettings
    from isomerge.merge.vocabulary import TokenRule, Vocabulary


def merged_vocabulary(document: Recipe, models: Mapping[ModelReference, Checkpoint], plan: RecipePlan) -> Vocabulary:
    from isomerge.merge.vocabulary import merge_vocabularies

    settings = document.tokenizer
    assert settings is not None
    known = {str(reference): checkpoint for reference, checkpoint in models.items()}
    spelled = {reference: str(reference) for reference in models}

    def name_of(model: ModelReference) -> str:
        """As it is known above: another way to write its folder is still the same model."""
        return spelled.get(model, str(model))

    source = name_of(settings.source) if isinstance(settings.source, ModelReference) else settings.source
    rules = {token: _rule(rule, name_of) for token, rule in (settings.tokens or {}).items()}
    wanted = [source, *(rule.source.model for rule in rules.values() if rule.source and rule.source.model)]
    for name in wanted:  # a tokenizer may come from a model that is not merged
        if name not in known and name not in ("union", "base"):
            known[name] = open_model(ModelReference.parse(name))
    return merge_vocabularies(
        known,
        source=source,
        base=str(document.base_model) if document.base_model else None,
        rules=rules,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        rows=_table_lengths(plan, models),
    )


def _table_lengths(plan: RecipePlan, models: Mapping[ModelReference, Checkpoint]) -> dict[str, int]:
    """How many rows each model's tables have, from the tables: a config may say something else."""
    found: dict[str, int] = {}
    for tensor in plan.tensors.values():
        for given in [*tensor.inputs, *([tensor.base] if tensor.base else [])] if tensor.vocabulary else []:
            shape = models[given.model].tensors[given.tensor].shape
            if len(shape) == 2 and shape[0] > 1:
                found.setdefault(str(given.model), shape[0])
    return found


def _rule(given: TokenSettings, name_of: Callable[[ModelReference], str]) -> TokenRule:
    from isomerge.merge.vocabulary import TokenRule, TokenSource

    source = given.source
    if source is None:
        return TokenRule(None, given.force)
    if isinstance(source, ModelReference):
        return TokenRule(TokenSource("model", name_of(source)), given.force)
    if source.kind == "zero":
        return TokenRule(TokenSource("zero"), given.force)
    return TokenRule(TokenSource("model_token", name_of(source.model), source.token, source.token_id), given.force)
