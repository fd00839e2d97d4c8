"""LoRA and LyCORIS files of diffusion models: one safetensors file that names layers in its trainer's way.

kohya's scripts write `lora_unet_down_blocks_1_attentions_0_proj_in.lora_down.weight`, dots as underscores, for the
names of diffusers or of the original code; diffusers writes `unet.down_blocks.1.attentions.0.proj_in.lora_A.weight`.
With rank r and α, ΔW is

    LoRA   α/r · B A                     (a middle factor of convolutions between the two: Tucker)
    LoHa   α/r · (B₁ A₁) ⊙ (B₂ A₂)       (Hyeon-Woo et al., 2022, arXiv:2108.06098)
    LoKr   α/r · C ⊗ (B A)               (Edalati et al., 2022, arXiv:2212.10650; α/r is 1 where both are whole)
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo, open_checkpoint, require_finite
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.files import SpannedFile
from isomerge.checkpoint.local import FileCheckpoint
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.json_files import JsonError, checked, parse_json

FILE = "pytorch_lora_weights.safetensors"
"""In the folder that diffusers writes."""
PARTS = {
    "lora_down.weight": "down", "lora_up.weight": "up", "lora_mid.weight": "mid", "lora_A.weight": "down",
    "lora_B.weight": "up", "lora.down.weight": "down", "lora.up.weight": "up",
    "lora_linear_layer.down.weight": "down", "lora_linear_layer.up.weight": "up", "alpha": "alpha",
    **{f"hada_{part}": part for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f"lokr_{part}": f"k_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
}  # fmt: skip
"""What follows a layer's name, and what it is here."""
KEY = re.compile(r"(.+?)\.(" + "|".join(map(re.escape, PARTS)) + ")")
FRONTS: Mapping[str, tuple[str, ...]] = {
    "lora_unet": ("unet", "transformer"), "lora_transformer": ("transformer", "unet"), "lora_prior_unet": ("prior",),
    "lycoris": ("unet", "transformer"), "lora_te": ("text_encoder",), "lora_te1": ("text_encoder",),
    "lora_te2": ("text_encoder_2",), "lora_te3": ("text_encoder_3",),
}  # fmt: skip
"""What kohya calls the components, the longest first when one is looked for."""
SINGLE: Mapping[str, tuple[str, ...]] = {
    "model.diffusion_model.": ("lora_unet", "lora_transformer", "lycoris"),
    "conditioner.embedders.0.transformer.": ("lora_te1", "lora_te"),
    "cond_stage_model.transformer.": ("lora_te",),
    "": ("lora_unet", "lora_transformer", "lycoris"),
}
"""How components begin in one file that holds all of them, and what kohya calls them; the last: one component alone."""
INNER = (("in_layers.2", "conv1"), ("out_layers.3", "conv2"), ("in_layers.0", "norm1"), ("out_layers.0", "norm2"),
          ("emb_layers.1", "time_emb_proj"), ("skip_connection", "conv_shortcut"))  # fmt: skip
BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")


class StoredSettings(BaseModel):
    """What diffusers writes into the header of such a file."""

    settings: dict[str, Any]


@dataclass
class Update:
    """What is stored for one layer."""

    parts: dict[str, str] = field(default_factory=dict)
    """The names of tensors in the file, by what they are."""


