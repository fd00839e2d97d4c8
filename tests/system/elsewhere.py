"""Make this process look like another operating system's, then run the command line.

    python elsewhere.py SYSTEM [--stop-after N] WORDS…

SYSTEM is "windows" or "macos": what Python does not have there is taken away before isomerge is imported.
`--stop-after` kills the process when so many tensors are finished.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
from typing import Any

MACOS = ["O_DIRECT", "preadv", "pwritev", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity"]
WINDOWS = [*MACOS, "pread", "pwrite", "fchmod", "getuid", "geteuid", "mkfifo", "sysconf", "O_DIRECTORY", "O_CLOEXEC"]
UNIX_MODULES = ["resource", "fcntl", "pwd", "grp", "termios"]


class Locks:
    """Windows' module for locks of bytes, on top of Unix'."""

    LK_NBLCK = 2

    def __init__(self, fcntl: Any) -> None:
        self._fcntl = fcntl

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        assert mode == self.LK_NBLCK and count > 0
        try:
            self._fcntl.lockf(descriptor, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB, count)
        except OSError as error:
            raise PermissionError(13, "Permission denied") from error


def hide_proc() -> None:
    opened, read = io.open, os.open

    def refuse(path: Any) -> None:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))

    def open_(file: Any, *args: Any, **more: Any) -> Any:
        refuse(file)
        return opened(file, *args, **more)

    def os_open(path: Any, flags: int, *args: Any, **more: Any) -> int:
        refuse(path)
        if sys.argv[1] == "windows" and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))  # a folder has no descriptor there
        return read(path, flags, *args, **more)

    io.open = builtins.open = open_  # type: ignore[assignment]
    os.open = os_open  # type: ignore[assignment]


def in_use(path: Any) -> bool:
    """Whether this process has the file open: Windows then refuses to rename, replace or remove it."""
    try:
        target = os.stat(path)
    except OSError:
        return False
    for number in REAL_LISTDIR("/proc/self/fd"):
        try:
            state = os.fstat(int(number))
        except OSError:
            continue
        if (state.st_ino, state.st_dev) == (target.st_ino, target.st_dev) and os.path.isfile(path):
            return True
    return False


REAL_LISTDIR = os.listdir


def refuse_open_files() -> None:
    """As Windows: an open file can be neither moved nor removed, and nothing can take its place."""

    def careful(function: Any) -> Any:
        def call(*paths: Any, **more: Any) -> Any:
            for path in paths[:2]:
                if isinstance(path, (str, os.PathLike)) and in_use(path):
                    raise PermissionError(13, "The process cannot access the file: it is used by another", str(path))
            return function(*paths, **more)

        return call

    for name in ("replace", "rename", "remove", "unlink"):
        setattr(os, name, careful(getattr(os, name)))


def become(system: str) -> None:
    import torch  # noqa: F401  of the real system: only isomerge shall meet the other one

    real_fcntl = __import__("fcntl")
    for name in WINDOWS if system == "windows" else MACOS:
        if hasattr(os, name):
            delattr(os, name)
    if system == "windows":
        for name in UNIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
        sys.modules["msvcrt"] = Locks(real_fcntl)  # type: ignore[assignment]
        refuse_open_files()
    hide_proc()


def stop_after(count: int) -> None:
    from isomerge.checkpoint.writer import CheckpointWriter

    finish, left = CheckpointWriter.finish, [count]

    def finish_and_count(writer: Any, *args: Any, **more: Any) -> None:
        finish(writer, *args, **more)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointWriter.finish = finish_and_count  # type: ignore[method-assign]


if __name__ == "__main__":
    become(sys.argv[1])
    words = sys.argv[2:]
    if words[0] == "--stop-after":
        stop_after(int(words[1]))
        words = words[2:]
    from isomerge.cli import main

    sys.argv = ["isomerge", *words]
    main()
