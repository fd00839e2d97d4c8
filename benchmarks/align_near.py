"""Two siblings of a billion parameters, 1 % apart: aligning and writing beside copying, and the peak memory.

    python benchmarks/align_near.py --work DIR                 # 22 layers of width 2048: 1.1 billion parameters
    python benchmarks/align_near.py --work DIR --layers 2

Models are random bfloat16, made in DIR (4.4 GB, and 2.2 GB that are written). Copying reads both files, writes one and
syncs, with nothing imported. Peak memory is anonymous memory above the imports: pages of mapped files are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

WIDTH, INNER, KEYS, VOCABULARY = 2048, 5632, 256, 32000
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": INNER, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
BLOCK = 1 << 24
CHILD = """
import json, sys, threading, time
import isomerge, isomerge.alignment.api, scipy.optimize
def now(): return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))
before, peak, going = now(), [0], [True]
def watch():
    while going:
        peak[0] = max(peak[0], now() - before)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
wall, processor = time.perf_counter(), time.process_time()
found = isomerge.align(sys.argv[1] + "/b", sys.argv[1] + "/a", level="full")
solved = time.perf_counter() - wall, time.process_time() - processor
found.save(sys.argv[1] + "/out", force=True)
going.clear()
print(json.dumps({"verdict": found.verdict, "solve wall": solved[0], "solve processor": solved[1],
                  "wall": time.perf_counter() - wall, "processor": time.process_time() - processor, "peak": peak[0]}))
"""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    outer = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    inside = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (KEYS, WIDTH), "self_attn.v_proj": (KEYS, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
    }  # fmt: skip
    layered = {f"model.layers.{i}.{n}.weight": shape for i in range(layers) for n, shape in inside.items()}
    return {**outer, **layered, "model.norm.weight": (WIDTH,)}


def make(work: Path, layers: int) -> None:
    """Both models, where they are not there yet."""
    from safetensors.torch import save_file

    if all((work / name / "config.json").exists() for name in "ab"):
        return
    generator = torch.Generator().manual_seed(0)
    for name in "ab":
        (work / name).mkdir(parents=True, exist_ok=True)
    states: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}}
    for tensor, shape in shapes(layers).items():
        value = 0.02 * torch.randn(shape, generator=generator) if len(shape) > 1 else torch.ones(shape)
        states["a"][tensor] = value.bfloat16()
        states["b"][tensor] = (value + 0.0002 * torch.randn(shape, generator=generator)).bfloat16()
    for name, state in states.items():
        save_file(state, work / name / "model.safetensors", {"format": "pt"})
        (work / name / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def copying(work: Path) -> float:
    """Seconds to read both files, write one and sync."""
    start = time.perf_counter()
    with (work / "copy").open("wb") as out:
        for name in "ab":
            with (work / name / "model.safetensors").open("rb") as file:
                while block := file.read(BLOCK):
                    if name == "b":
                        out.write(block)
        os.fsync(out.fileno())
    seconds = time.perf_counter() - start
    (work / "copy").unlink()
    return seconds


def measured(work: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CHILD, str(work)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=22)
    options = parser.parse_args()
    make(options.work, options.layers)
    before = copying(options.work)
    row = measured(options.work)
    limit = min(before, copying(options.work))
    print(row["verdict"])
    print(f"copying {limit:.1f} s; aligned {row['solve wall']:.1f} s ({row['solve processor']:.1f} processor s)")
    print(f"and written {row['wall']:.1f} s ({row['processor']:.1f} processor s), {row['wall'] / limit:.1f} × copying")
    print(f"peak {row['peak'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
