"""A model with the tokenizer of another one: rows of tokens that both know stay, rows of new tokens are made."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.choices import NewTokenRows
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.experts.measuring import whole
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Stored
from isomerge.merging.transplanting.matched import NewTokens, new_tokens
from isomerge.merging.transplanting.measuring import bits_per_byte, drawn_texts
from isomerge.merging.transplanting.tables import NewRows, read_tables
from isomerge.running.stock import require_runnable

FEW = 0.05
"""With so small a share of the new tokens known, what is made of them says little."""


@data_method(
    data="optional",
    passes="the model before, and after",
    least=2,
    most=2,
    parts=True,
    reference="https://arxiv.org/abs/2506.06607",
)
def transplant(inputs: MergeInputs, *, how: NewTokenRows = "omp", k: int = 64) -> MergedWeights:
    """Give the first model the tokenizer of the second: known rows stay, new ones are made of shared ones.

    Options:
        how: rows of new tokens: combinations of shared tokens that give the second model's row (omp), the mean of the pieces of their text (subword), the second model's rows as they are (stored), the mean row, or zero
        k: how many shared tokens a row is made of at most, for omp
    """  # noqa: E501
    from isomerge.merging.vocabulary import merge_vocabularies

    model, donor = inputs.models
    if k < 1:
        raise RequestError(f"Transplanting: k is {k}. Use 1 or more shared tokens; 64 is usual.", keys=("k",))
    require_runnable(model)
    own, theirs = read_tables(model), read_tables(donor)
    known = {model.name: own.rows, donor.name: theirs.rows}
    vocabulary = merge_vocabularies({model.name: model, donor.name: donor}, source=donor.name, rows=known)
    tokens = new_tokens(model, donor, own.rows, theirs.rows, vocabulary.size)
    rows = NewRows(tokens, own, theirs, how, k, inputs.device)
    sources: dict[str, Tensor | TensorSource] = {
        name: Stored(model, name) for name in model.tensors if name not in own.all
    }
    for place, name in enumerate(own.all):
        inputs.report(place, len(own.all), "making rows")
        sources[name] = rows.table(name)
    inputs.report(len(own.all), len(own.all), "making rows")
    plan = {
        name: TensorInfo(tuple(one.shape) if isinstance(one, Tensor) else one.info.shape, model.tensors[name].dtype)
        for name, one in sources.items()
    }
    changes = vocabulary.config_changes()
    about = _about(tokens, how, k, rows)
    notes = _notes(model, donor, tokens)
    vocabulary.report.pop("filled")  # rows come from elsewhere here
    if inputs.data:
        about["loss"] = _losses(inputs, model, donor, {**model.config, **changes}, sources)
    return MergedWeights(sources, plan, changes, None, notes, {"transplant": about}, vocabulary=vocabulary)


def _about(tokens: NewTokens, how: str, k: int, rows: NewRows) -> dict[str, Any]:
    cut, new = sum(bool(pieces) for pieces in tokens.pieces.values()), len(tokens.pieces)
    record = {
        "how": how, "tokens": len(tokens.kept) + new, "known": len(tokens.kept), "new": new, "in_pieces": cut,
        "rows": tokens.size,
    }  # fmt: skip
    return record | ({"k": k, "missed": rows.missed} if how == "omp" else {})


def _notes(model: Checkpoint, donor: Checkpoint, tokens: NewTokens) -> list[str]:
    total = len(tokens.kept) + len(tokens.pieces)
    notes = [
        f"{len(tokens.kept)} of the {total} tokens of {donor.name} are known to {model.name}; rows of the other "
        f"{len(tokens.pieces)} were made"
    ]
    if len(tokens.kept) < FEW * total:
        notes.append("hardly any token is shared: expect a model that has to be trained before it is of use")
    return notes


def _losses(
    inputs: MergeInputs, model: Checkpoint, donor: Checkpoint, config: dict[str, Any], sources: dict[str, Any]
) -> dict[str, Any]:
    """Of the same texts, before and after."""
    encoder, texts = drawn_texts(inputs.data[0], model)
    state = {name: whole(source).to(model.tensors[name].dtype) for name, source in sources.items()}
    made = MemoryCheckpoint(f"{model.name} with the tokenizer of {donor.name}", state, config, beside=donor)
    before = bits_per_byte(model, encoder, texts, inputs.device)
    other = type(encoder).of(made, None, None)
    return {"before": before, "after": bits_per_byte(made, other, texts, inputs.device)}
