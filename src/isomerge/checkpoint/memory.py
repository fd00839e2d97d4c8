"""Checkpoints in memory: a state_dict, or an nn.Module under the names its tensors have on disk.

transformers 5 renames, stacks and splits tensors when it loads: `encoder.layer.0…` on disk may be `layers.0…` in
memory, and the experts of a mixture are one stacked tensor in memory but a tensor each on disk.
Both directions go through transformers' own mapping, so nothing here knows an architecture.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from isomerge.checkpoint.base import Checkpoint, TensorInfo, failure, name_some
from isomerge.checkpoint.local import open_folder
from isomerge.errors import CheckpointError, RequestError


def as_tensors(state: Mapping[str, Any], act: str) -> dict[str, torch.Tensor]:
    """A state_dict whose arrays of numpy are tensors, on the same memory where torch can use that."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, (np.ndarray, np.generic)):
            value = _of_array(np.asarray(value))
        if isinstance(value, torch.Tensor):
            found[name] = value
    if wrong := sorted(str(name) for name in state.keys() - found.keys()):
        raise CheckpointError(
            f"{act}: {name_some(wrong)} is not a tensor, nor an array of numbers. "
            "Pass a flat state_dict of tensor names to tensors, as module.state_dict() gives."
        )
    return found


def _of_array(array: np.ndarray) -> torch.Tensor | None:
    """None for what torch has no dtype for, such as text."""
    if not array.flags.writeable or not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError:
        return None


class MemoryCheckpoint(Checkpoint):
    """Tensors that are already there. Reads are copies, so that no method can write into the caller's model."""

    in_memory = True
    revision: str | None = None

    def __init__(
        self, name: str, state: Mapping[str, Any], config: dict[str, Any], *, beside: Checkpoint | None = None
    ) -> None:
        """`beside` has the side files."""
        state = as_tensors(state, f"While opening {name}")
        absent = sorted(key for key, value in state.items() if value.is_meta)
        if absent:
            raise CheckpointError(
                f"While opening {name}: {name_some(absent)} has no values (device 'meta'), because the model is "
                "offloaded or was never loaded. Load it onto the CPU, or pass its folder instead."
            )
        self.name, self.config, self._beside = name, config, beside
        self.folder = beside.folder if beside is not None else None
        self._state = dict(state)
        self.tensors: Mapping[str, TensorInfo] = {key: TensorInfo.of(self._state[key]) for key in sorted(self._state)}

    def peek(self, name: str) -> torch.Tensor:
        if name not in self._state:
            self.unknown_tensor(name)
        return self._state[name].detach()

    def read(self, name: str) -> torch.Tensor:
        tensor = self.peek(name)
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def side_files(self) -> list[Path]:
        return self._beside.side_files() if self._beside is not None else []


def open_module(module: nn.Module, *, name: str | None = None) -> MemoryCheckpoint:
    """A module as a checkpoint: a transformers model under the names that save_pretrained would write."""
    module = unwrapped(module)
    name = name or f"the {type(module).__name__} in memory"
    if not is_transformers_model(module):
        return MemoryCheckpoint(name, module.state_dict(), {})
    return MemoryCheckpoint(name, saved_state(module, name), saved_config(module))


WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}


def unwrapped(module: nn.Module) -> nn.Module:
    """The model itself, without what compiling and distributed training wrap around it."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in WRAPPERS:
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def is_transformers_model(module: nn.Module) -> bool:
    """Asked by name, because whoever has no transformers model should not pay for importing transformers."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(module).__mro__
    )


def saved_state(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The state_dict as save_pretrained would store it: tied tensors once, names and stacking of the disk."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError(f"While opening {name}: it is quantised. Load it unquantised, or dequantise it first.")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"While opening {name}: it carries an adapter that is not merged into its weights. "
            "Merge it first (peft's merge_and_unload), or open the adapter's folder by itself."
        )
    try:
        return _reverted_state(model)
    except Exception as error:  # any failure inside transformers means the same to the user
        raise CheckpointError(
            f"While opening {name}: transformers could not map its tensors to their names on disk ({error}). "
            "Call model.save_pretrained(folder) and pass the folder."
        ) from error