class DiffusionAdapter:
    """The file, opened by its header: the layers it changes, by their names there."""

    def __init__(self, checkpoint: FileCheckpoint) -> None:
        self.checkpoint, self.name = checkpoint, checkpoint.name
        self.updates: dict[str, Update] = {}
        unknown = []
        for key in checkpoint.tensors:
            found = KEY.fullmatch(key)
            if found is None:
                unknown.append(key)
                continue
            self.updates.setdefault(found[1], Update()).parts[PARTS[found[2]]] = key
        if unknown:
            raise CheckpointError(
                f"While opening adapter {self.name}: isomerge knows no meaning for {name_some(unknown)}. LoRA, LoHa "
                "and LoKr are read; merge others into their base with the program that made them."
            )
        self.alphas = _alphas(checkpoint)

    def read(self, key: str) -> Tensor:
        tensor = self.checkpoint.read(key)
        require_finite(key, tensor, self.checkpoint)
        return tensor.float()

    def change(self, layer: str, shape: tuple[int, ...]) -> Tensor:
        """ΔW of a layer whose weight has this shape, in float32."""
        parts = self.updates[layer].parts
        values = {part: self.read(key) for part, key in parts.items()}
        try:
            change, rank = _product(values)
            alpha = float(values["alpha"]) if "alpha" in values else self.alphas.get(layer, float(rank))
            return (change * (alpha / rank)).reshape(shape)
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"While reading adapter {self.name}: its tensors {name_some(sorted(parts.values()), 8)} do not make a "
                f"change of shape {shape}. Use an intact copy, or the base that it was trained on."
            ) from error


