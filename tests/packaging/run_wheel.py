"""Build the source archive, a wheel from it, and run `isomerge demo` from that wheel where nothing else of it is.

    python run_wheel.py TORCH

A new environment in a temporary folder gets torch TORCH and the wheel, and nothing of the repository.
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


def run(*words: object, cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
    place = Path(scratch)
    venv.create(place / "env", with_pip=True)
    python = place / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "-q", "build", f"torch=={sys.argv[1]}", cwd=place)
    run(python, "-m", "build", "--outdir", place / "dist", ROOT, cwd=place)  # the wheel is built from the archive
    (archive,), (wheel,) = place.glob("dist/*.tar.gz"), place.glob("dist/*.whl")
    run(python, "-m", "pip", "install", "-q", f"{wheel}[hf,demo]", cwd=place)
    where = run(python, "-c", "import isomerge; print(isomerge.__file__)", cwd=place)
    assert Path(where.strip()).is_relative_to(place), where
    record = json.loads(run(python.parent / "isomerge", "demo", "-o", place / "demo", "--json", cwd=place))
    (pair,) = record["groups"][:1]
    accuracy = {row["way"]: row["accuracy"] for row in pair["rows"]}
    print(f"{archive.name}, {wheel.name}: {accuracy}")
    assert Path(record["report"]).is_file()
    assert accuracy["full"] > accuracy["none"] + 0.2, accuracy
