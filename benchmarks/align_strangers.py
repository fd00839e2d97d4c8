"""`full` between strangers, in processor time: this version beside another one, each in a process of its own.

    python benchmarks/align_strangers.py --shapes vit roberta-base --against OLD/src
    python benchmarks/align_strangers.py --shapes smollm2-135m --layers 12

The shapes and random weights are those of align.py. `--against` names the `src` folder of another checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHILD = """
import json, sys, time, align, isomerge
from isomerge.checkpoint import open_checkpoint
shape, layers, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if layers:
    align.SHAPES[shape]["num_hidden_layers"] = layers
source, anchor, config = align.random_models(shape, near=False)
models = [open_checkpoint(m, config=config) for m in (source, anchor)]
wall, processor = time.perf_counter(), time.process_time()
found = isomerge.align(*models, level="full", threads=threads)
print(json.dumps({"wall": time.perf_counter() - wall, "processor": time.process_time() - processor,
                  "objective": found.objective[-1], "sweeps": len(found.objective)}))
"""


def measured(source: Path, shape: str, layers: int, threads: int) -> dict[str, Any]:
    paths = os.pathsep.join([str(source), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, shape, str(layers), str(threads)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["vit", "roberta-base", "smollm2-135m"])
    parser.add_argument("--layers", type=int, default=0, help="instead of as many as the shape has")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    versions = {"this": HERE.parent / "src", **({"other": options.against.resolve()} if options.against else {})}
    print(f"{'shape':16}{'version':10}{'wall s':>10}{'processor s':>13}{'objective':>12}{'sweeps':>8}")
    for shape in options.shapes:
        rows = {}
        for name, source in versions.items():
            row = rows[name] = measured(source, shape, options.layers, options.threads)
            numbers = f"{row['wall']:10.1f}{row['processor']:13.1f}{row['objective']:12.4f}{row['sweeps']:8}"
            print(f"{shape:16}{name:10}{numbers}", flush=True)
        if len(rows) == 2:
            faster = rows["other"]["processor"] / rows["this"]["processor"]
            better = rows["this"]["objective"] / rows["other"]["objective"] - 1
            print(f"{shape:16}{faster:.1f} times less processor time, objective {better:+.2%}")


if __name__ == "__main__":
    main()