def _product(values: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """ΔW before it is scaled, and the rank that α is divided by."""
    if "up" in values:
        up, down = values["up"], values["down"]
        if "mid" in values:  # (rank, rank, h, w) between 1×1 convolutions
            change = torch.einsum("o r, r s h w, s i -> o i h w", up.flatten(1), values["mid"], down.flatten(1))
            return change, down.shape[0]
        return up.flatten(1) @ down.flatten(1), down.shape[0]
    if "w1_a" in values:
        rank = values["w1_b"].shape[0]
        return _half(values, "1") * _half(values, "2"), rank
    first, first_rank = _whole(values, "k_w1", None)
    second, second_rank = _whole(values, "k_w2", values.get("k_t2"))
    while first.dim() < second.dim():
        first = first.unsqueeze(-1)
    factored = second_rank or first_rank
    if factored is None:  # both are whole, and α has no meaning
        return torch.kron(first, second) / _alpha_of(values), 1
    return torch.kron(first, second), factored


def _alpha_of(values: Mapping[str, Tensor]) -> float:
    """So that α over a rank of 1 leaves 1."""
    return float(values["alpha"]) if "alpha" in values and float(values["alpha"]) else 1.0


def _half(values: Mapping[str, Tensor], which: str) -> Tensor:
    a, b = values[f"w{which}_a"], values[f"w{which}_b"]
    if f"t{which}" in values:  # (rank, rank, h, w)
        return torch.einsum("i j h w, j o, i p -> p o h w", values[f"t{which}"], b, a)
    return a @ b


def _whole(values: Mapping[str, Tensor], name: str, middle: Tensor | None) -> tuple[Tensor, int | None]:
    if name in values:
        return values[name], None
    a, b = values[f"{name}_a"], values[f"{name}_b"]
    if middle is not None:
        return torch.einsum("i j h w, i p, j o -> p o h w", middle, a, b), b.shape[0]
    return a @ b, b.shape[0]


def _alphas(checkpoint: FileCheckpoint) -> dict[str, float]:
    """By layer, where diffusers stores them in the header; else a layer's own α, or its rank."""
    found: dict[str, float] = {}
    for file in checkpoint.files():
        text = file.metadata().get("lora_adapter_metadata") if isinstance(file, SpannedFile) else None
        if not text:
            continue
        try:
            said = checked(StoredSettings, {"settings": parse_json(text)}).settings
            components = sorted({key.partition(".")[0] for key in said})
        except JsonError as error:
            raise CheckpointError(
                f"While opening adapter {checkpoint.name}: its lora_adapter_metadata is not a table ({error}). Use an "
                "intact copy."
            ) from error
        for component in components:
            alpha, patterns = said.get(f"{component}.lora_alpha"), said.get(f"{component}.alpha_pattern")
            patterns = patterns if isinstance(patterns, dict) else {}
            if said.get(f"{component}.use_rslora"):
                raise CheckpointError(
                    f"While opening adapter {checkpoint.name}: it was trained as rsLoRA, which is read from folders of "
                    "PEFT alone. Merge it into its base with diffusers (fuse_lora)."
                )
            for key in checkpoint.tensors:
                layer = KEY.fullmatch(key)
                if layer is None or not key.startswith(component) or not isinstance(alpha, (int, float)):
                    continue
                numbers = {pattern: value for pattern, value in patterns.items() if isinstance(value, (int, float))}
                own = [value for pattern, value in numbers.items() if layer[1].endswith(pattern)]
                found[layer[1]] = float(own[0] if own else alpha)
    return found


# --- which layer ------------------------------------------------------------------------------------------------------
def layers_of(base: Checkpoint) -> dict[str, str]:
    """Every name that a trainer may give a weight's layer → the weight. Of two components the first named counts."""
    names: dict[str, str] = {}
    for tensor in base.tensors:
        if not tensor.endswith(".weight") or len(base.tensors[tensor].shape) < 2:
            continue
        for name in _names_of(tensor.removesuffix(".weight"), set(base.stems)):
            names.setdefault(name, tensor)
    return names


def _names_of(layer: str, components: set[str]) -> Iterator[str]:
    component, slash, inner = layer.partition("/")
    if slash:
        yield f"{component}.{inner}"
        meant = {front: next((part for part in parts if part in components), "") for front, parts in FRONTS.items()}
        fronts = [front for front, part in meant.items() if part == component]
    else:
        begin = next(front for front in SINGLE if layer.startswith(front))
        inner, fronts = layer.removeprefix(begin), list(SINGLE[begin])
        component = "unet" if "lora_unet" in fronts else ""
        yield from (f"{name}.{inner}" for name in (("unet", "transformer") if component else ()))
        yield inner
    for name in dict.fromkeys((inner, *(_original(inner) if component == "unet" else ()))):
        yield from (f"{front}_{name.replace('.', '_')}" for front in fronts)


def _original(name: str, layers: int = 2) -> Iterator[str]:
    """What the original code of Stable Diffusion calls a layer of diffusers' U-Net.

    >>> list(_original("down_blocks.1.attentions.0.proj_in"))
    ['input_blocks.4.1.proj_in']
    """
    simple = {"conv_in": "input_blocks.0.0", "conv_out": "out.2", "time_embedding.linear_1": "time_embed.0",
              "time_embedding.linear_2": "time_embed.2", "add_embedding.linear_1": "label_emb.0.0",
              "add_embedding.linear_2": "label_emb.0.2"}  # fmt: skip
    if name in simple:
        yield simple[name]
        return
    if name.startswith("mid_block."):
        kind, number, rest = (*name.split(".", 3)[1:], "")[:3]
        middle = 1 if kind == "attentions" else 2 * int(number)
        yield f"middle_block.{middle}.{_inner(rest) if kind == 'resnets' else rest}"
        return
    found = BLOCK.fullmatch(name)
    if found is None:
        return
    side, kind, rest = found[1], found[3], found[5]
    first, place = int(found[2]) * (layers + 1), int(found[4])
    if kind.endswith("samplers"):
        place = layers
    if side == "down":
        inside = {"resnets": f"0.{_inner(rest)}", "attentions": f"1.{rest}", "downsamplers": "0.op"}[kind]
        yield f"input_blocks.{1 + first + place}.{inside}"
    elif kind == "upsamplers":  # after the attention, or in its place
        yield from (f"output_blocks.{first + place}.{slot}.conv" for slot in (2, 1))
    else:
        yield f"output_blocks.{first + place}.{f'0.{_inner(rest)}' if kind == 'resnets' else f'1.{rest}'}"


def _inner(rest: str) -> str:
    return next((old for old, new in INNER if new == rest), rest)


# --- the view ---------------------------------------------------------------------------------------------------------
class TunedPipeline(Checkpoint):
    """W + ΔW in float32; the rest as the base has it."""

    def __init__(self, base: Checkpoint, adapter: DiffusionAdapter, layers: Mapping[str, str], name: str) -> None:
        """`layers`: of the base's tensors, which layer of the adapter changes it."""
        self.name, self.config, self.folder, self.revision = name, base.config, base.folder, base.revision
        self.description, self.stems = base.description, base.stems
        self.tensors: Mapping[str, TensorInfo] = base.tensors
        self._base, self._adapter, self._layers = base, adapter, dict(layers)
        self._last = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_last": threading.local()}

    def side_files(self) -> list[Path]:
        return self._base.side_files()

    def parts(self) -> list[Checkpoint]:
        return [self._base, self._adapter.checkpoint]

    def identity(self) -> Any:
        known = [part.identity() for part in self.parts()]
        return None if None in known else known

    def read(self, name: str) -> Tensor:
        if name not in self._layers:
            return self._base.read(name)
        return self._base.read(name).float() + self._change(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        rows = self._base.read_rows(name, start, stop)
        return rows.float() + self._change(name)[start:stop] if name in self._layers else rows

    def _change(self, name: str) -> Tensor:
        """This thread keeps that of the last tensor: a merge reads it block by block."""
        if getattr(self._last, "name", None) != name:
            self._last.change = self._adapter.change(self._layers[name], self.tensors[name].shape)
            self._last.name = name
        change: Tensor = self._last.change
        return change


def diffusion_file(path: str) -> Path | None:
    """The file of a LoRA of a diffusion model: itself, or the one in the folder that diffusers wrote."""
    given = Path(path).expanduser()
    if given.is_file() and given.suffix == ".safetensors" and not (given.parent / "adapter_config.json").is_file():
        return given
    return given / FILE if (given / FILE).is_file() and not (given / "adapter_config.json").is_file() else None


def open_diffusion_adapter(path: Path) -> DiffusionAdapter:
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, FileCheckpoint)
    checkpoint.kind = KIND
    return DiffusionAdapter(checkpoint)


KIND = "diffusion adapter"
"""What a lock calls such a file."""


def apply_diffusion_adapter(base: Checkpoint, path: Path, name: str) -> Checkpoint:
    """A base with such a file on top; every layer of it must be one of the base's."""
    adapter = open_diffusion_adapter(path)
    known = layers_of(base)
    chosen, foreign = {}, []
    for layer in adapter.updates:
        tensor = known.get(layer) or known.get(_without_wrapper(layer))
        if tensor is None:
            foreign.append(layer)
        else:
            chosen[tensor] = layer
    if foreign:
        raise RequestError(
            f"While applying adapter {adapter.name} to {base.name}: {len(foreign)} of its {len(adapter.updates)} "
            f"layers are not in the base ({name_some(sorted(foreign), 3)}). Name the base that it was trained on, "
            "with all of its components."
        )
    found = TunedPipeline(base, adapter, chosen, name)
    for tensor in chosen:
        _require_fit(adapter, chosen[tensor], base.tensors[tensor].shape, tensor)
    return found


def _without_wrapper(layer: str) -> str:
    """As old versions of diffusers called attention's layers: `attn1.processor.to_q`, `to_out` without a number."""
    plain = layer.replace(".processor.", ".").replace("_lora", "")
    return re.sub(r"\.to_out$", ".to_out.0", plain)


def _require_fit(adapter: DiffusionAdapter, layer: str, shape: tuple[int, ...], tensor: str) -> None:
    """By headers, where the factors say it: a LoRA's outputs and inputs."""
    parts, tensors = adapter.updates[layer].parts, adapter.checkpoint.tensors
    if "up" not in parts or "down" not in parts:
        return
    outputs, inputs = tensors[parts["up"]].shape[0], tensors[parts["down"]].shape[1]
    if (outputs, inputs) != shape[:2]:
        raise IsomergeError(
            f"While applying adapter {adapter.name}: '{layer}' changes a layer of {inputs} inputs and {outputs} "
            f"outputs, and '{tensor}' is {shape}. Name the base that it was trained on."
        )
