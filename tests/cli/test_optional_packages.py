"""A package that is not installed and one that cannot be imported need different remedies, so they are told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models import model

pytestmark = pytest.mark.slow  # every test starts processes of its own


BROKEN = "raise ImportError('libgomp.so.1: cannot open shared object file')"
# As transformers reports what went wrong below it.
BELOW = """
try:
    import nothing_of_that_name
except ImportError as error:
    raise ImportError('no AutoModel') from error
"""
HIDDEN = "import sys; sys.modules.update({{'{0}': None}})"


def run(folder: Path, *words: str) -> tuple[int, str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "isomerge", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "defect" not in done.stderr
    return done.returncode, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (BROKEN, "is installed but cannot be imported (ImportError: libgomp.so.1: cannot open shared object file)"),
        (BELOW, "is installed but cannot be imported (ModuleNotFoundError: No module named 'nothing_of_that_name')"),
    ],
)
def test_a_broken_transformers_is_reported_with_its_cause(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(source)
    (tmp_path / "texts.txt").write_text("the cat sat")
    code, told = run(tmp_path, "eval", str(model("llama")), "--data", "texts.txt")
    assert code != 0 and says in told and "--force-reinstall transformers" in told
    assert "not installed" not in told


def test_a_missing_transformers_is_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN.format("transformers"))
    (tmp_path / "texts.txt").write_text("the cat sat")
    code, told = run(tmp_path, "eval", str(model("llama")), "--data", "texts.txt")
    assert code != 0 and "'transformers' is not installed" in told and '"isomerge[hf]"' in told


def test_a_selftest_without_transformers_says_that_it_measured_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN.format("transformers"))
    code, told = run(tmp_path, "selftest", str(model("llama")))
    assert code == 1 and "function after scrambling" in told
    assert "CHANGED" not in told and told.count("not measured") == 2


@pytest.mark.parametrize("version", ["4.57.6", "5.5.4"])
def test_a_transformers_that_is_too_old_is_named_with_its_version(tmp_path: Path, version: str) -> None:
    """Its classes load or save weights under other names, which would end in errors that explain nothing."""
    about = tmp_path / f"transformers-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    (tmp_path / "texts.txt").write_text("the cat sat")
    code, told = run(tmp_path, "eval", str(model("llama")), "--data", "texts.txt")
    assert code != 0 and f"transformers {version} is installed, and isomerge needs 5.6 or later" in told


NO_LIBRARY = "libcudnn.so.9: cannot open shared object file"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (f"raise ImportError('{NO_LIBRARY}')", f"cannot be imported (ImportError: {NO_LIBRARY})"),
        (f"raise OSError('{NO_LIBRARY}')", f"cannot be imported (OSError: {NO_LIBRARY})"),
    ],
)
def test_a_broken_torch_is_no_defect_of_isomerge(tmp_path: Path, source: str, says: str) -> None:
    """Libraries for another GPU, or none: what people meet first on a new machine."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    code, told = run(tmp_path, "merge", "a", "b", "-o", "out")
    assert code == 1 and "the package 'torch'" in told and says in told and "--force-reinstall torch" in told


def test_a_missing_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN.format("torch"))
    code, told = run(tmp_path, "merge", "a", "b", "-o", "out")
    assert code == 1 and "the package 'torch' is not installed. Install it with: pip install torch" in told
