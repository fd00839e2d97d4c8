"""How long does a check take? Whole commands on billion-parameter checkpoints, and what starting the program costs.

    python benchmarks/check.py --scale tiny                   # seconds: does it run?
    python benchmarks/check.py --work DIR                     # 1.1 billion parameters in bfloat16, about 9 GB of disk
    python benchmarks/check.py --cold                         # also with nothing in the page cache (needs the right to)

The checkpoints are those of benchmarks/merge.py (a random base and two fine-tunes of it), and a stranger of the same
shape. Every number is the wall time of a command of its own, imports included; the best of --runs, and beside it the
processor time, which other work on the machine changes less. The goal: under ten seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import merge as bench

GOAL = 10.0
START_GOAL = 0.5


def write_stranger(folder: Path, config: dict[str, int]) -> None:
    """Another draw of the base."""
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    state = {}
    for number, (name, shape) in enumerate(bench.shapes_of(config)):
        random = torch.Generator().manual_seed(70_000 + number)
        state[name] = (bench.SPREAD * torch.randn(shape, generator=random)).bfloat16()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    bench._write_side_files(folder, config)


def timed(command: list[str]) -> tuple[float, float, str]:
    """Wall and processor seconds of a command, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def forget(files: list[Path]) -> None:
    """Out of the page cache."""
    os.sync()
    for file in files:
        with file.open("rb") as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, models: list[Path], base: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    command = [*bench.isomerge_command(), "check", *map(str, models), "--json"]
    command += ["--base", str(base)] if base else []
    files = [path / "model.safetensors" for path in [*models, *([base] if base else [])]]
    bench.warm(files)
    runs = [timed(command) for _ in range(options.runs)]
    seconds, processor, answer = min(runs)
    record = json.loads(answer)
    cold = None
    if options.cold:
        forget(files)
        cold = timed(command)[0]
    return {
        "case": name, "seconds": seconds, "processor": processor, "inside": record["seconds"], "cold": cold,
        "verdict": record["verdict"], "sampled": record["weights"]["sampled"], "goal": seconds <= GOAL,
    }  # fmt: skip


def start_seconds(runs: int) -> dict[str, float]:
    """The help, and what `import isomerge` costs beyond torch."""
    python = sys.executable
    help_ = min(timed([*bench.isomerge_command(), "--help"])[0] for _ in range(runs))
    alone = min(timed([python, "-c", "import torch"])[0] for _ in range(runs))
    both = min(timed([python, "-c", "import torch, isomerge"])[0] for _ in range(runs))
    return {"help": help_, "import beyond torch": both - alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="1.1b", choices=list(bench.SCALES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="also measure with the files not in memory")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "isomerge-bench-merge")
    options = parser.parse_args()
    config = bench.SCALES[options.scale]
    folder = options.work / options.scale
    bench.write_checkpoints(folder, config)
    write_stranger(folder / "stranger", config)
    a, b, base, stranger = (folder / name for name in ("a", "b", "base", "stranger"))
    parameters = sum(math.prod(shape) for _, shape in bench.shapes_of(config))
    print(f"{parameters / 1e9:.2f} billion parameters in bfloat16, {os.cpu_count()} cores, {platform.machine()}\n")
    print("| models | seconds | processor s | cold s | values read of each | verdict | ≤ 10 s |")
    print("|---|---|---|---|---|---|---|")
    cases = [
        ("two siblings", [a, b], None),
        ("two siblings and their base", [a, b], base),
        ("two strangers", [a, stranger], None),
    ]
    rows = []
    for case in cases:
        row = measure(*case, options)
        rows.append(row)
        cold = f"{row['cold']:.1f}" if row["cold"] else "–"
        cells = [row["case"], f"{row['seconds']:.1f}", f"{row['processor']:.1f}", cold, f"{row['sampled']:,}"]
        print("| " + " | ".join([*cells, row["verdict"], "yes" if row["goal"] else "NO"]) + " |", flush=True)
    print()
    for what, seconds in start_seconds(max(5, options.runs)).items():
        print(f"{what}: {seconds:.2f} s (goal ≤ {START_GOAL:g}: {'yes' if seconds <= START_GOAL else 'NO'})")
    (options.work / f"check-{options.scale}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
