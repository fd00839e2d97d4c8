"""Optional packages: one that is not installed is told from one that is there and cannot be imported."""

from __future__ import annotations

import contextlib
import re
import traceback
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# The extra of isomerge that brings each package; the name it is installed by, where that is another.
EXTRAS = {
    "transformers": "hf",
    "PIL": "hf",
    "accelerate": "hf",
    "gguf": "gguf",
    "sklearn": "demo",
    "ot": "ot",
    "matplotlib": "report",
    "jinja2": "report",
    "starlette": "studio",
    "uvicorn": "studio",
    "datasets": "eval",
    "lm_eval": "eval",
    "cma": "search",
    "optuna": "search",
    "ray": "ray",
    "flwr": "flower",
    "s3fs": "remote",
    "gcsfs": "remote",
    "aiohttp": "remote",
}
INSTALLED_AS = {"PIL": "pillow", "sklearn": "scikit-learn", "ot": "POT", "lm_eval": "lm-eval"}


LEAST = {"transformers": (5, 6)}
"""The version below which a package cannot be used: its classes load or save weights under other names."""


class TooOldError(ImportError):
    """An installed package is older than what isomerge works with."""


def require_version(package: str) -> None:
    """Raise where a package is installed in a version that is too old; a missing one is met when it is imported."""
    with contextlib.suppress(PackageNotFoundError):
        installed = version(INSTALLED_AS.get(package, package))
        major, minor = LEAST[package]
        numbers = re.match(r"(\d+)\.(\d+)", installed)
        if numbers and (int(numbers[1]), int(numbers[2])) < (major, minor):
            raise TooOldError(f"{package} {installed} is installed, and isomerge needs {major}.{minor} or later")


def not_imported(error: BaseException) -> str | None:
    """The package, of others than isomerge, whose import ended in this error; None if the error has another origin.

    A package with libraries of its own may fail with an error that does not name it, such as torch's OSError, so it is
    looked for among the modules that were being imported.
    """
    cause = first_cause(error)
    found = [cause.name or ""] if isinstance(cause, ImportError) else []
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    found += [frame.f_globals.get("__name__", "") for frame in frames]
    packages = [name.partition(".")[0] for name in found if name]
    return next((name for name in packages if name not in ("isomerge", "__main__")), None)


def why_not_imported(package: str, error: BaseException) -> str:
    """What is wrong with a package whose import failed, and what to do; the end of a sentence.

    >>> why_not_imported("ot_missing", ImportError("no module"))
    "the package 'ot_missing' is not installed. Install it with: pip install ot_missing"
    """
    name = INSTALLED_AS.get(package, package)
    wanted = f'"isomerge[{EXTRAS[package]}]"' if package in EXTRAS else name
    if not is_installed(package):
        return f"the package '{name}' is not installed. Install it with: pip install {wanted}"
    if isinstance(error, TooOldError):
        return f"{error}. Install it with: pip install --upgrade {wanted}"
    cause = first_cause(error)
    return (
        f"the package '{name}' {_version(name)}is installed but cannot be imported ({type(cause).__name__}: {cause}). "
        f"Repair its installation, for example with: pip install --force-reinstall {name}"
    )


def is_installed(package: str) -> bool:
    """Whether the package is there, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def first_cause(error: BaseException) -> BaseException:
    """The error that began a chain: transformers reports one of a library below it as its own."""
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return error


def _version(name: str) -> str:
    try:
        return f"{version(name)} "
    except PackageNotFoundError:
        return ""
