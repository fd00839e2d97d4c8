"""FP8 weights with scales, and MXFP4 experts: folders of safetensors, read as the bfloat16 model they stand for.

FP8: W = stored · scale, one scale for the tensor, for each row, or for each block of `weight_block_size` (DeepSeek-V3).
MXFP4: 32 values of 4 bits share one power of two (OCP Microscaling Formats, 2023; gpt-oss stores experts so).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint, TensorInfo, failure
from isomerge.checkpoint.formats.decoded import AsStored, DecodedCheckpoint, Decoder

SCALED = ("fp8", "fbgemm_fp8", "mxfp8", "compressed-tensors", "mxfp4")
"""What `quant_method` says of weights that may be read here."""
FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
SCALES = ("_scale_inv", "_scale")
"""What a weight's scale is called after it. Both are multiplied, whatever the first one's name says."""
UNUSED = (
    "input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale", "q_scale", "k_proj.output_scale",
    "v_proj.output_scale",
)  # fmt: skip
"""Of activations, which have no place in a model of bfloat16."""
GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
PAIRS = torch.tensor([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)])
"""The two values of a byte, the low half first."""
WRITTEN = torch.bfloat16
AGAIN = "Download the model again; or dequantise it with transformers and save it with save_pretrained."


@dataclass(frozen=True)
class ScaledRows(Decoder):
    """Rows of FP8 times their scales, in float32."""

    info: TensorInfo
    weight: str
    scale: str
    block: tuple[int, int]
    """How many rows and columns share one scale."""
    grid: tuple[int, ...]

    def rows(self, stored: Checkpoint, start: int, stop: int) -> Tensor:
        values = stored.read_rows(self.weight, start, stop).float()
        high, wide = self.block
        if len(self.info.shape) > 2:  # a stack of experts: a row is a whole matrix with a grid of its own
            first, last, skip = start, stop, 0
        else:
            first, last, skip = start // high, -(-stop // high), start % high
        scales = as_scales(stored.read(self.scale).reshape(self.grid)[first:last])
        rows, columns = values.shape[-2:]
        scales = scales.repeat_interleave(high, -2)[..., skip : skip + rows, :]
        return values.mul_(scales.repeat_interleave(wide, -1)[..., :columns])


@dataclass(frozen=True)
class MicroscaledExperts(Decoder):
    """(experts, outputs, groups, 16 bytes) and (experts, outputs, groups) → (experts, inputs, outputs): every value is
    one of bfloat16."""

    info: TensorInfo
    blocks: str
    scales: str

    def rows(self, stored: Checkpoint, start: int, stop: int) -> Tensor:
        exponents = stored.read_rows(self.scales, start, stop).to(torch.int32) - 127  # a copy, before the next read
        packed = stored.read_rows(self.blocks, start, stop)
        values = torch.ldexp(PAIRS[packed.int()].flatten(-2), exponents.unsqueeze(-1))
        return values.to(WRITTEN).flatten(-2).transpose(1, 2)


def as_scales(scales: Tensor) -> Tensor:
    """In float32. A byte is the exponent of a power of two, as E8M0 has it."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The same, or a view of bfloat16 where its weights are stored as FP8 or MXFP4."""
    quantization = checkpoint.config.get("quantization_config")
    if not isinstance(quantization, Mapping) or checkpoint.in_memory or checkpoint.read_as:
        return checkpoint
    if quantization.get("quant_method") not in SCALED:
        return checkpoint
    plan = _Plan(checkpoint, quantization)
    if not plan.kinds:
        return checkpoint  # of another kind, such as integers of compressed-tensors: refused where it is used
    if plan.problems:
        raise failure(f"opening checkpoint {checkpoint.name}", plan.problems, AGAIN)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = "bfloat16"
    read_as = f"{' and '.join(sorted(plan.kinds))}, and read as bfloat16, without its quantization_config"
    if plan.unused:
        read_as += f" and without the {len(plan.unused)} scales of its activations"
    return DecodedCheckpoint(checkpoint, plan.decoders, config=config, read_as=read_as)


