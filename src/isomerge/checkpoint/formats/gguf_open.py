"""Open a GGUF file as the model of transformers that it was made from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint, TensorInfo, WeightFile, failure, main_dtype, name_some
from isomerge.checkpoint.config import config_problems
from isomerge.checkpoint.files import LocalFile, reopened
from isomerge.checkpoint.formats.decoded import DecodedCheckpoint, Decoder
from isomerge.checkpoint.formats.gguf_families import COMMON, FAMILIES, GgufFamily, family_read, query_width
from isomerge.checkpoint.formats.gguf_header import GgufHeader, read_gguf_header
from isomerge.checkpoint.formats.gguf_layout import gguf_package, heads_turned, is_shifted, places, stock_shapes
from isomerge.checkpoint.formats.gguf_rotary import FACTORS, rotary_read
from isomerge.checkpoint.formats.gguf_tokens import write_beside
from isomerge.checkpoint.header import Entry, HeaderError
from isomerge.checkpoint.local import AGAIN, FileCheckpoint
from isomerge.errors import IsomergeError

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
PLAIN: Mapping[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""ggml's numbers for values that are stored as they are."""
QUANTISED = torch.bfloat16
"""What a quantised tensor is rounded to where it is written."""
HEAD, EMBEDDING = "lm_head.weight", "token_embd.weight"


class GgufFile(LocalFile):
    """Rows of bytes under GGUF's own names."""

    def __init__(self, path: Path) -> None:
        self.header: GgufHeader
        super().__init__(path, self._entries_of)

    def _entries_of(self, path: Path) -> Mapping[str, Entry]:
        sizes = gguf_package(f"opening checkpoint {path}").GGML_QUANT_SIZES
        self.header = read_gguf_header(path, {int(kind): size for kind, size in sizes.items()})
        return self.header.entries

    def metadata(self) -> dict[str, str]:
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (self.path, open_gguf_file)


def open_gguf_file(path: Path) -> WeightFile:
    try:
        return GgufFile(path)
    except OSError as error:
        raise HeaderError(f"it cannot be read ({error.strerror or error})") from error


