"""The models of a recipe: opened by their headers, and what these and side files say against merging them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.adapters.adapter import CONFIG, has_adapter_beside, holds_adapter, is_adapter
from isomerge.adapters.applied import apply_adapter
from isomerge.adapters.diffusion import apply_diffusion_adapter, diffusion_file
from isomerge.addresses import is_url
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.config_meaning import TELLING, unequal
from isomerge.errors import RequestError
from isomerge.merging.data_methods import ALL_METHODS, DATA_METHODS, DataMethod
from isomerge.merging.distillation.fresh_student import fresh_student
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.vocabulary.files import other_ids


def open_model(reference: ModelReference, model: Any = None) -> Checkpoint:
    """A model by its header, with its adapter on top; `model` is what the reference stands for, if not for itself."""
    named = model is None or isinstance(model, (str, Path, ModelReference))
    if isinstance(model, (str, Path)):
        reference = ModelReference.parse(str(model))
    if named and is_adapter(reference.path):
        raise _no_model(reference)
    checkpoint = open_checkpoint(reference.path, revision=reference.revision) if named else open_checkpoint(model)
    if named and is_url(reference.path) and holds_adapter(checkpoint):
        raise _no_model(reference)
    if reference.adapter is None or not named:
        return checkpoint
    if file := diffusion_file(reference.adapter):
        return apply_diffusion_adapter(checkpoint, file, str(reference))
    return apply_adapter(checkpoint, reference.adapter, revision=reference.adapter_revision, name=str(reference))


def is_fresh(document: Recipe) -> bool:
    """Whether the base stands for its config alone, and its weights are drawn by the seed."""
    among = any(entry.model == document.base_model for entry in document.models or ())
    return bool((document.parameters or {}).get("fresh")) and document.base_model is not None and not among


def _no_model(reference: ModelReference) -> RequestError:
    return RequestError(
        f"Opening {reference.path}: it is an adapter and not a model. Write base+adapter to merge the model it "
        "makes, or name only adapters (isomerge merge adapter-a adapter-b -o OUT) to merge these."
    )


def open_models(
    documents: Sequence[Recipe], given: Mapping[ModelReference, Any] | None = None
) -> dict[ModelReference, Checkpoint]:
    """Every model that the documents name and do not make themselves, by headers only; all that fail, at once."""
    made = {document.name for document in documents if document.name}
    wanted = dict.fromkeys(
        reference for document in documents for reference in document.referenced_models() if str(reference) not in made
    )
    opened, problems = {}, []
    fresh = {document.base_model: document for document in documents if is_fresh(document)}
    for reference in wanted:
        try:
            model = (given or {}).get(reference)
            if reference in fresh and model is None:
                model = fresh_student(str(reference), fresh[reference].seed)
            opened[reference] = open_model(reference, model)
        except Exception as error:  # told together with the others below
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        told = " ".join(f"({place}) {error}" for place, error in enumerate(problems, start=1))
        raise RequestError(f"Opening the models of the recipe, {len(problems)} problems: {told}")
    return opened


# Weights of the same shape mean something else when these differ.
DECISIVE = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim", "d_kv")


def differences(models: Sequence[Checkpoint], documents: Sequence[Recipe], *, ids: bool = True) -> list[str]:
    """Notes on what differs from the first model; what cannot be merged at all is an error with every reason.

    Without `ids`, that of tokens is left to somebody else: reading large vocabularies takes a while.
    """
    described = [model for model in models if model.config.get("model_type")]
    bare = [m.name for m in models if not m.config and m.folder is not None and m.folder == Path(m.name)]
    if described and bare:
        raise RequestError(
            f"Merging: {name_some(bare)} has no config.json, so nothing says what its weights are. Copy it from where "
            "the model came; or name the weight file itself to merge it as it is."
        )
    methods = [ALL_METHODS[document.merge_method] for document in documents]
    free = [getattr(one, "any_architecture", False) or getattr(one, "parts", False) for one in methods]
    if len(described) < 2 or all(free):
        return []
    first = described[0]
    lenient = {"passthrough", *(name for name, method in DATA_METHODS.items() if method.any_width)}
    stacked = all(document.merge_method in lenient for document in documents)
    problems: list[str] = []
    notes: list[str] = []
    for other in described[1:]:
        kinds = [str(c.config["model_type"]) for c in (first, other)]
        if kinds[0] != kinds[1]:
            problems.append(f"{first.name} is of type '{kinds[0]}' and {other.name} of type '{kinds[1]}'")
            continue
        decisive = unequal(first.config, other.config, DECISIVE)
        (notes if stacked else problems).extend(f"{text} in {first.name} and {other.name}" for text in decisive)
        notes += [
            f"{text} in {first.name} and {other.name}; the result has that of its config's donor"
            for text in unequal(first.config, other.config, TELLING, defaults=True)
        ]
    if problems:
        raise RequestError(
            f"Merging: {'; '.join(problems)}. Only models of one architecture have weights that mean the same; merge "
            "fine-tunes of one base, or models trained alike. reconstruct with joint features takes other shapes."
        )
    by_text = all(getattr(ALL_METHODS[document.merge_method], "any_depth", False) for document in documents)
    if ids and not by_text and not any(document.tokenizer for document in documents):
        notes += [
            f"{text}: their rows are merged with those of other tokens. Set `tokenizer` to union to match them by text"
            for text in other_ids(described)
        ]
    return notes


def left_out_adapters(models: Sequence[Checkpoint]) -> list[str]:
    """A word on adapters that lie beside a model's weights: whoever looks at the model in transformers sees both."""
    return [
        f"{name} has an adapter beside its weights ({CONFIG}), which is not merged; for that, move it to a folder of "
        f"its own and name {name}+FOLDER"
        for name in [model.name for model in models if has_adapter_beside(model)]
    ]


def read_otherwise(models: Sequence[Checkpoint]) -> list[str]:
    """A note on each model whose weights are not read as they are stored, with the ways that they are."""
    parts = {id(part): (model.name, part.read_as) for model in models for part in (model, *model.parts())}
    return [f"{name} is stored as {read_as}" for name, read_as in dict.fromkeys(parts.values()) if read_as]


def base_among_models(document: Recipe) -> list[str]:
    """A note where it counts only as the base, as in mergekit: what is set for it among the models has no effect.

    Of two models (slerp) the base is one by its nature, and a method without a base takes it as one more.
    """
    method = ALL_METHODS[document.merge_method]
    listed = [entry.model for entry in document.models or ()]
    if document.base_model not in listed or method.base == "ignored" or method.most == 1:
        return []
    if isinstance(method, DataMethod):  # a student among its teachers
        return []
    return [
        f"{document.base_model} is the base and also one of the models: {method.name} merges the others into it, and "
        "what is set for it as one of them, such as a weight, has no effect"
    ]
