"""How a student and its teachers read one data set: each by its own tokenizer or image settings, example by example."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from isomerge.checkpoint import Checkpoint
from isomerge.data.base import Batch, Batches
from isomerge.data.images import pixels_for
from isomerge.data.parallel import part, read_by
from isomerge.errors import RequestError
from isomerge.merging.layerwise.token_matching import OwnTokens, TokenMatch
from isomerge.running.stock import StockModel, inputs_of

if TYPE_CHECKING:
    from isomerge.merging.recipe_data import DataSet


@dataclass(frozen=True)
class ModelReader:
    """A model that takes what is its own out of every batch."""

    model: Any
    tokens: OwnTokens

    @classmethod
    def load(cls, checkpoint: Checkpoint, tokens: OwnTokens, device: str) -> ModelReader:
        """A module of its own, even of a checkpoint that is read by another one."""
        model = StockModel.load(checkpoint, device).module
        for piece in model.modules():  # nothing is generated; a decoder may have a configuration of its own
            if hasattr(getattr(piece, "config", None), "use_cache"):
                piece.config.use_cache = False
        known = set(inspect.signature(model.forward).parameters)

        def own(module: Any, args: Any, batch: Batch) -> tuple[Any, Batch]:
            given = inputs_of(read_by(batch, tokens.who), module)
            return args, {name: tensor for name, tensor in given.items() if name in known}

        model.register_forward_pre_hook(own, with_kwargs=True)
        return cls(model, tokens)


def reading(
    data: DataSet, models: Sequence[Checkpoint], matches: Mapping[int, TokenMatch], *, labels: bool = False
) -> Batches:
    """Batches for all models, as the first reads them; what another reads in its own way is there under its number."""
    first = models[0]
    if matches:
        pending = next(iter(matches.values())).pending
        data = data.beside({place: models[place] for place in matches}, pending)
    others = {
        place: model
        for place, model in enumerate(models)
        if place not in matches and not _reads_alike(first, model, data.data.kind)
    }
    own = data.passes(first, labels=labels)
    if not others:
        return own
    return lambda: _side_by_side(own(), {m: data.passes(model)() for m, model in others.items()}, models)


def _reads_alike(first: Checkpoint, other: Checkpoint, kind: str) -> bool:
    """Of texts, another type of model may take other arguments, such as types of tokens."""
    if kind == "batches" or first is other:
        return True
    if kind == "images":
        return pixels_for(first) == pixels_for(other)
    return first.config.get("model_type") == other.config.get("model_type")


def _side_by_side(
    own: Iterator[Batch], others: Mapping[int, Iterator[Batch]], models: Sequence[Checkpoint]
) -> Iterator[Batch]:
    for batch in own:
        together = dict(batch)
        for place, passes in others.items():
            theirs = next(passes, None)
            ids = "input_ids" in batch
            if theirs is None or (ids and not torch.equal(theirs["input_ids"], batch["input_ids"])):
                raise RequestError(
                    f"Distilling: {models[0].name} and {models[place].name} cut the texts into different pieces. Set "
                    "the length of the data to what both models take.",
                    keys=("data",),
                )
            together |= {part(name, place): tensor for name, tensor in theirs.items()}
        yield together
