"""How does the work grow with the models? The parts of one question, each a table of its own.

    python benchmarks/scale.py merging                      # 2 × 2.2 GB, six methods beside mergekit and copying
    python benchmarks/scale.py merging --scale 7b --methods linear --skip-peer
    python benchmarks/scale.py near --work DIR              # two siblings of 1.1 billion parameters
    python benchmarks/scale.py strangers --against OLD/src  # `full` between strangers, beside another version
    python benchmarks/scale.py estimates --work DIR         # what `plan` says of an alignment, and what it takes
    python benchmarks/scale.py growth                       # exponents of time in layers, width and models
    python benchmarks/scale.py ray DIR --parameters 1e9     # the same merge on a Ray cluster and on threads
    python benchmarks/scale.py --list

A part is a script of its own; what follows its name goes to it (`python benchmarks/scale.py PART --help`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "merging": ("merge.py", "merging at the speed of copying, within 600 MB"),
    "near": ("align_near.py", "aligning two siblings beside copying them, and its peak memory"),
    "strangers": ("align_strangers.py", "`full` between strangers: processor time and objective of two versions"),
    "estimates": ("align_estimate.py", "what `plan` says of an alignment, beside what it takes"),
    "growth": ("growth.py", "how time grows with layers, width and the number of models"),
    "ray": ("scale_ray.py", "a merge on a Ray cluster beside threads"),
    "plan": ("scale_plan.py", "bytes and seconds of a merge of 671 billion parameters, from headers alone"),
}


def main() -> None:
    part, *flags = sys.argv[1:] or ["--list"]
    if part not in PARTS:
        print("\n".join(f"{name:<10} {about}" for name, (_, about) in PARTS.items()))
        raise SystemExit(0 if part == "--list" else 2)
    raise SystemExit(subprocess.call([sys.executable, str(HERE / PARTS[part][0]), *flags]))


if __name__ == "__main__":
    main()
