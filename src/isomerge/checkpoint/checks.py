"""What arithmetic on weights needs: floating-point numbers, finite ones, and models of one size."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import torch

from isomerge.checkpoint.base import Checkpoint, failure, name_some
from isomerge.checkpoint.config_meaning import settings
from isomerge.errors import CheckpointError

FLOATING = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
WHOLE = {torch.bool, torch.int64}
"""Masks, counters and indices: nobody stores quantised weights in these."""
BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|(attn|attention)\.bias|masked_bias|inv_freq|"
    r"relative_position_index)$"
)

OTHERWISE = "Use the unquantised model, or dequantise this one and save it first."
WAY_OUT = {
    "bitsandbytes": (
        "Use the unquantised model; or load this one with transformers (it needs the bitsandbytes package), call "
        "model.dequantize(), and save it with save_pretrained."
    ),
    "mlx": (
        "MLX packs them in groups: use the unquantised model, or dequantise this one first (mlx_lm.convert does it)."
    ),
    **dict.fromkeys(
        ("gptq", "awq", "auto-round"),
        "Use the model that it was quantised from, which its card names: 4-bit codes in groups are not read. Or "
        "dequantise it with the package that made it, and save it as bfloat16.",
    ),
}


def is_harmless_buffer(name: str) -> bool:
    """Buffers that old checkpoints carry along and models make anew: copied, never moved or merged.

    >>> is_harmless_buffer("h.0.attn.bias"), is_harmless_buffer("h.0.attn.c_attn.qweight")
    (True, False)
    """
    return BUFFERS.search(name) is not None


def is_buffer(checkpoint: Checkpoint, name: str) -> bool:
    """A tensor that is no weight, by its name or since it holds whole numbers: copied, never moved or merged."""
    return checkpoint.tensors[name].dtype in WHOLE or is_harmless_buffer(name)


def require_floating(checkpoint: Checkpoint, weights: Collection[str] = ()) -> None:
    """Raise unless every weight is an unquantised float. Buffers pass, unless they are among the `weights`."""
    problems: list[str] = []
    quantization = checkpoint.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization:
        problems.append(f"config.json has a quantization_config{f' ({method})' if method else ''}")
    elif any(name.endswith(".scales") and name[:-6] + "biases" in checkpoint.tensors for name in checkpoint.tensors):
        method = "mlx"
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, info in checkpoint.tensors.items():
        if info.dtype not in FLOATING and (name in weights or not is_buffer(checkpoint, name)):
            by_dtype.setdefault(info.dtype, []).append(name)
    for dtype, names in by_dtype.items():
        problems.append(f"stored as {str(dtype).removeprefix('torch.')}: {name_some(names)}")
    if problems:
        raise failure(
            f"checking that the weights of {checkpoint.name} can be merged",
            problems,
            f"Quantised weights cannot be added. {WAY_OUT.get(str(method), OTHERWISE)}",
        )


def require_finite(name: str, tensor: torch.Tensor, checkpoint: Checkpoint) -> None:
    """Raise when a tensor holds NaN or infinity, with how many."""
    require_finite_values(f"tensor '{name}' of {checkpoint.name}", tensor)


def require_finite_values(label: str, tensor: torch.Tensor) -> None:
    """The same for a tensor, or a part of one, that `label` describes."""
    # One reduction instead of a mask: a finite sum has only finite terms. (Finite ones may overflow; then look closer.)
    wide = torch.float32 if tensor.element_size() < 4 else tensor.dtype
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum(dtype=wide))):
        return
    if bool(tensor.isfinite().all()):
        return
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    raise CheckpointError(
        f"While reading {label}: {nan} of its {tensor.numel()} values are NaN and {infinite} are infinite, which "
        "would spread through every merge. Use an intact copy of this model."
    )


DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
OTHERS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")


def differences_in_size(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Every size that both configs name and that is not the same, in words."""
    names = {key: f"different depth: {key}" for key in DEPTH_KEYS}
    names |= {key: f"different width: {key}" for key in WIDTH_KEYS}
    names |= {key: key for key in OTHERS}
    differences = []
    sides = [settings(checkpoint.config) for checkpoint in (first, second)]
    for key, said in names.items():
        one, other = (said_by.get(key) for said_by in sides)
        if None not in (one, other) and one != other:
            differences.append(f"{said} is {one} and {other}")
    return differences
