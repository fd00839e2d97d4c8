"""Run the computation in a process of its own, and read and write what was recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = Path(__file__).with_name("hashes.json")
QUICK = ("architectures",)
SLOW = ("files", "other", "methods", "data", "align", "more-data", "variants")  # 7 to 60 s each
PARTS = (*QUICK, *SLOW)

# One thread, and of every library the code that any x86-64 processor runs: bits then depend on little but versions.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}


def computed(parts: Sequence[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What the parts give on this tree: `machine`, `results` and `seconds`."""
    settings = ENVIRONMENT if environment is None else environment
    given = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT}
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    done = subprocess.run(
        [sys.executable, "-m", "recorded.compute", *parts],
        env={**given, **settings, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"computing {', '.join(parts)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def recorded() -> dict[str, Any]:
    return json.loads(FIXTURE.read_text())


def write(record: dict[str, Any]) -> None:
    """One line per result, so that a diff shows which have changed."""
    lines = [f"    {json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(record["results"].items())]
    machine = json.dumps(record["machine"], indent=4).replace("\n", "\n  ")
    FIXTURE.write_text(f'{{\n  "machine": {machine},\n  "results": {{\n' + ",\n".join(lines) + "\n  }\n}\n")
