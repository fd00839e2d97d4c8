"""Write a model as one GGUF file, a block of rows at a time."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint, Progress, name_some
from isomerge.checkpoint.checks import is_harmless_buffer, require_finite_values, require_floating
from isomerge.checkpoint.formats.gguf_families import COMMON, FAMILIES, GgufFamily, family_written, query_width
from isomerge.checkpoint.formats.gguf_layout import gguf_package, heads_turned, is_shifted, places, stock_shapes
from isomerge.checkpoint.formats.gguf_rotary import rotary_written
from isomerge.checkpoint.formats.gguf_vocabulary import GgufVocabulary, read_vocabulary
from isomerge.checkpoint.permissions import closed_by, restrict
from isomerge.checkpoint.staging import check_space, disk_failure
from isomerge.checkpoint.stock_classes import class_config
from isomerge.errors import CheckpointError

FILE_TYPES: Mapping[str, int] = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2,
}  # fmt: skip
"""The types that the gguf package can write, with the number that a file has for each."""
BLOCK_ELEMENTS = 2**21
ACTS = ("hidden_act", "hidden_activation", "layer_types")
"""Settings that GGUF has no entry for: its programs take those of the class for granted."""


@dataclass(frozen=True)
class GgufSource:
    """One tensor of the file and the model's tensors that it is made of: several of them are a stack of experts."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    heads: int
    """Of query and key rows, where the file has rotary pairs."""
    shifted: bool