def _reverted_state(model: Any) -> dict[str, torch.Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        # transformers 4, or a later one that keeps its mapping elsewhere: what it saves is always the truth.
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            saved = open_folder(Path(folder))
            return {tensor: saved.read(tensor) for tensor in saved.tensors}
    state = dict(model.state_dict())
    for ignored in model._keys_to_ignore_on_save or ():
        state.pop(ignored, None)
    if any(tensor.is_meta for tensor in state.values()):
        return state  # offloaded: nothing can be converted, and MemoryCheckpoint says so
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model)))


def saved_config(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = model.config.to_dict()
    if not config.get("architectures"):
        config["architectures"] = [type(model).__name__]
    return config


def load_into_module(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy checkpoint-named tensors into a module in place: its dtype, device and ties stay as they are.

    Raises CheckpointError, leaving the module untouched, when a tensor is missing, left over or of another shape.
    """
    module, state = unwrapped(module), tensors
    _require_room(module, tensors)
    problems: list[str] = []
    if is_transformers_model(module):
        state, problems = _loaded_state(module, tensors)
    problems = problems or _mismatches(module.state_dict(), state)
    if problems:
        raise failure(
            f"loading {len(tensors)} tensors into a {type(module).__name__}",
            problems,
            "Pass the tensors of this model.",
        )
    module.load_state_dict(dict(state))


def _require_room(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a module that holds no weights, or has one place for two tensors that differ."""
    own = module.state_dict()
    what = f"Loading weights into a {type(module).__name__}"
    if any(value.is_meta for value in own.values()):
        raise RequestError(f"{what}: it is on the meta device, where nothing is stored. Make it on another (cpu).")
    first: dict[int, str] = {}
    for name, value in own.items():
        twin = first.setdefault(value.data_ptr(), name)
        if name != twin and {name, twin} <= tensors.keys() and not torch.equal(tensors[name], tensors[twin]):
            raise RequestError(
                f"{what}: '{twin}' and '{name}' are one tensor there and differ here; they need a configuration with "
                "tie_word_embeddings=False. Make the module with it, or save the result and load the folder."
            )


def require_config(module: nn.Module, changes: Mapping[str, Any]) -> None:
    """Refuse a module whose configuration lacks what the weights need, such as tables of their own."""
    config = getattr(unwrapped(module), "config", None)
    needed = {key: value for key, value in changes.items() if key not in ("dtype", "torch_dtype")}
    other = [f"{key}={value}" for key, value in needed.items() if getattr(config, key, value) != value]
    if other:
        raise RequestError(
            f"Loading weights into a {type(module).__name__}: they need a configuration with {', '.join(other)}. Make "
            "the module with it, or save the result and load the folder."
        )


def _loaded_state(module: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What transformers makes of the tensors, in a second model (the public way through its loading mapping), and what
    does not fit."""
    # Mismatches are reported all at once; `torch_dtype` is the spelling that transformers 4 and 5 both know.
    options = {"torch_dtype": module.dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quiet_transformers():
            loaded, info = type(module).from_pretrained(
                None, config=module.config, state_dict=dict(tensors), trust_remote_code=False, **options
            )
    except Exception as error:  # any failure inside transformers means the same to the user
        raise CheckpointError(
            f"While loading {len(tensors)} tensors into a {type(module).__name__}: transformers could not map them to "
            f"the module's own names ({error}). Save them with write_checkpoint and use from_pretrained on the folder."
        ) from error
    problems = []
    for key, what in (("missing_keys", "no tensor for"), ("unexpected_keys", "no place for")):
        if info[key]:
            problems.append(f"{what} {name_some(sorted(info[key]))}")
    if info["mismatched_keys"]:
        problems.append(f"another shape for {name_some(sorted(str(entry[0]) for entry in info['mismatched_keys']))}")
    return dict(loaded.state_dict()), problems


def _mismatches(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> list[str]:
    problems = []
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing:
        problems.append(f"no tensor for {name_some(missing)}")
    if extra:
        problems.append(f"no place for {name_some(extra)}")
    for name in sorted(own.keys() & given.keys()):
        if own[name].shape != given[name].shape:
            problems.append(f"'{name}' is {tuple(given[name].shape)} where the module has {tuple(own[name].shape)}")
    return problems


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Its progress bar and load report would speak about a model that the user never asked to load."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # parts of it are untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
