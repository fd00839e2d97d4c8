"""A process in which one I/O call fails: it dies there, loses power, meets a full disk, a failing one, or Ctrl-C."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KILLED, NOT_TRIED = 137, 99
FAULTS = ("kill", "torn", "power", "ENOSPC", "EIO", "interrupt")
"""The last three come back to the program as exceptions."""
PAGE = 4096
READS = ("preadv", "pread", "read", "scandir", "listdir")
"""Calls that leave nothing on the disk: these are only tried with faults of their own kind."""
FAULTS_OF_READS = ("kill", "EIO", "interrupt")


@dataclass
class Injector:
    """Counts calls that concern `root`, and lets call number `at` fail."""

    root: Path
    at: int = 0
    fault: str = "kill"
    seed: int = 0
    calls: list[str] = field(default_factory=list)
    _unsynced: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    _renames: list[tuple[str, str, str | None]] = field(default_factory=list)
    _real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def install(self) -> None:
        for name in ("open", "unlink", "remove", "mkdir", "rmdir", "rename", "replace", "scandir", "listdir"):
            self._patch(name, self._by_path)
        for name in ("write", "pwrite", "fsync", "ftruncate", "posix_fallocate", "preadv", "pread", "read"):
            self._patch(name, self._by_descriptor)
        real = io.open
        self._real["io.open"] = real

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self._inside(file):
                return real(file, mode, *args, **kwargs)
            self._count("file.open", file, lambda: real(file, mode, *args, **kwargs))
            handle = real(file, mode, *args, **kwargs)
            return Watched(handle, self) if set(mode) & set("wa+x") else handle

        io.open = builtins.open = opened  # type: ignore[assignment]

    def _patch(self, name: str, kind: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        if hasattr(os, name):
            real = self._real[name] = getattr(os, name)
            setattr(os, name, kind(name, real))

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            place = path
            if kwargs.get("dir_fd") is not None:
                place = os.path.join(_path_of(kwargs["dir_fd"]), os.fspath(path))
            elif isinstance(path, int):
                place = _path_of(path)
            if not self._inside(place):
                return real(path, *args, **kwargs)
            self._count(name, place, lambda: real(path, *args, **kwargs))
            replaced = self._set_aside(args[0]) if name in ("rename", "replace") else None
            result = real(path, *args, **kwargs)
            if name in ("rename", "replace"):
                self._renames.append((os.path.abspath(path), os.path.abspath(args[0]), replaced))
            return result

        return called

    def _set_aside(self, target: Any) -> str | None:
        """Another name for what a rename replaces, outside of the folder, in case the rename is undone."""
        if not os.path.isfile(target):
            return None
        aside = f"{self.root}.replaced.{os.getpid()}.{len(self._renames)}"
        os.link(target, aside)
        return aside

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(descriptor: int, *args: Any, **kwargs: Any) -> Any:
            place = _path_of(descriptor)
            if not self._inside(place):
                return real(descriptor, *args, **kwargs)
            torn = None
            if name in ("write", "pwrite"):
                half = bytes(args[0])[: max(1, len(args[0]) // 2)]
                torn = lambda: real(descriptor, half, *args[1:])  # noqa: E731
            self._count(name, place, torn or (lambda: real(descriptor, *args, **kwargs)))
            start = args[1] if name == "pwrite" else os.fstat(descriptor).st_size
            result = real(descriptor, *args, **kwargs)
            self._after(name, descriptor, place, start, result)
            return result

        return called

    def _after(self, name: str, descriptor: int, place: str, start: int, result: Any) -> None:
        state = os.fstat(descriptor)
        key = (state.st_dev, state.st_ino)
        if name in ("write", "pwrite"):
            self._unsynced.setdefault(key, []).append((start, start + result))
        elif name == "posix_fallocate":
            self._unsynced.setdefault(key, [])
        elif name == "fsync" and os.path.isdir(place):
            self._renames = [one for one in self._renames if place not in (os.path.dirname(p) for p in one[:2])]
        elif name == "fsync":
            self._unsynced.pop(key, None)

    def wrote(self, descriptor: int) -> None:
        """A buffered file: everything in it may be lost until it is synced."""
        state = os.fstat(descriptor)
        self._unsynced.setdefault((state.st_dev, state.st_ino), []).append((0, 2**40))

    def _inside(self, path: Any) -> bool:
        try:
            return os.path.abspath(os.fspath(path)).startswith(str(self.root))
        except TypeError:
            return isinstance(path, int) and _path_of(path).startswith(str(self.root))

    def _count(self, name: str, place: Any, torn: Callable[[], Any]) -> None:
        self.calls.append(f"{name} {os.path.relpath(os.fspath(place), self.root)}")
        if len(self.calls) != self.at:
            return
        if name in READS and self.fault not in FAULTS_OF_READS:
            os._exit(NOT_TRIED)
        self._real["io.open"](self.root.with_name("fault"), "w").write(self.calls[-1])
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        if self.fault in ("ENOSPC", "EIO"):
            code = getattr(errno, self.fault)
            raise OSError(code, os.strerror(code), os.fspath(place))
        if self.fault == "torn":
            torn()
        if self.fault == "power":
            self._lose()
        os._exit(KILLED)

    def _lose(self) -> None:
        """What was not synced: pages become zeros or the file is cut, and the last renames did not happen."""
        draw = random.Random(self.seed)
        for number in range(draw.randint(0, len(self._renames))):
            source, target, replaced = self._renames[-1 - number]
            if os.path.lexists(target) and not os.path.lexists(source) and os.path.isdir(os.path.dirname(source)):
                self._real["rename"](target, source)
                if replaced is not None:
                    os.link(replaced, target)
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                state = os.lstat(path)
                for start, stop in self._unsynced.get((state.st_dev, state.st_ino), []):
                    self._damage(path, start, min(stop, state.st_size), draw)
                if (state.st_dev, state.st_ino) in self._unsynced and draw.random() < 0.5:
                    self._damage(path, 0, min(PAGE, state.st_size), draw)  # the first page, with its header

    def _damage(self, path: str, start: int, stop: int, draw: random.Random) -> None:
        choice = draw.choice(("keep", "zeros", "first page", "cut"))
        if choice == "keep" or stop <= start:
            return
        with self._real["io.open"](path, "r+b") as file:
            if choice == "cut":
                file.truncate(start)
                return
            file.seek(start)
            file.write(bytes(stop - start if choice == "zeros" else min(PAGE, stop - start)))


class Watched:
    """A file object whose writes are counted."""

    def __init__(self, file: Any, injector: Injector) -> None:
        self._file, self._injector = file, injector

    def write(self, data: Any) -> Any:
        half = data[: max(1, len(data) // 2)]

        def torn() -> None:
            self._file.write(half)
            self._file.flush()

        self._injector._count("file.write", self._file.name, torn)
        result = self._file.write(data)
        self._injector.wrote(self._file.fileno())
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Watched:
        self._file.__enter__()
        return self

    def __exit__(self, *given: Any) -> Any:
        return self._file.__exit__(*given)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