class _Plan:
    """Which stored tensors make which of the model."""

    def __init__(self, stored: Checkpoint, quantization: Mapping[str, Any]) -> None:
        self.stored, self.problems = stored, list[str]()
        self.kinds: set[str] = set()
        self.decoders: dict[str, Decoder] = {}
        self.block = _block(quantization.get("weight_block_size"))
        if self.block is None:
            self.problems.append(
                f"quantization_config: weight_block_size is {str(quantization['weight_block_size'])[:60]}, and two "
                "whole numbers are needed"
            )
        used: set[str] = set()
        for name, info in stored.tensors.items():
            if info.dtype in FLOAT8:
                used |= self._scaled(name, info)
            elif name.endswith("_blocks") and info.dtype == torch.uint8:
                used |= self._microscaled(name, info)
        self.unused = sorted(name for name in stored.tensors if name.endswith(UNUSED))
        rest = [name for name in stored.tensors if name not in used and name not in self.unused]
        self.decoders |= {name: AsStored(name, stored.tensors[name]) for name in rest}

    def _scaled(self, name: str, info: TensorInfo) -> set[str]:
        self.kinds.add("FP8")
        scale = next((name + end for end in SCALES if name + end in self.stored.tensors), None)
        if scale is None:
            self.problems.append(
                f"'{name}' is stored as FP8, and there is no '{name}{SCALES[0]}' or '{name}{SCALES[1]}'"
            )
            return {name}
        found = _grid(info.shape, self.stored.tensors[scale].shape, self.block)
        if found is None:
            shape = self.stored.tensors[scale].shape
            self.problems.append(f"'{scale}' is {shape}, which does not divide '{name}' of {info.shape} into blocks")
            return {name, scale}
        block, grid = found
        self.decoders[name] = ScaledRows(TensorInfo(info.shape, WRITTEN), name, scale, block, grid)
        return {name, scale}

    def _microscaled(self, name: str, info: TensorInfo) -> set[str]:
        self.kinds.add("MXFP4")
        whole, scales = name.removesuffix("_blocks"), name.removesuffix("_blocks") + "_scales"
        shape = self.stored.tensors[scales].shape if scales in self.stored.tensors else None
        if shape is None or len(info.shape) != 4 or info.shape[-1] * 2 != GROUP or shape != info.shape[:-1]:
            self.problems.append(f"'{name}' is {info.shape} and '{scales}' is {shape or 'not there'}")
            return {name, scales}
        experts, outputs, groups, _ = info.shape
        self.decoders[whole] = MicroscaledExperts(TensorInfo((experts, groups * GROUP, outputs), WRITTEN), name, scales)
        return {name, scales}


def _block(said: Any) -> tuple[int, int] | None:
    """(0, 0) where nothing is said; None for nonsense."""
    if said is None:
        return 0, 0
    if isinstance(said, list) and len(said) == 2 and all(type(n) is int and n > 0 for n in said):
        return said[0], said[1]
    return None


def _grid(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, ...]] | None:
    """The block of one scale, and the shape of all scales, leading axes and two more.

    >>> _grid((6, 8), (2, 2), (3, 4)), _grid((6, 8), (), (0, 0)), _grid((6, 8), (6, 1), (0, 0))
    (((3, 4), (2, 2)), ((6, 8), (1, 1)), ((1, 8), (6, 1)))
    """
    if len(shape) < 2 or block is None or 0 in shape:
        return None
    *lead, rows, columns = shape
    if all(block):
        grid = (*lead, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
        if scales == grid:
            return block, grid
    count = math.prod(scales)
    stack = math.prod(lead)
    if count == stack and (not lead or scales[:1] == shape[:1]):
        return (rows, columns), (*lead, 1, 1)
    if count == 1:
        return ((rows, columns), (1, 1)) if not lead else None
    if count == stack * rows and scales[: len(lead) + 1] == (*lead, rows):
        return (1, columns), (*lead, rows, 1)
    return None
