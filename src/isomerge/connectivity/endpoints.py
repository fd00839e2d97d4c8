"""The models that a line or plane goes through, as the mixture of which it is made."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from isomerge.alignment.api import align_family
from isomerge.checkpoint import Checkpoint, open_checkpoint, require_floating
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.memory import is_transformers_model
from isomerge.data.base import Data, floating
from isomerge.data.task_heads import label_names
from isomerge.data.tokenizer import POSITIONS
from isomerge.errors import RequestError
from isomerge.running.stock import load_stock, read_weights, require_device, require_runnable
from isomerge.running.weight_replacement import Mixture


def open_models(given: Sequence[Any], device: str) -> list[Checkpoint]:
    require_device(device)
    checkpoints = [open_checkpoint(model) for model in given]
    for checkpoint in checkpoints:
        require_floating(checkpoint)
    for other in checkpoints[1:]:
        kinds = [c.config.get("model_type") for c in (checkpoints[0], other)]
        if all(kinds) and kinds[0] != kinds[1]:
            raise RequestError(
                f"Going from {checkpoints[0].name} to {other.name}: one is a '{kinds[0]}' model and the other a "
                f"'{kinds[1]}' model, so nothing lies between them. Name models of one architecture and size."
            )
        own, theirs = (label_names(c.config) for c in (checkpoints[0], other))
        if own != theirs and sorted(own) == sorted(theirs):
            raise RequestError(
                f"Going from {checkpoints[0].name} to {other.name}: they have the same labels in another order "
                f"({', '.join(own[:5])} … and {', '.join(theirs[:5])} …), so their outputs do not correspond. Name "
                "models that were trained with one list of labels."
            )
    return checkpoints


def plain_mixture(checkpoints: Sequence[Checkpoint], given: Sequence[Any], device: str) -> Mixture:
    """The models as they are."""
    states = [read_weights(c) for c in checkpoints]
    return _mixture(checkpoints, [c.config for c in checkpoints], states, given[0], device)


def aligned_mixture(
    checkpoints: Sequence[Checkpoint], given: Sequence[Any], level: str, device: str
) -> tuple[Mixture, list[str], list[str]]:
    """All models next to the first; with the verdict on each and notes. Nothing is rounded in between."""
    family = align_family(checkpoints[1:], anchor=checkpoints[0], level=level, device=device)
    family.require_one_gauge()
    moved = [family.moved(checkpoint) for checkpoint in checkpoints]
    states = [model.state_dict(floating(model.model.checkpoint)) for model in moved]
    changes = moved[0].model.architecture.untied_config
    configs = [{**c.config, **changes} for c in checkpoints]
    verdicts = [member.verdict for member in family.members]
    return _mixture(checkpoints, configs, states, given[0], device), verdicts, family.solver_notes()


def mixture_of(
    checkpoints: Sequence[Checkpoint], given: Sequence[Any], level: str | None, device: str
) -> tuple[Mixture, list[str]]:
    """All models next to the first by an alignment of this level, or as they are; with notes."""
    if level is None:
        return plain_mixture(checkpoints, given, device), []
    mixture, _, notes = aligned_mixture(checkpoints, given, level, device)
    return mixture, notes


def reader_for_all(checkpoints: Sequence[Checkpoint], data: Data) -> Checkpoint:
    """The first model, to read data by: inputs are no longer than each of them takes."""
    shorter = shared_positions(checkpoints)
    for key, shortest in shorter.items():
        data.note(f"the models take inputs of different length; the shortest counts ({key} {shortest})")
    return open_checkpoint(checkpoints[0], config={**checkpoints[0].config, **shorter})


def shared_positions(checkpoints: Sequence[Checkpoint]) -> dict[str, int]:
    """The entries of config.json that must change where the models take inputs of different length: the shortest."""
    changes = {}
    for key in POSITIONS:
        lengths = [c.config.get(key) for c in checkpoints]
        if all(isinstance(length, int) for length in lengths) and len(set(lengths)) > 1:
            changes[key] = min(length for length in lengths if isinstance(length, int))
    return changes


def _cut_positions(
    checkpoints: Sequence[Checkpoint], states: list[dict[str, Tensor]], changes: Mapping[str, int]
) -> list[dict[str, Tensor]]:
    """Position tables of different length, to the rows that all models have."""

    def cut(checkpoint: Checkpoint, state: dict[str, Tensor], name: str) -> Tensor:
        tensor = state[name]
        differs = any(name in other and other[name].shape != tensor.shape for other in states)
        for key, short in changes.items():
            if differs and tensor.dim() and tensor.shape[0] == checkpoint.config[key]:
                return tensor[:short].clone()
        return tensor

    return [{name: cut(c, state, name) for name in state} for c, state in zip(checkpoints, states, strict=True)]


def _mixture(
    checkpoints: Sequence[Checkpoint],
    configs: Sequence[Mapping[str, Any]],
    states: list[dict[str, Tensor]],
    template: Any,
    device: str,
) -> Mixture:
    kept: dict[str, Any] = {}
    if isinstance(template, nn.Module) and not is_transformers_model(template):
        module = copy.deepcopy(template).to(device).eval()
        weights = [{k: v.to(device) for k, v in state.items()} for state in states]
    else:
        for checkpoint in checkpoints:
            require_runnable(checkpoint)
        changes = shared_positions(checkpoints)
        states = _cut_positions(checkpoints, states, changes)
        configs = [{**config, **changes} for config in configs]
        dtype, kept = floating(checkpoints[0]), dict(configs[0])
        module = load_stock(kept, states[0], dtype=dtype).to(device)
        weights = [{k: v.clone() for k, v in module.state_dict().items()}]
        for config, state in zip(configs[1:], states[1:], strict=True):
            # Only to have the weights under the module's own names: it is let go at once.
            weights.append(dict(load_stock(config, state, dtype=dtype).to(device).state_dict()))
    _require_same_shapes(checkpoints, weights)
    floats = [name for name, tensor in weights[0].items() if tensor.is_floating_point()]
    return Mixture(module, [{name: each[name] for name in floats} for each in weights], kept)


def _require_same_shapes(checkpoints: Sequence[Checkpoint], weights: Sequence[Mapping[str, Tensor]]) -> None:
    first = {name: tuple(tensor.shape) for name, tensor in weights[0].items()}
    for checkpoint, other in zip(checkpoints[1:], weights[1:], strict=True):
        shapes = {name: tuple(tensor.shape) for name, tensor in other.items()}
        missing = sorted(first.keys() ^ shapes.keys())
        if missing:
            raise RequestError(
                f"Going from {checkpoints[0].name} to {checkpoint.name}: only one of them has {name_some(missing)}. "
                "Use models of one architecture."
            )
        differ = [f"{n} {first[n]} and {shapes[n]}" for n in first if first[n] != shapes[n]]
        if differ:
            raise RequestError(
                f"Going from {checkpoints[0].name} to {checkpoint.name}: tensors of different shapes, "
                f"{name_some(differ, 3)}. Use models of one size, with the same labels and the same vocabulary."
            )
