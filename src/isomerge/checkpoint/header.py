"""The safetensors header: the one place that knows the format's bytes.

A file is an 8-byte little-endian length, that many bytes of JSON (padded with spaces), then the tensors without gaps:
https://huggingface.co/docs/safetensors/index#format. Everything here works from the header and the file's size alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from isomerge.checkpoint.base import TensorInfo
from isomerge.errors import CheckpointError
from isomerge.json_files import JsonError, parse_json

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# The reference implementation refuses longer headers too: a random first 8 bytes must not make us allocate.
LONGEST = 100_000_000
MOST_AXES = 64  # of torch
MOST_VALUES = 2**60  # whose bytes and strides are 64-bit numbers


class HeaderError(ValueError):
    """What is wrong with one file, to be put in a list with what is wrong with the others.

    `next_step` is a sentence that says what to do, where another copy of the file would not help.
    """

    def __init__(self, problem: str, next_step: str = "") -> None:
        super().__init__(problem)
        self.next_step = next_step


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; `start` counts from the beginning of the file."""

    info: TensorInfo
    start: int


def parse_header(text: bytes) -> dict[str, Entry]:
    """The tensors that a header's JSON names, checked: known dtypes, sizes that fit shapes, no gap, no overlap."""
    try:
        entries = parse_json(text.decode("utf-8"), unique=True)
    except UnicodeDecodeError as error:
        raise HeaderError(f"its header is not UTF-8 at byte {error.start}") from error
    except JsonError as error:
        raise HeaderError(f"its header cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise HeaderError("its header is not a JSON object")
    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("its __metadata__ is not a table from names to texts")
    data = 8 + len(text)
    spans = sorted(
        ((*_offsets(name, entry), name, _info(name, entry)) for name, entry in entries.items()), key=lambda s: s[:3]
    )
    result: dict[str, Entry] = {}
    end_of_last = 0
    for begin, end, name, info in spans:
        if end - begin != info.nbytes:
            raise HeaderError(
                f"tensor '{name}' should take {info.nbytes:,} bytes but its header gives it {end - begin:,}"
            )
        if begin != end_of_last:
            raise HeaderError(f"tensor '{name}' begins at byte {begin:,} where {end_of_last:,} was expected")
        result[name] = Entry(info, data + begin)
        end_of_last = end
    return result


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file on disk; its size must be what the header announces, its data is not read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return sized_header(size, lambda start, stop: _span(file, start, stop))


def _span(file: IO[bytes], start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)


def sized_header(size: int, read: Callable[[int, int], bytes]) -> dict[str, Entry]:
    """The same of a file of this size, wherever it is: `read` gives its bytes from one place to another."""
    text = header_text(size, read)
    entries = parse_header(text)
    expected = max((e.start + e.info.nbytes for e in entries.values()), default=8 + len(text))
    if size < expected:
        raise HeaderError(f"it is truncated: {size:,} bytes of the {expected:,} that its header announces")
    if size > expected:
        raise HeaderError(f"it has {size - expected:,} bytes more than its header announces")
    return entries


def header_text(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """The header's JSON, which is no longer than the file."""
    length_bytes = read(0, min(8, size))
    if length_bytes == b"version " and b"git-lfs" in read(8, min(72, size)):
        raise HeaderError("it is a git-lfs pointer and not the weights themselves", "Run `git lfs pull` in its folder.")
    if len(length_bytes) < 8:
        raise HeaderError(f"it is {size} bytes long, too short for a safetensors header")
    length = int.from_bytes(length_bytes, "little")
    if length > LONGEST:
        raise HeaderError(f"its header claims {length:,} bytes, so this is not a safetensors file or it is corrupt")
    if 8 + length > size:
        raise HeaderError(f"it is truncated inside the header ({size:,} bytes of at least {8 + length:,})")
    return read(8, 8 + length)


def header_metadata(text: bytes) -> dict[str, str]:
    """What a header that was parsed before says beside its tensors."""
    return dict(parse_json(text.decode("utf-8")).get("__metadata__") or {})


def build_header(plan: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these tensors, and where each tensor's data starts in it.

    Wide dtypes come first: the format allows no gaps, and a loader that maps the file needs every tensor aligned.
    """
    order = sorted(plan, key=lambda name: -plan[name].dtype.itemsize)  # stable: the plan's order within one width
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    starts: dict[str, int] = {}
    for name in order:
        info = plan[name]
        if info.dtype not in NAMES:
            raise CheckpointError(
                f"While laying out tensor '{name}': safetensors has no place for {info.dtype}. "
                "Ask for float32, bfloat16 or float16 instead."
            )
        header[name] = {
            "dtype": NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        starts[name] = offset
        offset += info.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


def _info(name: str, entry: Any) -> TensorInfo:
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise HeaderError(f"tensor '{name}' has the shape {str(shape)[:100]} in its header")
    if len(shape) > MOST_AXES or math.prod(n for n in shape if n) > MOST_VALUES:  # also beside a 0, as strides are
        raise HeaderError(f"tensor '{name}' has the shape {str(shape)[:100]} in its header, which no memory can hold")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise HeaderError(f"tensor '{name}' is stored as {dtype}, which isomerge cannot read")
    return TensorInfo(tuple(shape), DTYPES[dtype])


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise HeaderError(f"tensor '{name}' has no usable data_offsets in its header")
    return offsets[0], offsets[1]