def decoded(raw: Tensor, kind: int) -> Tensor:
    """(rows, bytes) → (rows, values): floats as they are stored, anything else dequantised to float32."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind])
    gguf = gguf_package("dequantising a tensor")
    with np.errstate(all="ignore"):  # scales may be anything in a damaged file; merging refuses what is not finite
        values = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


@dataclass(frozen=True)
class GgufDecoder(Decoder):
    """Rows of a tensor: those of one expert, rotary pairs put back as halves, the 1 of a gain taken away."""

    info: TensorInfo
    tensor: str
    kind: int
    first: int = 0
    """The stored row that is its first."""
    head_rows: int = 0
    """Of how many rows a head is, where rows are stored as rotary pairs."""
    shifted: bool = False

    def rows(self, stored: Checkpoint, start: int, stop: int) -> Tensor:
        if len(self.info.shape) < 2:
            values = self._stored(stored, 0, 1).reshape(self.info.shape)
            if self.head_rows:
                values = values[self._order(0, len(values))]
            return values - 1 if self.shifted else values
        if not self.head_rows:
            return self._stored(stored, start, stop).reshape(stop - start, *self.info.shape[1:])
        first = start // self.head_rows * self.head_rows
        last = -(-stop // self.head_rows) * self.head_rows
        raw = stored.read_rows(self.tensor, first, last)
        return decoded(raw[self._order(start, stop) - first], self.kind)

    def _stored(self, stored: Checkpoint, start: int, stop: int) -> Tensor:
        return decoded(stored.read_rows(self.tensor, self.first + start, self.first + stop), self.kind)

    def _order(self, start: int, stop: int) -> Tensor:
        """Row h·d + j·d/2 + i of the class is stored as row h·d + 2i + j: j = 0, 1 are the halves."""
        row = torch.arange(start, stop)
        head, inside = row // self.head_rows, row % self.head_rows
        half = self.head_rows // 2
        return head * self.head_rows + 2 * (inside % half) + inside // half


def open_gguf(path: Path) -> Checkpoint:
    """A model by its header; of a file in several parts, any of them."""
    act = f"opening checkpoint {path}"
    gguf_package(act)
    try:
        return _opened(path, _files(path), act)
    except HeaderError as error:
        raise failure(act, [f"{path.name}: {error}"], error.next_step or AGAIN) from error
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        # Metadata of other types or sizes than llama.cpp writes.
        raise failure(act, [f"its metadata cannot be understood ({type(error).__name__}: {error})"], AGAIN) from error


def _files(path: Path) -> list[GgufFile]:
    found = SPLIT.fullmatch(path.name)
    count = int(found[3]) if found else 1
    if not found or not 1 <= count <= 1000:
        return [_opened_file(path)]
    names = [f"{found[1]}-{part:05d}-of-{found[3]}.gguf" for part in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise HeaderError(f"of its {count} parts {name_some(missing)} is not beside it")
    return [_opened_file(path.parent / name) for name in names]


def _opened_file(path: Path) -> GgufFile:
    file = open_gguf_file(path)
    assert isinstance(file, GgufFile)
    return file


def _opened(path: Path, files: list[GgufFile], act: str) -> Checkpoint:
    metadata = files[0].header.metadata
    by_tensor = {name: file for file in files for name in file.tensors}
    family = family_read(metadata)
    if family is None:
        known = ", ".join(dict.fromkeys(one.arch for one in FAMILIES))
        raise HeaderError(
            f"it holds a model of GGUF's architecture {str(metadata.get('general.architecture'))[:60]!r}, and those "
            f"that isomerge reads are {known}",
            "Use the safetensors model it was made from.",
        )
    stored = FileCheckpoint(str(path), by_tensor, config={}, folder=path.parent, side_files=list)
    config = _config(family, metadata, stored, by_tensor)
    if problems := config_problems(config, len(by_tensor)):
        raise HeaderError("; ".join(problems).replace("config.json", "its metadata"))
    decoders = _decoders(family, config, by_tensor, act)
    config["dtype"] = str(main_dtype(decoder.info for decoder in decoders.values())).removeprefix("torch.")
    kinds = sorted({file.header.tensors[name].kind for name, file in by_tensor.items()} - PLAIN.keys())
    types = gguf_package(act).GGMLQuantizationType
    read_as = "GGUF, and read as the model of transformers that it was made from"
    if kinds:
        names = ", ".join(types(kind).name for kind in kinds)
        read_as += f"; {names} is dequantised, and written as bfloat16 unless another dtype is asked for"
    beside = partial(write_beside, path, config)
    return DecodedCheckpoint(stored, decoders, config=config, read_as=read_as, beside=beside)


# --- config.json ------------------------------------------------------------------------------------------------------
def _config(
    family: GgufFamily, metadata: Mapping[str, Any], stored: Checkpoint, files: Mapping[str, GgufFile]
) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.class_name]}
    for said, key, kind in (*family.settings, *COMMON):
        if (value := metadata.get(f"{family.arch}.{said}")) is not None:
            config[key] = float(value) if kind == "float32" else _whole(value, said)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    missing = [said for said, key, _ in COMMON if key not in config and key != "num_key_value_heads"]
    if missing:
        raise HeaderError(f"its metadata has no {name_some([f'{family.arch}.{said}' for said in missing])}")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if family.split_heads and any(key == "head_dim" for _, key, _ in family.settings):
        config["head_dim"] = head
    if family.wide_queries is not None:
        layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        config["query_pre_attn_scalar"] = query_width(family, layers, hidden, heads, head)
    if EMBEDDING not in files:
        raise HeaderError(f"it has no tensor '{EMBEDDING}', so it is not a language model")
    config["vocab_size"] = files[EMBEDDING].header.tensors[EMBEDDING].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in files
    if family.pairs and "blk.0.attn_q.bias" in files:
        config["attention_bias"] = True
    if family.pairs and "blk.0.ffn_gate.bias" in files:
        config["mlp_bias"] = True
    for said, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if (number := metadata.get(f"tokenizer.ggml.{said}_token_id")) is not None:
            config[key] = _whole(number, key)
    config |= dict(family.fixed)

    def factors(name: str) -> np.ndarray | None:
        if name not in files:
            return None
        tensor = files[name].header.tensors[name]
        if math.prod(tensor.shape) > 4096:
            raise HeaderError(f"tensor '{name}' has the shape {tensor.shape}, too large for factors of frequencies")
        return decoded(stored.read(name), tensor.kind).reshape(-1).double().numpy()

    config["rope_parameters"] = rotary_read(family, metadata, factors, head)
    return config


def _whole(value: Any, what: str) -> int:
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()  # one for each layer, all the same
    if not isinstance(value, int) or isinstance(value, bool):
        raise HeaderError(f"its metadata says for {what} {str(value)[:60]}, and one whole number is needed")
    return value


# --- tensors ----------------------------------------------------------------------------------------------------------
def _decoders(
    family: GgufFamily, config: Mapping[str, Any], files: Mapping[str, GgufFile], act: str
) -> dict[str, Decoder]:
    shapes = stock_shapes(family, config, act)
    tied = config["tie_word_embeddings"]
    wanted = {name: shape for name, shape in shapes.items() if not (tied and name == HEAD)}
    found = places(family, list(wanted), config["num_hidden_layers"], act)
    absent = [name for name, place in found.items() if place is None or place.tensor not in files]
    used = {place.tensor for place in found.values() if place is not None}
    unused = sorted(files.keys() - used - set(FACTORS))
    problems = [f"there is no tensor for {name_some(absent)}"] if absent else []
    problems += [f"{family.class_name} has no place for {name_some(unused)}"] if unused else []
    if problems:
        raise HeaderError("; ".join(problems), "Use the safetensors model it was made from.")
    decoders: dict[str, Decoder] = {}
    for name, place in found.items():
        assert place is not None
        tensor = files[place.tensor].header.tensors[place.tensor]
        _require_shape(name, shapes[name], place.tensor, tensor.shape, place.expert)
        _require_known(place.tensor, tensor.kind)
        dtype = PLAIN.get(tensor.kind, QUANTISED)
        heads = heads_turned(family, place.tensor, config)
        rows = shapes[name][0]
        if heads and rows % (2 * heads):
            raise HeaderError(f"tensor '{place.tensor}' has {rows} rows, which {heads} heads cannot share")
        decoders[name] = GgufDecoder(
            TensorInfo(shapes[name], dtype), place.tensor, tensor.kind,
            first=(place.expert or 0) * rows if len(shapes[name]) > 1 else 0,
            head_rows=rows // heads if heads else 0,
            shifted=is_shifted(family, place.tensor),
        )  # fmt: skip
    return decoders


def _require_shape(
    name: str, wanted: tuple[int, ...], tensor: str, stored: tuple[int, ...], expert: int | None
) -> None:
    part = stored
    if expert is not None:
        if len(stored) != 3 or expert >= stored[0]:
            raise HeaderError(f"tensor '{tensor}' has the shape {stored}, and holds no expert {expert}")
        part = stored[1:]
    single = wanted == (1, *part)  # a gate of one row is stored without it
    if part != wanted and not single:
        raise HeaderError(f"tensor '{tensor}' has the shape {stored}, where '{name}' needs {wanted}")


def _require_known(tensor: str, kind: int) -> None:
    """Raise for a way to store values that the package can name and not decode."""
    if kind in PLAIN:
        return
    gguf = gguf_package("dequantising a tensor")
    try:
        decoded(torch.zeros(1, gguf.GGML_QUANT_SIZES[kind][1], dtype=torch.uint8), kind)
    except IsomergeError:
        raise
    except Exception as error:
        raise HeaderError(
            f"tensor '{tensor}' is stored as {gguf.GGMLQuantizationType(kind).name}, which the installed gguf package "
            "cannot dequantise",
            "Use the safetensors model it was made from, or another quantisation of it.",
        ) from error
