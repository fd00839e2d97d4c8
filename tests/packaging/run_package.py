"""Build the source archive and the wheel, and run each where nothing else of isomerge is.

    python run_package.py TORCH

Two new environments in a temporary folder get torch TORCH, one the wheel and one the archive, and nothing of the
repository. In both every program is started, and `isomerge demo` trains, aligns and merges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "isomerge", "mergekit-yaml", "mergekit-multi", "mergekit-moe", "mergekit-tokensurgeon", "mergekit-extract-lora",
)  # fmt: skip


def run(*words: object, cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """The folder of the programs of a new environment."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    run(programs / "python", "-m", "pip", "install", "-q", *packages, cwd=folder)
    return programs


def build(place: Path) -> tuple[Path, Path]:
    """The wheel, which is built from the archive, and the archive; their metadata are as an index wants them."""
    python = environment(place / "build", "build", "twine") / "python"
    run(python, "-m", "build", "--outdir", place / "dist", ROOT, cwd=place)
    (archive,), (wheel,) = place.glob("dist/*.tar.gz"), place.glob("dist/*.whl")
    run(python, "-m", "twine", "check", "--strict", archive, wheel, cwd=place)
    return wheel, archive


def try_out(package: Path, place: Path, torch: str) -> None:
    # torch first and exact: a looser requirement may bring another build of it, with gigabytes of CUDA packages.
    programs = environment(place, f"torch=={torch}")
    run(programs / "python", "-m", "pip", "install", "-q", f"{package}[hf,demo]", cwd=place)
    where = run(programs / "python", "-c", "import isomerge; print(isomerge.__file__)", cwd=place)
    assert Path(where.strip()).is_relative_to(place), where
    version = run(programs / "isomerge", "--version", cwd=place).split()[-1]
    assert f"-{version}" in package.name, (version, package.name)
    for program in PROGRAMS:
        assert "Usage: isomerge" in run(programs / program, "--help", cwd=place)
    record = json.loads(run(programs / "isomerge", "demo", "-o", place / "demo", "--json", cwd=place))
    (pair,) = record["groups"][:1]
    accuracy = {row["way"]: row["accuracy"] for row in pair["rows"]}
    print(f"{package.name}, isomerge {version}: {accuracy}", flush=True)
    assert Path(record["report"]).is_file()
    assert accuracy["full"] > accuracy["none"] + 0.2, accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="package-") as scratch:
        for number, built in enumerate(build(Path(scratch))):
            try_out(built, Path(scratch) / f"environment-{number}", sys.argv[1])
