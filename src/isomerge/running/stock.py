"""A stock `transformers` model with the weights of a checkpoint, ready to run."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.adapters.adapter import require_model
from isomerge.adapters.layout import ModuleLayout
from isomerge.checkpoint import Checkpoint, open_checkpoint, require_floating
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.lock import current_versions
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.checkpoint.remote_code import needs_own_code, own_class
from isomerge.checkpoint.stock_classes import class_config, class_name, named_class, not_built
from isomerge.data.base import Batch, floating
from isomerge.data.tokenizer import POSITIONS
from isomerge.errors import CheckpointError, IsomergeError, RequestError, ran_out_of_memory
from isomerge.packages import require_version, why_not_imported
from isomerge.running.linear_maps import LinearMap, linear_maps

ROOM = 1 << 26
"""Numbers that a class may hold beside its weights: masks, tables of positions."""


def require_device(device: str) -> None:
    """Raise, before any work, when this machine has no such device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        if str(device).partition(":")[0] not in ("cpu", "cuda", "mps", "xpu"):
            cause = "devices are cpu, cuda (NVIDIA, AMD), mps (Apple) and xpu (Intel)"
        raise RequestError(f"Working on device '{device}': {cause}. Use cpu, or a device this machine has.") from error


def require_runnable(checkpoint: Checkpoint) -> None:
    """Raise, before any weight is read, when no stock class could run this checkpoint."""
    try:
        require_version("transformers")
        import transformers  # noqa: F401
    except ImportError as error:
        raise RequestError(f"Running a model: {why_not_imported('transformers', error)}.") from error
    require_model(checkpoint)
    if not checkpoint.config:
        raise RequestError(
            f"Running {checkpoint.name}: it has no config.json, so no stock class can load it. Copy it from where the "
            "model came; in Python, pass a transformers module or open_checkpoint(…, config=…)."
        )
    own_class(checkpoint.config, checkpoint.folder)  # known from here on, for what is made of this model


def run_versions() -> dict[str, str]:
    """The versions of everything that computes when a model is run."""
    try:
        return {**current_versions(), "transformers": version("transformers")}
    except PackageNotFoundError:
        return current_versions()


def stock_class(config: Mapping[str, Any], folder: Path | None = None) -> Any:
    """The `transformers` class a checkpoint names; code of its own, from `folder`, only where it is allowed."""
    import transformers

    kind = own_class(config, folder) or named_class(config)
    if kind is None:
        if error := needs_own_code(config, f"Loading a '{config.get('model_type')}' model to run it"):
            raise error
        raise CheckpointError(
            f"Loading a '{config.get('model_type')}' model to run it: transformers {transformers.__version__} has no "
            f"class '{class_name(config) or '?'}'. Name the class in config.json under 'architectures'."
        )
    return kind


def load_stock(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
) -> Any:
    """The stock class of a config.json with these tensors, on the CPU, ready to run; none of them may be missing."""
    kind = stock_class(config, folder)
    try:
        with quiet_transformers():
            _require_no_more_than_stored(kind, config, state)
            model, info = kind.from_pretrained(
                None, config=class_config(kind, config), state_dict=dict(state), dtype=dtype,
                output_loading_info=True, experts_implementation="eager", ignore_mismatched_sizes=True,  # refused below
                trust_remote_code=False,  # the class is chosen: no code is looked for
            )  # fmt: skip
    except Exception as error:  # whatever transformers meets in numbers that no model has
        raise not_built(kind, error) from error
    wrong = {"missing": sorted(info["missing_keys"])}
    wrong["of another shape"] = sorted(key if isinstance(key, str) else str(key[0]) for key in info["mismatched_keys"])
    if any(wrong.values()):
        listed = "; ".join(f"{what}: {name_some(names)}" for what, names in wrong.items() if names)
        raise CheckpointError(
            f"Loading {kind.__name__}: tensors are {listed}. The checkpoint does not hold what its config.json "
            "promises: get weights and config.json of one and the same model, from where it came."
        )
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes for such a class, with a warning in every run
    return model.eval()


def _require_no_more_than_stored(kind: Any, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """transformers makes what is missing or of another shape, however large, before it says so."""
    with torch.device("meta"):
        made = kind(class_config(kind, config))
    described = sum(tensor.numel() for tensor in (*made.parameters(), *made.buffers()))
    stored = sum(tensor.numel() for tensor in state.values())
    if described > 4 * stored + ROOM:
        raise CheckpointError(
            f"Loading a {kind.__name__}: config.json describes {described:,} numbers, and the checkpoint holds "
            f"{stored:,}. Get weights and config.json of one and the same model, from where it came."
        )


def run_module(module: Any, inputs: Mapping[str, Any], name: str | None = None) -> Any:
    """The outputs of a model. Some numbers in a config.json fit its weights, and no forward pass."""
    try:
        return module(**inputs)
    except Exception as error:
        if ran_out_of_memory(error) or isinstance(error, IsomergeError) or _is_ours(error):
            raise
        raise CheckpointError(
            f"Running {name or f'a {type(module).__name__}'}: its class in transformers failed "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). Get config.json from where the weights "
            "came; in Python, look at the batch too."
        ) from error


