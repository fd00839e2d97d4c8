"""What a recipe says about tokens, put to the code that merges vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.local import FileCheckpoint
from isomerge.checkpoint.side_files import is_weight, side_files_of
from isomerge.choices import ROWS
from isomerge.errors import NotFoundError, RequestError, near_miss
from isomerge.merging.data_methods import ALL_METHODS, DATA_METHODS
from isomerge.merging.plan.models import open_model
from isomerge.merging.plan.tensor_plan import RecipePlan
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.recipe.definitions import TokenSettings
from isomerge.merging.recipe_data import measures_of
from isomerge.merging.vocabulary.files import other_ids
from isomerge.merging.vocabulary.merging import merge_vocabularies
from isomerge.merging.vocabulary.rules import TokenRule, TokenSource
from isomerge.merging.vocabulary.vocabulary import Vocabulary

"""What flags say to merge vocabulary tables row by row, whatever the tokens: a recipe without a tokenizer."""


def require_same_ids(document: Recipe, models: Sequence[Checkpoint]) -> None:
    """Refuse to merge rows of different tokens. A recipe may want just that, as mergekit does; flags have to say so."""
    method = ALL_METHODS[document.merge_method]
    matches = getattr(method, "any_depth", False) or getattr(method, "parts", False)
    moved = other_ids(models) if document.tokenizer is None and not matches else []
    if not moved:
        return
    if document.merge_method in DATA_METHODS or document.repair is not None or measures_of(document):
        what, keys = "This merge runs all models on the same tokens, so merge models of one tokenizer", []
    else:
        what, keys = (
            (
                "Name the tokenizer of the result, and tokens are matched by their text: 'union' keeps those of all "
                "models, 'base' or a model's name those of that model"
            ),
            ["tokenizer"],
        )
    raise RequestError(
        f"Merging: {'; '.join(moved)}, so their rows would be merged with those of other tokens. {what}; "
        f"or merge row by row with tokenizer '{ROWS}'.",
        keys=keys,
    )


def merged_vocabulary(document: Recipe, models: Mapping[ModelReference, Checkpoint], plan: RecipePlan) -> Vocabulary:
    settings = document.tokenizer
    assert settings is not None
    known = {str(reference): checkpoint for reference, checkpoint in models.items()}
    spelled = {reference: str(reference) for reference in models}

    def name_of(model: ModelReference) -> str:
        """As it is known above: another way to write its folder is still the same model."""
        return spelled.get(model, str(model))

    source = name_of(settings.source) if isinstance(settings.source, ModelReference) else settings.source
    rules = {token: _rule(rule, name_of) for token, rule in (settings.tokens or {}).items()}
    rows = _table_lengths(plan, models, name_of)
    _require_tables(document, rules, rows)
    if source not in known and source not in ("union", "base"):  # a tokenizer may come from a model that is not merged
        try:
            known[source] = _tokenizer_alone(ModelReference.parse(source))
        except NotFoundError as error:
            hint = near_miss(source, ("union", "base"))
            words = f"tokenizer: '{source}' is neither 'union', 'base' nor a model that is there"
            raise RequestError(f"While merging vocabularies: {words}. {hint or error}", keys=("tokenizer",)) from error
    return merge_vocabularies(
        known,
        source=source,
        base=str(document.base_model) if document.base_model else None,
        rules=rules,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        rows=rows,
    )


def _tokenizer_alone(reference: ModelReference) -> Checkpoint:
    """A model whose tokenizer is wanted and nothing else: its weights need not be there."""
    folder = Path(reference.path).expanduser()
    if not folder.is_dir() or any(is_weight(path.name) for path in folder.iterdir()):
        return open_model(reference)
    return FileCheckpoint(str(reference), {}, config={}, folder=folder, side_files=lambda: side_files_of(folder))


def _require_tables(document: Recipe, rules: Mapping[str, TokenRule], tables: Mapping[str, int]) -> None:
    """Refuse rules that take rows of a model of which no table is read, such as the base of a method that has none."""
    wanted = {token: rule.source.model for token, rule in rules.items() if rule.source and rule.source.model}
    absent = {token: model for token, model in wanted.items() if model not in tables}
    if not absent:
        return
    told = "; ".join(f"token {token!r} is to take its row from {model}" for token, model in absent.items())
    cause = "whose tables are no part of this merge"
    if set(absent.values()) == {str(document.base_model)} and ALL_METHODS[document.merge_method].base == "ignored":
        cause = f"of which only the config and side files are used, since {document.merge_method} has no base"
    raise RequestError(
        f"While merging vocabularies: {told}, {cause}. List it under models, with weight 0 if it is to give nothing "
        f"but rows, or name a model that is merged: {name_some(list(tables))}."
    )


def _table_lengths(
    plan: RecipePlan, models: Mapping[ModelReference, Checkpoint], name_of: Callable[[ModelReference], str]
) -> dict[str, int]:
    """How many rows each model's tables have, from the tables: a config may say something else."""
    lengths: dict[str, int] = {}
    for tensor in plan.tensors.values():
        for given in tensor.every if tensor.vocabulary else []:
            shape = models[given.model].tensors[given.tensor].shape
            if len(shape) == 2 and shape[0] > 1:
                lengths.setdefault(name_of(given.model), shape[0])
    return lengths


def _rule(given: TokenSettings, name_of: Callable[[ModelReference], str]) -> TokenRule:
    source = given.source
    if source is None:
        return TokenRule(None, given.force)
    if isinstance(source, ModelReference):
        return TokenRule(TokenSource("model", name_of(source)), given.force)
    if source.kind == "zero":
        return TokenRule(TokenSource("zero"), given.force)
    return TokenRule(TokenSource("model_token", name_of(source.model), source.token, source.token_id), given.force)
