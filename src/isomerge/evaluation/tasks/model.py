"""A model ready to run: the stock module, with the checkpoint that says what it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.adapters.adapter import require_model
from isomerge.checkpoint import Checkpoint, open_checkpoint, require_floating
from isomerge.checkpoint.base import name_some
from isomerge.data.base import Batch, floating
from isomerge.errors import CheckpointError, RequestError
from isomerge.evaluation.device import require_device
from isomerge.evaluation.probe import load_stock


@dataclass
class Loaded:
    checkpoint: Checkpoint
    module: Any
    device: str
    was_training: bool = False

    def run(self, batch: Batch) -> Mapping[str, Any]:
        """The outputs for one batch; labels are left out, except where the class makes its inputs from them."""
        made_from_labels = getattr(self.module.config, "is_encoder_decoder", False) and "decoder_input_ids" not in batch
        inputs = {k: v for k, v in batch.items() if k != "labels" or made_from_labels}
        self._require_known_tokens(inputs)
        with torch.no_grad():
            outputs: Mapping[str, Any] = self.module(**inputs)
        return outputs

    def _require_known_tokens(self, inputs: Mapping[str, Tensor]) -> None:
        ids = inputs.get("input_ids")
        if ids is None:
            return
        rows = self.module.get_input_embeddings().weight.shape[0]
        if int(ids.max()) >= rows:
            raise CheckpointError(
                f"Evaluating {self.checkpoint.name}: its tokenizer gives token {int(ids.max())} and the embedding has "
                f"{rows} rows. The tokenizer beside the weights is of another model; copy the right one there."
            )


@contextlib.contextmanager
def load_model(model: Any, device: str | None = None) -> Iterator[Loaded]:
    """A path, hub id or checkpoint is loaded; a module is used as it is, and left as it was."""
    if isinstance(model, nn.Module):
        module: Any = model
        if not hasattr(module, "config"):
            raise RequestError(
                f"Evaluating a {type(module).__name__}: only modules of transformers say what they are for. Pass "
                "loss=function, or evaluate it with a function of your own."
            )
        home, training = next(module.parameters()).device, module.training
        try:
            yield Loaded(open_checkpoint(module), module.to(device or home).eval(), str(device or home), training)
        finally:
            module.to(home).train(training)
        return
    checkpoint = open_checkpoint(model)
    require_floating(checkpoint)
    require_device(device or "cpu")
    require_runnable(checkpoint)
    module = load_stock(checkpoint.config, read_weights(checkpoint), dtype=floating(checkpoint))
    yield Loaded(checkpoint, module.to(device or "cpu"), device or "cpu")


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors, to run the model. NaN has to be found here: attention kernels can swallow it, and the model would
    go on with numbers that mean nothing."""
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


def require_runnable(checkpoint: Checkpoint) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise RequestError("Running a model: 'transformers' is not installed (pip install isomerge[hf]).") from error
    require_model(checkpoint)
    if not checkpoint.config:
        raise CheckpointError(
            f"Running {checkpoint.name}: it has no config.json, so no stock class can load it. Copy it from where the "
            "model came."
        )
