"""What `plan` says of an alignment, beside what it takes: processor seconds and peak memory, on random models.

    python benchmarks/align_estimate.py --work DIR                  # eight rows, some minutes
    python benchmarks/align_estimate.py --work DIR --rows llama     # those whose name contains this

Seconds are of the processor with one thread, of solving alone; memory is anonymous memory above the imports, which is
what the estimate adds to the program between strangers, seen two hundred times a second. Numbers of the estimate were
chosen on the shapes marked *, and on no other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import align
from safetensors.torch import save_file

ROWS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "vit 4x384 *": ("vit", False, {"num_hidden_layers": 4}),
    "llama 3x576 *": ("smollm2-135m", False, {"num_hidden_layers": 3, "vocab_size": 6000}),
    "roberta 2x768 *": ("roberta-base", False, {"num_hidden_layers": 2, "vocab_size": 8000}),
    "llama 12x576, near *": ("smollm2-135m", True, {"num_hidden_layers": 12}),
    "llama 4x512": ("smollm2-135m", False, {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
                    "num_key_value_heads": 8, "intermediate_size": 2048, "vocab_size": 8000}),
    "vit 7x256 *": ("vit", False, {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}),
    "roberta 4x512": ("roberta-base", False, {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
                      "intermediate_size": 2048, "vocab_size": 8000}),
    "roberta 4x512, near": ("roberta-base", True, {"num_hidden_layers": 4, "hidden_size": 512,
                            "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 8000}),
}  # fmt: skip
CHILD = """
import json, sys, threading, time
import torch, isomerge, isomerge.merging.api, scipy.optimize
from isomerge import system
from isomerge.alignment.estimate import estimate_alignment
from isomerge.alignment.scope import Scope
torch.set_num_threads(1)
anchor, source = (isomerge.open_checkpoint(f"{sys.argv[1]}/{name}") for name in "ab")
said = estimate_alignment(source, Scope("full"), threads=1, budget=8 << 30)
start, peak, going = system.anonymous_memory(), [0], [True]
more = said.peak_memory_bytes - system.present_memory()
def watch():
    while going:
        peak[0] = max(peak[0], system.anonymous_memory() - start)
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
before = time.process_time()
found = isomerge.align(source, anchor, level="full", threads=1)
seconds = time.process_time() - before
going.clear()
wanted = said.siblings_seconds if sys.argv[2] == "near" else said.strangers_seconds
print(json.dumps([wanted, seconds, more, peak[0]]))
"""


def measured(work: Path, shape: str, near: bool, changes: dict[str, Any]) -> list[float]:
    before = dict(align.SHAPES[shape])
    align.SHAPES[shape].update(changes)
    source, anchor, config = align.random_models(shape, near)
    align.SHAPES[shape] = before
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for name, state in (("a", anchor), ("b", source)):
            place = Path(folder) / name
            place.mkdir()
            save_file({key: t.contiguous() for key, t in state.items()}, place / "model.safetensors", {"format": "pt"})
            (place / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-c", CHILD, folder, "near" if near else "far"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    heads = ("estimate s", "measured s", "ratio", "estimate MB", "measured MB", "ratio")
    print(f"{'models':24}" + "".join(f"{head:>13}" for head in heads))
    for name, (shape, near, changes) in ROWS.items():
        if options.rows in name:
            wanted, seconds, more, peak = measured(options.work, shape, near, changes)
            numbers = [wanted, seconds, wanted / seconds]
            numbers += [] if near else [more / 1e6, peak / 1e6, more / peak]  # the estimate is of strangers
            print(f"{name:24}" + "".join(f"{number:13.2f}" for number in numbers), flush=True)


if __name__ == "__main__":
    main()
