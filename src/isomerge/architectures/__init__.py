"""The families isomerge knows: one small data file each. Only this folder knows a model's name.

To add a family, write a function of `Facts` that returns an `Architecture`, decorate it, and add a row to the table in
`tests/architectures/rows.py`; the row buys the whole test suite.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from isomerge.checkpoint.base import Checkpoint
from isomerge.symmetry.architecture import RESIDUAL, Architecture, Facts, part_of
from isomerge.symmetry.binding import BoundModel, bind_model, find

HEADS = {
    "ForCausalLM": "lm", "LMHeadModel": "lm", "ForMaskedLM": "lm", "ForConditionalGeneration": "lm",
    "ForPreTraining": "pretraining", "ForSequenceClassification": "sequence", "ForTokenClassification": "token",
    "ForQuestionAnswering": "question", "ForImageClassificationWithTeacher": "image", "ForImageClassification": "image",
    "ForAudioClassification": "audio", "CLIPModel": "towers", "SiglipModel": "towers",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A specification function with the model types it serves."""

    model_types: tuple[str, ...]
    function: Callable[[Facts], Architecture]
    summary: str
    tied_by_default: bool
    can_untie: bool


FAMILIES: dict[str, Family] = {}


def architecture(
    *model_types: str, summary: str, tied_by_default: bool = False, can_untie: bool = True
) -> Callable[[Callable[[Facts], Architecture]], Callable[[Facts], Architecture]]:
    """Register a specification for these `model_type`s of config.json."""

    def register(function: Callable[[Facts], Architecture]) -> Callable[[Facts], Architecture]:
        family = Family(model_types, function, summary, tied_by_default, can_untie)
        FAMILIES.update({model_type: family for model_type in model_types})
        return function

    return register


def head_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """The kind of task head, and a note when it had to be guessed. Unknown heads count as bare: safe for any reader."""
    classes = checkpoint.config.get("architectures") or []
    if not classes:
        return "bare", "config.json names no architecture class; the hidden states are taken as the model's output"
    for suffix, head in HEADS.items():
        if classes[0].endswith(suffix):
            return head, ""
    if classes[0].endswith("Model"):
        return "bare", ""
    return "bare", f"{classes[0]} is not a head we know; the hidden states are taken as the model's output"


def is_tied(checkpoint: Checkpoint, family: Family) -> bool:
    """Whether config.json says that the output table is the input table, and there is an output table."""
    if head_of(checkpoint)[0] not in ("lm", "pretraining"):
        return False
    value = checkpoint.config.get("tie_word_embeddings")
    return family.tied_by_default if value is None else bool(value)


def own_output_table(checkpoint: Checkpoint, family: Family, head: str) -> str | None:
    """An output table that config.json ties but the file stores with values of its own.

    Such a table is read as it is stored: T5 1.1 saved by transformers 5 is one (its flag is forced to true).
    """
    tied, untied = (family.function(Facts(checkpoint.config, head, tied)) for tied in (True, False))
    for name, (source, _) in tied.tied.items():
        own, shared = find(name, checkpoint, tied), find(source, checkpoint, tied)
        read = name in untied.tensors or name + "?" in untied.tensors
        if read and own and shared and not torch.equal(checkpoint.read(own[0]), checkpoint.read(shared[0])):
            return name
    return None


def describe(checkpoint: Checkpoint, *, untie: bool = False) -> BoundModel:
    """Bind a checkpoint to the specification of its family.

    `untie` separates a tied output table from the input table where the family allows it, which a rotation of the
    residual stream needs.
    """
    family = FAMILIES.get(checkpoint.config.get("model_type", ""))
    if family is None:
        from isomerge.architectures.inferred import describe_inferred

        return describe_inferred(checkpoint)
    head, note = head_of(checkpoint)
    tied = is_tied(checkpoint, family)
    notes = [note] if note else []
    if tied and (table := own_output_table(checkpoint, family, head)):
        tied = False
        notes.append(f"config.json ties {table} to the input table, but the file has its own, and that is what is read")
    untie = untie and tied and family.can_untie
    spec = family.function(Facts(checkpoint.config, head, tied and not untie))
    spec = replace(spec, family=checkpoint.config["model_type"], notes=[*spec.notes, *notes])
    if not untie:
        spec = replace(spec, untied_config={})
    if head == "bare":
        spec = spec.expanded()
        held = [s for s in spec.spaces if part_of(spec.root(s)) in (RESIDUAL, "head")]
        spec = spec.frozen(held, "the hidden states are the output, so the residual stream stays as it is")
    return bind_model(checkpoint, spec)


def describe_like(model: BoundModel, checkpoint: Checkpoint) -> BoundModel | None:
    """The description of a model, for another with the same config and tensors: nothing is fitted again.

    None where it has to be looked at itself: a tied table is one only if its values are.
    """
    family = FAMILIES.get(checkpoint.config.get("model_type", ""))
    known = model.checkpoint
    if family is None or checkpoint.config != known.config or checkpoint.tensors != known.tensors:
        return None
    return None if is_tied(checkpoint, family) else replace(model, checkpoint=checkpoint)


for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    if _module not in ("inferred", "inferring", "parts"):  # the first is imported where it is used: it loads models
        importlib.import_module(f"{__name__}.{_module}")