def write_gguf(
    checkpoint: Checkpoint, out: Path, kind: str, *, progress: Progress | None = None
) -> tuple[int, int, list[str]]:
    """Tensors, bytes and notes of the file that is now at `out`."""
    act = f"writing {out}"
    gguf = gguf_package(act)
    require_floating(checkpoint)
    family = _family(checkpoint, act)
    config = _whole_config(family, checkpoint, act)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    _require_sayable(family, config, head, act)
    notes: list[str] = []
    tensors = _layout(family, config, checkpoint, kind, act, notes)
    said, factors = rotary_written(family, config, head, act)
    vocabulary = read_vocabulary(checkpoint.folder, config["vocab_size"], _special(config))
    if vocabulary.problem:
        notes.append(f"the file has no tokenizer: {vocabulary.problem}")
    out.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(_bytes_of(gguf, tensor) for tensor in tensors)
    check_space(out.parent, needed)
    aside = _beside(out)
    writer = gguf.GGUFWriter(aside, family.arch)
    try:
        restrict(aside, closed_by([checkpoint]))
        _write_metadata(writer, family, config, said, head, kind, checkpoint)
        _write_vocabulary(writer, vocabulary, config)
        for name, values in factors.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for tensor in tensors:
            _announce(gguf, writer, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_data(gguf, writer, checkpoint, factors, tensors, progress)
        writer.flush()
        size = aside.stat().st_size
        writer.close()
        os.replace(aside, out)
    except OSError as error:
        raise disk_failure(out, needed, error) from error
    finally:
        with contextlib.suppress(Exception):
            writer.close()
        aside.unlink(missing_ok=True)
    return len(tensors) + len(factors), size, notes


def _beside(out: Path) -> Path:
    aside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    aside.touch()
    return aside


# --- what GGUF can say ------------------------------------------------------------------------------------------------
def _family(checkpoint: Checkpoint, act: str) -> GgufFamily:
    family = family_written(checkpoint.config.get("model_type"))
    if family is None:
        known = ", ".join(one.model_type for one in FAMILIES)
        raise CheckpointError(
            f"While {act}: {checkpoint.name} is of type '{checkpoint.config.get('model_type')}', and GGUF is written "
            f"for {known}. Convert the folder with the program of llama.cpp that knows it."
        )
    return family


def _whole_config(family: GgufFamily, checkpoint: Checkpoint, act: str) -> dict[str, Any]:
    """With the defaults of its class."""
    stock_shapes(family, checkpoint.config, act)  # whatever is wrong with transformers or the config is said here
    import transformers

    made = class_config(getattr(transformers, family.class_name), checkpoint.config)
    # Some classes keep a setting under another name than the one that they read it from.
    return {**made.to_dict(), **{key: getattr(made, key, None) for _, key, _ in (*COMMON, *family.settings)}}


def _require_sayable(family: GgufFamily, config: Mapping[str, Any], head: int, act: str) -> None:
    """Raise for a setting that changes what the model computes and that no entry of GGUF is for."""
    import transformers

    kind = getattr(transformers, family.class_name).config_class
    usual = kind(num_hidden_layers=config["num_hidden_layers"]).to_dict()
    odd = [key for key in ACTS if key in config and config[key] != usual.get(key)]
    odd += [key for key, value in family.fixed if config.get(key, value) != value]
    if family.wide_queries is not None:
        layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        if config.get("query_pre_attn_scalar") != query_width(family, layers, hidden, heads, head):
            odd.append("query_pre_attn_scalar")
    if odd:
        told = ", ".join(f"{key} is {str(config[key])[:60]}" for key in odd)
        raise CheckpointError(
            f"While {act}: {told}, for which GGUF has no entry and its programs another value. Write safetensors "
            "instead."
        )


def _special(config: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    for said, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        value = config.get(key)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and 0 <= value < config["vocab_size"]:
            found[said] = value
    return found


# --- which tensors ----------------------------------------------------------------------------------------------------
def _layout(
    family: GgufFamily, config: Mapping[str, Any], checkpoint: Checkpoint, kind: str, act: str, notes: list[str]
) -> list[GgufSource]:
    names = [name for name in checkpoint.tensors if not is_harmless_buffer(name)]
    if config.get("tie_word_embeddings") and "lm_head.weight" in names:
        names.remove("lm_head.weight")  # the file shares the embedding's by having none
    found = places(family, names, config["num_hidden_layers"], act)
    unknown = [name for name, place in found.items() if place is None]
    if unknown:
        raise CheckpointError(
            f"While {act}: GGUF has no name for {name_some(unknown)}. Check that the weights are of the class that "
            "config.json names."
        )
    parts: dict[str, dict[int, str]] = {}
    for name, place in found.items():
        assert place is not None
        parts.setdefault(place.tensor, {})[place.expert if place.expert is not None else -1] = name
    tensors, wide = [], []
    for name, sources in parts.items():
        first = checkpoint.tensors[sources[min(sources)]].shape
        single = name.endswith("ffn_gate_inp_shexp.weight") and first[0] == 1
        shape = first[1:] if single else first if -1 in sources else (len(sources), *first)
        used = kind if len(shape) > 1 and not name.endswith(("norm.weight", "ffn_gate_inp.weight")) else "F32"
        if used.startswith("Q") and shape[-1] % 32:
            wide.append(name)
            used = "F16"
        chosen = tuple(sources[expert] for expert in sorted(sources))
        tensors.append(
            GgufSource(name, chosen, shape, used, heads_turned(family, name, config), is_shifted(family, name))
        )
    if wide:
        notes.append(f"{len(wide)} tensors whose rows no block of 32 divides are F16: {name_some(sorted(wide), 3)}")
    if config.get("sliding_window") and family.pairs:
        notes.append("the sliding window of attention is left out: GGUF has no entry for it in this kind of model")
    return tensors


def _bytes_of(gguf: Any, tensor: GgufSource) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.kind]]
    return int(math.prod(tensor.shape) // block * size)


def _announce(gguf: Any, writer: Any, tensor: GgufSource) -> None:
    kind = gguf.GGMLQuantizationType[tensor.kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if tensor.kind in ("F32", "F16"):
        dtype, shape = np.dtype(np.float32 if tensor.kind == "F32" else np.float16), tensor.shape
    else:
        dtype, shape = np.dtype(np.uint8), (*tensor.shape[:-1], tensor.shape[-1] // block * size)
    writer.add_tensor_info(tensor.name, shape, dtype, _bytes_of(gguf, tensor), raw_dtype=kind)


# --- metadata ---------------------------------------------------------------------------------------------------------
def _write_metadata(
    writer: Any, family: GgufFamily, config: Mapping[str, Any], said: Mapping[str, Any], head: int, kind: str,
    checkpoint: Checkpoint,
) -> None:  # fmt: skip
    writer.add_name(Path(checkpoint.name).name or checkpoint.name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(2)
    entries = {key: (config.get(name), kind) for key, name, kind in (*COMMON, *family.settings)}
    entries["vocab_size"] = (config["vocab_size"], "uint32")
    if family.split_heads:
        entries |= {"attention.key_length": (head, "uint32"), "attention.value_length": (head, "uint32")}
    else:
        window, form = entries["attention.sliding_window"]
        entries["attention.sliding_window"] = (window or 0, form)
    for key, (value, form) in entries.items():
        if value is not None:
            getattr(writer, f"add_{form}")(f"{family.arch}.{key}", value)
    forms = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in said.items():
        forms[type(value)](f"{family.arch}.rope.{key}", value)


def _write_vocabulary(writer: Any, vocabulary: GgufVocabulary, config: Mapping[str, Any]) -> None:
    if vocabulary.problem:
        writer.add_tokenizer_model("none")
    else:
        writer.add_tokenizer_model(vocabulary.model)
        writer.add_tokenizer_pre(vocabulary.cut)
        writer.add_token_list(vocabulary.tokens)
        writer.add_token_types(vocabulary.kinds)
        if vocabulary.scores:
            writer.add_token_scores(vocabulary.scores)
        if vocabulary.merges:
            writer.add_token_merges(vocabulary.merges)
        writer.add_add_bos_token(vocabulary.begins)
        if vocabulary.spaced is not None:
            writer.add_add_space_prefix(vocabulary.spaced)
        if vocabulary.template:
            writer.add_chat_template(vocabulary.template)
    for key, number in _special(config).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)


# --- data -------------------------------------------------------------------------------------------------------------
def _write_data(
    gguf: Any, writer: Any, checkpoint: Checkpoint, factors: Mapping[str, np.ndarray], tensors: list[GgufSource],
    progress: Progress | None,
) -> None:  # fmt: skip
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for factor in factors.values():
        file.write(factor.tobytes())
        writer.write_padding(file, factor.nbytes)
    total, done = sum(_bytes_of(gguf, tensor) for tensor in tensors), 0
    for tensor in tensors:
        for source in tensor.sources:
            for values in _blocks(checkpoint, source, tensor):
                require_finite_values(f"tensor '{source}' of {checkpoint.name}", values)
                if tensor.shifted:
                    values = values + 1
                stored = _encoded(gguf, values, tensor)
                file.write(stored.tobytes())
                done += stored.nbytes
                if progress:
                    progress(done, total, "writing GGUF")
        writer.write_padding(file, _bytes_of(gguf, tensor))


def _blocks(checkpoint: Checkpoint, source: str, tensor: GgufSource) -> Iterator[Tensor]:
    """Rows in the file's order, in float32: whole heads where rotary halves become pairs."""
    info = checkpoint.tensors[source]
    if len(info.shape) < 2:
        values = checkpoint.read(source).float()
        yield values[_paired(len(values) // tensor.heads, 0, len(values))] if tensor.heads else values
        return
    rows, head = info.shape[0], info.shape[0] // tensor.heads if tensor.heads else 1
    step = max(1, BLOCK_ELEMENTS // (math.prod(info.shape[1:]) * head)) * head
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = checkpoint.read_rows(source, start, stop)
        yield (values[_paired(head, 0, stop - start)] if tensor.heads else values).float()


def _paired(head: int, start: int, stop: int) -> Tensor:
    """Which row of the model is each row of the file: h·d + 2i + j there is h·d + j·d/2 + i here."""
    row = torch.arange(start, stop)
    inside = row % head
    return row - inside + inside % 2 * (head // 2) + inside // 2


def _encoded(gguf: Any, values: Tensor, tensor: GgufSource) -> np.ndarray:
    if tensor.kind == "F16" and float(values.abs().max()) > torch.finfo(torch.float16).max:
        raise CheckpointError(
            f"While writing tensor '{tensor.name}': it has values too large for F16. Ask for bf16 or q8_0."
        )
    plain = np.ascontiguousarray(values.numpy())
    found: np.ndarray = gguf.quantize(plain, gguf.GGMLQuantizationType[tensor.kind])
    return np.ascontiguousarray(found)