def _is_ours(error: Exception) -> bool:
    """Whether it was raised by a hook of this package, and not by the module."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.startswith("isomerge.") for name in frames[1:])


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of a checkpoint, to run it. NaN has to be noticed here: attention kernels can swallow it, and the
    model would go on with numbers that mean nothing."""
    state = {name: checkpoint.read(name) for name in checkpoint.tensors}
    wrong = [
        name for name, tensor in state.items()
        if tensor.is_floating_point() and tensor.numel() and not all(e.isfinite() for e in torch.aminmax(tensor))
    ]  # fmt: skip
    if wrong:
        raise CheckpointError(
            f"Running {checkpoint.name}: NaN or infinite numbers in {name_some(wrong)}. The file is damaged, or the "
            "model was stored in a dtype that is too small for it; get a sound copy."
        )
    return state


def inputs_of(batch: Batch, module: Any) -> Batch:
    """What the forward pass needs: no labels, unless a decoder's own inputs are made from them."""
    needs_labels = bool(getattr(module.config, "is_encoder_decoder", False)) and "decoder_input_ids" not in batch
    return {name: tensor for name, tensor in batch.items() if name != "labels" or needs_labels}


@dataclass(frozen=True)
class StockModel:
    """A checkpoint as its stock module, with the names of both worlds."""

    checkpoint: Checkpoint
    module: Any
    device: str = "cpu"

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: str = "cpu") -> StockModel:
        """Read the weights into the stock class; nothing in it asks for gradients."""
        require_floating(checkpoint)
        require_device(device)
        require_runnable(checkpoint)
        weights = read_weights(checkpoint)
        module = load_stock(checkpoint.config, weights, dtype=floating(checkpoint), folder=checkpoint.folder)
        return cls(checkpoint, module.requires_grad_(False).to(device), device)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return floating(self.checkpoint)

    @cached_property
    def layout(self) -> ModuleLayout:
        """From names on disk to names in memory, and back."""
        return ModuleLayout(self.checkpoint)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.module.named_modules())

    @cached_property
    def maps(self) -> list[LinearMap]:
        """Every linear map that is a module of its own, under the checkpoint's names."""
        return linear_maps(self.module, self.layout)

    def run(self, batch: Batch) -> Mapping[str, Any]:
        """The outputs for one batch, without gradients."""
        with torch.no_grad():
            return self.forward(batch)

    def forward(self, batch: Batch) -> Mapping[str, Any]:
        """The outputs for one batch; labels are left out, except where the class makes its inputs from them."""
        inputs = inputs_of(batch, self.module)
        self._require_known_tokens(inputs)
        try:
            outputs: Mapping[str, Any] = run_module(self.module, inputs, self.checkpoint.name)
        except CheckpointError as error:
            length = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
            config = self.module.config
            longest = next((int(n) for n in (getattr(config, key, None) for key in POSITIONS) if n), length)
            if length > longest:
                raise RequestError(
                    f"Running {self.checkpoint.name}: a batch has texts of {length} tokens, and the model takes "
                    f"{longest}. Cut them, or pass the data set itself (isomerge.open_data), which does."
                ) from error
            raise
        return outputs

    def _require_known_tokens(self, inputs: Mapping[str, Tensor]) -> None:
        ids = inputs.get("input_ids")
        if ids is None or not ids.numel():
            return
        rows = self.module.get_input_embeddings().weight.shape[0]
        if int(ids.max()) >= rows:
            raise CheckpointError(
                f"Running {self.checkpoint.name}: its tokenizer gives token {int(ids.max())} and the embedding has "
                f"{rows} rows. The tokenizer beside the weights is of another model; copy the right one there."
            )


@contextlib.contextmanager
def load_model(model: Any, device: str | None = None) -> Iterator[StockModel]:
    """A path, hub id or checkpoint is loaded; a module is used as it is, and left as it was."""
    if not isinstance(model, nn.Module):
        yield StockModel.load(open_checkpoint(model), device or "cpu")
        return
    module: Any = model
    if not hasattr(module, "config"):
        raise RequestError(
            f"Evaluating a {type(module).__name__}: only modules of transformers say what they are for. Pass "
            "loss=function, or evaluate it with a function of your own."
        )
    home, training = next(module.parameters()).device, module.training
    try:
        yield StockModel(open_checkpoint(module), module.to(device or home).eval(), str(device or home))
    finally:
        module.to(home).train(training)
