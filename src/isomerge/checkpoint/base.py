"""What every checkpoint offers, wherever its tensors live."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from isomerge.errors import CheckpointError, near_miss

Progress = Callable[[int, int, str], None]
"""`progress(done, total, what)`, called while something takes time."""


STEMS: Mapping[str, str] = {"": "model"}
"""How transformers calls weight files, in the folder itself."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about one tensor.

    >>> TensorInfo((2, 3), torch.bfloat16).nbytes
    12
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorInfo:
        return cls(tuple(tensor.shape), tensor.dtype)


class Checkpoint(ABC):
    """Names, shapes and dtypes from headers; one tensor's values at a time when asked."""

    name: str
    """How to call it in messages."""
    config: dict[str, Any]
    """The parsed config.json, {} when there is none."""
    folder: Path | None
    """Where the side files lie, None for checkpoints in memory."""
    revision: str | None
    """The commit of a hub checkpoint."""
    tensors: Mapping[str, TensorInfo]
    """Sorted by name, from headers only."""
    kind: str = "model"
    """What a lock calls it: "stored" for what a model of another format is read from."""
    read_as: str = ""
    """How the weights are stored, where it is not as plain tensors: the end of a sentence."""
    description: str = "config.json"
    """The file that says what the weights are; it is written last."""
    stems: Mapping[str, str] = STEMS
    """How weight files are called, by the folder that they lie in."""
    in_memory: bool = False
    """No path names these weights, though side files may lie in `folder`."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU in its stored dtype, in memory of its own. Safe to call from several threads."""

    def peek(self, name: str) -> torch.Tensor:
        """Like `read`, but perhaps in the caller's own memory: to look at, never to write to."""
        return self.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of axis 0, in the stored dtype or, where they are computed, a wider one; a tensor of fewer
        than two axes whole. To look at, never to write to, and only until this thread's next call."""
        tensor = self.peek(name)
        return tensor[start:stop] if tensor.dim() > 1 else tensor

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Values [start, stop) of the flattened tensor, in memory of their own: a sample of a tensor of any size."""
        return self.peek(name).reshape(-1)[start:stop].clone()

    def read_spans(self, name: str, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Values of several places of the flattened tensor, which lie within it, one after the other."""
        return torch.cat([self.read_span(name, start, stop) for start, stop in places])

    def identity(self) -> Any:
        """What tells this very model from others without reading its weights, as JSON: the weight files by size and
        time, the rest by content. None where nothing does."""
        return None

    def stored(self) -> dict[str, list[Any]] | None:
        """Behind a URL: size and tag of each weight file, as its server names them."""
        return None

    def changed(self) -> list[Path | str]:
        """The files that are no longer those that were opened, by path or address."""
        return []

    def parts(self) -> list[Checkpoint]:
        """The stored checkpoints this one is made of: itself, unless it is a view of others."""
        return [self]

    @abstractmethod
    def side_files(self) -> list[Path]:
        """Every file beside the weights that a copy of this model needs, except config.json."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.tensors)} tensors)"

    def unknown_tensor(self, name: str) -> NoReturn:
        raise CheckpointError(
            f"While reading tensor '{name}' of {self.name}: there is no such tensor among its "
            f"{len(self.tensors)}. {near_miss(name, self.tensors)}".rstrip()
        )


class WeightFile(ABC):
    """One file of a checkpoint: the tensors its header names, and a way to read each."""

    label: str
    tensors: Mapping[str, TensorInfo]

    def identity(self) -> Any:
        """The file's name, size and time of change when it was opened; None for one that is still to be fetched."""
        return None

    def changed(self) -> Sequence[Path | str]:
        """The file itself, if it is no longer the one that was opened."""
        return []

    @abstractmethod
    def read(self, name: str) -> torch.Tensor: ...

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self.read(name)
        return tensor[start:stop] if tensor.dim() > 1 else tensor

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.read(name).reshape(-1)[start:stop].clone()

    def read_spans(self, name: str, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        return torch.cat([self.read_span(name, start, stop) for start, stop in places])


def failure(act: str, problems: list[str], next_step: str) -> CheckpointError:
    """One error for all the problems found, so that nobody repairs them one run at a time."""
    numbered = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, start=1))
    told = f": {problems[0]}" if len(problems) == 1 else f", {len(problems)} problems: {numbered}"
    return CheckpointError(f"While {act}{told}{'' if told.endswith(('.', '?')) else '.'} {next_step}")


def first_line(error: BaseException) -> str:
    """The cause of an error of another library, short enough for a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def main_dtype(infos: Iterable[TensorInfo]) -> torch.dtype | None:
    """The dtype that most bytes have; None of nothing.

    >>> main_dtype([TensorInfo((3,), torch.float32), TensorInfo((4,), torch.bfloat16)])
    torch.float32
    """
    sizes: Counter[torch.dtype] = Counter()
    for info in infos:
        sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def name_some(names: list[str], most: int = 5) -> str:
    """'a', 'b' and 7 more."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
