"""Random inputs through stock `transformers` models: do two checkpoints compute the same?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint
from isomerge.packages import require_version, why_not_imported
from isomerge.running.stock import load_stock

IMAGE = 64  # pixels, where config.json does not say
LENGTH = 12  # tokens: long enough for every position-dependent part, short enough for any position table


def random_inputs(model: Any, seed: int = 0, batch: int = 2) -> dict[str, Tensor]:
    """Inputs of the right kind for a model, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": _images(model, batch, generator)}
    if model.main_input_name == "input_features":
        return _sound(model, batch, generator)
    inputs = _sentences(model, batch, generator)
    two_towers = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")
    return {**inputs, "pixel_values": _images(model, len(inputs["input_ids"]), generator)} if two_towers else inputs


def _images(model: Any, batch: int, generator: torch.Generator) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None) or IMAGE  # convolutions alone take any
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    dtype = next(model.parameters()).dtype
    return torch.randn(batch, getattr(config, "num_channels", 3), height, width, generator=generator).to(dtype)


def _sound(model: Any, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A spectrogram of the one length there is; with a decoder, some tokens."""
    config, dtype = model.config, next(model.parameters()).dtype
    shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)
    inputs = {"input_features": torch.randn(shape, generator=generator).to(dtype)}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = torch.randint(0, config.vocab_size, (batch, LENGTH // 2), generator=generator)
    return inputs


def _sentences(model: Any, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    config = getattr(model.config, "text_config", model.config)
    try:
        table = model.get_input_embeddings().weight.shape[0]
    except NotImplementedError:  # of two towers, none is the input
        table = config.vocab_size
    length = min(LENGTH, int(getattr(config, "max_position_embeddings", 0) or LENGTH) - 3)
    # Any token but the padding one, which some models mask or skip a position for.
    padding = getattr(config, "pad_token_id", None)
    ids = torch.randint(0, table, (batch, max(1, length)), generator=generator)
    if padding is not None and table > 1:
        ids = torch.where(ids == padding, (ids + 1) % table, ids)
    if padding is None:
        ids = ids[:1]  # without a padding token, classifiers take one sequence at a time
    if type(model).__name__.endswith("ForMultipleChoice"):
        ids = ids[:, None].repeat(1, 2, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, int):  # sequence classification reads the state at the end-of-sequence token
            inputs["input_ids"] = torch.where(ids == eos, (ids + 2) % table, ids)
            inputs["input_ids"][:, -1] = eos
        inputs["decoder_input_ids"] = inputs["input_ids"].roll(1, dims=1)
    return inputs


def outputs(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """All floating-point outputs of a model as one vector, logits first."""
    if getattr(model.config, "_experts_implementation", None):
        model.config._experts_implementation = "eager"  # fused kernels refuse some sizes, and this is about exactness
    with torch.no_grad():
        result = model(**inputs)
    names = ("logits", "start_logits", "end_logits", "prediction_logits")
    logits = [result[name] for name in names if result.get(name) is not None]
    if not logits:
        logits = [v for v in result.values() if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.cat([t.double().flatten() for t in logits])


def largest_difference(
    first: Checkpoint,
    second: Checkpoint,
    *,
    seed: int = 0,
    max_memory: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[float | None, str]:
    """max |f(x) − g(x)| over random inputs, relative to max |f(x)|; or None with the reason it could not be had.

    Weights that cannot be read are an error: it says something about the checkpoint, not about its class.
    """
    try:
        require_version("transformers")
        import transformers  # noqa: F401
    except ImportError as error:
        return None, f"comparing outputs needs transformers: {why_not_imported('transformers', error)}"
    need = 2 * dtype.itemsize * sum(torch.Size(info.shape).numel() for info in first.tensors.values())
    if max_memory is not None and need > max_memory:
        return None, f"loading the model takes {need / 1e9:.1f} GB, more than `max_memory` allows"
    if not first.config:
        return None, f"{first.name} has no config.json, so no stock class can load it"
    weights = _weights(first)
    try:
        model = load_stock(first.config, weights, dtype=dtype, folder=first.folder)
        inputs = random_inputs(model, seed)
        expected = outputs(model, inputs)
        del model, weights
    except Exception as error:
        return None, _could_not_run(first, error)
    weights = _weights(second)
    try:
        got = outputs(load_stock(second.config, weights, dtype=dtype, folder=second.folder), inputs)
    except Exception as error:
        return None, _could_not_run(first, error)
    finite = expected.isfinite()  # a mask of −∞ is an output too, and the same in both
    if not finite.any():
        return None, f"the outputs of {first.name} itself are not finite"
    if not torch.allclose(got[~finite], expected[~finite], equal_nan=True) or not got[finite].isfinite().all():
        return math.inf, ""
    scale = float(expected[finite].abs().max()) or 1.0
    return float((got - expected)[finite].abs().max()) / scale, ""


def _weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def _could_not_run(checkpoint: Checkpoint, error: Exception) -> str:
    """A class that cannot be run here says nothing about the checkpoint."""
    return f"{checkpoint.name} could not be run in its stock class: {' '.join(str(error).split())[:300]}"
