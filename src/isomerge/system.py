"""What differs between operating systems, each call with a way to do without it.

Linux has everything here; macOS lacks `posix_fallocate` and /proc, Windows also positioned reads, folder handles and
`fcntl`. The rest of the library calls these functions and never the system's own, so that hiding them in a test shows
what another system would do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None  # type: ignore[assignment]
try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PROC = Path("/proc")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_seeking = threading.Lock()


# --- files ------------------------------------------------------------------------------------------------------------
def open_to_read(path: Path) -> int:
    """A descriptor for `read_at`. Windows would otherwise translate line ends."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))


def open_past_cache(path: Path) -> int | None:
    """A descriptor that writes whole pages straight to the disk; None where the system or the disk has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill the view with the bytes at `offset`, or with as many as one call gives; 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    if hasattr(os, "pread"):
        piece = os.pread(descriptor, len(view), offset)
    else:
        with _seeking:  # the position belongs to the descriptor, which threads share
            os.lseek(descriptor, offset, os.SEEK_SET)
            piece = os.read(descriptor, len(view))
    view[: len(piece)] = piece
    return len(piece)


def write_at(descriptor: int, view: memoryview | bytes, offset: int) -> int:
    """Write at `offset`; how many bytes one call took."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def reserve(file: IO[bytes], size: int) -> None:
    """Take the room now, so that a full disk is known before hours of work; where that cannot be done, only name it."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV):
                raise
    with contextlib.suppress(OSError):
        file.truncate(size)


def start_writing(descriptor: int, start: int, size: int) -> None:
    """Ask the system to bring a part of a file to the disk now, so that little is left to wait for at the end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def sync(file: IO[bytes]) -> None:
    """Bring a file's content to the disk: a rename may reach it before the data it names."""
    file.flush()
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves the data in the drive's own cache
        with contextlib.suppress(OSError):  # network drives do not know it
            fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
            return
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames survive a power cut; systems that cannot open a folder have their own way of doing that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # some network drives cannot
            raise
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> int:
    """A descriptor that holds the only lock on a folder; BlockingIOError where another process has it.

    The lock goes away with the process, however it ends. Windows locks bytes of files and not folders, so there the
    lock is on a file of the temporary folder that is named after this one. Without any kind of lock it holds nothing.
    """
    if fcntl is not None:
        descriptor = os.open(folder, os.O_RDONLY)
        take: Any = lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: E731
    else:
        name = hashlib.sha256(os.path.normcase(folder.resolve()).encode("utf-8", "surrogatepass")).hexdigest()
        path = Path(tempfile.gettempdir()) / f"isomerge-{name[:32]}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        take = (lambda: msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)) if msvcrt is not None else (lambda: None)  # type: ignore[attr-defined,unused-ignore]
    try:
        take()
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            os.close(descriptor)
            raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process", os.fspath(folder)) from error
        # A file system without locks: go on all the same.
    return descriptor


# --- the machine and this process -------------------------------------------------------------------------------------
def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_temporary_folder() -> Path | None:
    """A folder of this user in the temporary folder; None where it belongs to others or can be written by them."""
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(tempfile.gettempdir()) / f"isomerge-{'user' if user is None else user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    is_ours = user is None or (state.st_uid == user and not state.st_mode & 0o022)
    return folder if stat.S_ISDIR(state.st_mode) and is_ours else None


def boot() -> str | None:
    """A name for the time since the machine was started; None where the system has none."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def machine_memory() -> int | None:
    """How much memory the machine has, in bytes; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def peak_memory() -> int:
    """Largest resident size of this program so far, in bytes; 0 where the system does not tell.

    The kernel's account of resources begins with the size of the program that started this one, so it is only asked
    where /proc does not exist.
    """
    known = _status("VmHWM")
    if known is not None:
        return known
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource is not None else 0
    return int(peak if sys.platform == "darwin" else peak * 1024)  # kilobytes, on macOS bytes


def present_memory() -> int:
    """What this process holds now; its peak where the system does not tell."""
    known = _status("VmRSS")
    return peak_memory() if known is None else known


def anonymous_memory() -> int | None:
    """What this process has allocated now: no pages of files, which the system takes back when it needs them. None
    where the system does not tell."""
    return _status("RssAnon")


class PeakOfAnonymous:
    """The most memory that was allocated while it is entered, looked at twenty times a second.

    The kernel keeps a peak only of the resident size, in which mapped files count too.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._over = threading.Event()

    def __enter__(self) -> PeakOfAnonymous:
        self.bytes = anonymous_memory()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        if self.bytes is not None:
            self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes or 0, anonymous_memory() or 0)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self.bytes is not None:
            self._look()


def _status(key: str) -> int | None:
    """A size in /proc/self/status, in bytes."""
    try:
        for line in (PROC / "self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def keep_freed_memory(size: int = 2**30) -> None:
    """Tell glibc to use freed blocks again instead of returning each to the system.

    A merge frees and takes blocks of a few megabytes ten thousand times; asking the kernel for fresh pages every time
    makes it up to twice as slow. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # the last: Windows has no library of the process
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, size)
        library.mallopt(MMAP_THRESHOLD, size)
