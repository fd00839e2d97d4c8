"""Would the stock class load these names and shapes? Asked of `transformers` itself, without reading any weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.checkpoint.checks import is_harmless_buffer
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.checkpoint.stock_classes import class_config
from isomerge.errors import CheckpointError
from isomerge.packages import TooOldError, first_cause, is_installed, require_version
from isomerge.running.stock import stock_class

# What may differ between a model and its donor without another class or another set of tensors being meant.
NOT_STRUCTURE = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}


@dataclass(frozen=True)
class ClassCheck:
    """How the tensors of a checkpoint fit its stock class. `fits` is None where nobody could be asked."""

    fits: bool | None
    detail: str
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs of stored tensors that the class holds as one."""


def same_structure(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether two checkpoints hold the same names and shapes, and describe the same class."""

    def structure(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        config = {key: value for key, value in checkpoint.config.items() if key not in NOT_STRUCTURE}
        return config, {name: info.shape for name, info in checkpoint.tensors.items()}

    return structure(first) == structure(second)


def check_stock_class(checkpoint: Checkpoint) -> ClassCheck:
    """Load the headers into the stock class on the meta device, through the renaming of transformers' own loader."""
    if not checkpoint.config:
        return ClassCheck(False, "there is no config.json, or an empty one, so no class can load it")
    if checkpoint.config.get("quantization_config"):
        return ClassCheck(None, "not checked: it is quantised, and its tensors are not those of the class")
    for package in ("transformers", "accelerate"):  # transformers needs the second for the meta device
        if not is_installed(package):
            return ClassCheck(None, f"not checked: the package '{package}' is not installed (pip install {package})")
    try:
        require_version("transformers")
        kind = stock_class(checkpoint.config, checkpoint.folder)
    except (CheckpointError, TooOldError) as error:
        return ClassCheck(None, f"not checked: {error}")
    try:
        model, info = _load_headers(kind, checkpoint)
    except ImportError as error:
        return ClassCheck(
            None, f"not checked: {kind.__name__} needs more than is installed ({_line(first_cause(error))})"
        )
    except Exception as error:  # whatever the class cannot be built from is wrong in config.json
        return ClassCheck(False, f"{kind.__name__} cannot be built from config.json: {_line(error)}")
    problems = _problems(model, info)
    # A class may turn the flag on again in its own config; its loader still keeps two tables that config.json untied.
    untied = checkpoint.config.get("tie_word_embeddings") is False
    ties = () if untied else _stored_ties(model, checkpoint.tensors)
    if problems:
        return ClassCheck(False, f"{kind.__name__}: {'; '.join(problems)}", ties)
    unused = sorted(info["unexpected_keys"])
    note = f"; it has no use for {name_some(unused)}" if unused else ""
    return ClassCheck(True, f"all tensors of {kind.__name__} are there, in the right shapes{note}", ties)


def _load_headers(kind: Any, checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    state = {
        name: torch.empty(info.shape, dtype=torch.float32, device="meta") for name, info in checkpoint.tensors.items()
    }
    with quiet_transformers():
        model, info = kind.from_pretrained(
            None, config=class_config(kind, checkpoint.config), state_dict=state,
            dtype=torch.float32, device_map={"": "meta"}, output_loading_info=True, ignore_mismatched_sizes=True,
            trust_remote_code=False,  # the class is chosen: no code is looked for
        )  # fmt: skip
    return model, info


def _problems(model: Any, info: Mapping[str, Any]) -> list[str]:
    problems = []
    if info["missing_keys"]:
        problems.append(f"no tensor for {name_some(sorted(info['missing_keys']))}")
    for name, stored, wanted in sorted(info["mismatched_keys"])[:5]:
        problems.append(f"'{name}' is {tuple(stored)} where config.json promises {tuple(wanted)}")
    if len(info["mismatched_keys"]) > 5:
        problems.append(f"{len(info['mismatched_keys']) - 5} more of another shape")
    # A head the class does not use is common and harmless. A tensor of the same kind as those it does use is a layer
    # that config.json does not count, and would be dropped in silence.
    kinds = {_kind(name) for name in model.state_dict()}
    uncounted = [n for n in sorted(info["unexpected_keys"]) if _kind(n) in kinds and not is_harmless_buffer(n)]
    if uncounted:
        problems.append(f"config.json counts fewer layers than are stored, no place for {name_some(uncounted)}")
    return problems


def _kind(name: str) -> str:
    """
    >>> _kind("layers.11.mlp.weight")
    'layers.*.mlp.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _stored_ties(model: Any, stored: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The tied pairs of the class of which both are on disk, under their names there."""
    from transformers.core_model_loading import revert_weight_conversion

    pairs = []
    own = model.state_dict()
    for target, source in sorted((getattr(model, "all_tied_weights_keys", None) or {}).items()):
        names = []
        for name in (target, source):
            saved = revert_weight_conversion(model, {name: own[name]}) if name in own else {}
            names += [n for n in (name, *saved) if n in stored][:1]
        if len(names) == 2:
            pairs.append((names[0], names[1]))
    return tuple(pairs)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
