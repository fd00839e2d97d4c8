"""Time and memory of merging diffusion models: an SDXL-shaped U-Net and a Flux-shaped transformer of random weights.

    python benchmarks/diffusion.py --scale tiny            # seconds: does it run?
    python benchmarks/diffusion.py --work DIR --out FILE   # 0.7 and 0.6 billion parameters in bfloat16, 12 GB of disk

The structure is that of the real models (levels, blocks, attention in them), with narrower layers; diffusers builds and
saves them, and loads the result. Beside `isomerge merge`: `copy`, which reads one model and writes it, the least that a
merge costs; and `naive`, which loads both state_dicts, averages and saves them. Every number is of a process of its
own, imports included: wall time, processor time, and the largest resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

UNET = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10), "addition_embed_type": "text_time", "use_linear_projection": True,
}  # fmt: skip
NARROW = {"block_out_channels": (160, 320, 640), "attention_head_dim": (2, 5, 10), "cross_attention_dim": 2048,
          "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}  # fmt: skip
TINY = {"block_out_channels": (32, 32, 64), "attention_head_dim": (1, 2, 2), "cross_attention_dim": 32,
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64}  # fmt: skip
FLUX = {"in_channels": 64, "guidance_embeds": True}
SCALES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "tiny": {
        "SDXL-shaped": ("UNet2DConditionModel", {**UNET, **TINY}),
        "Flux-shaped": ("FluxTransformer2DModel", {**FLUX, "num_layers": 2, "num_single_layers": 4,
                        "num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6),
                        "joint_attention_dim": 32, "pooled_projection_dim": 16}),
    },
    "real": {
        "SDXL-shaped": ("UNet2DConditionModel", {**UNET, **NARROW}),
        "Flux-shaped": ("FluxTransformer2DModel", {**FLUX, "num_layers": 5, "num_single_layers": 10,
                        "num_attention_heads": 10, "attention_head_dim": 128, "joint_attention_dim": 4096,
                        "pooled_projection_dim": 768}),
    },
}  # fmt: skip
MAKE = """
import sys, json, torch, diffusers
kind, config, seed, folder = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(seed); torch.set_default_dtype(torch.bfloat16)
getattr(diffusers, kind)(**config).save_pretrained(folder)
"""
NAIVE = """
import sys
from safetensors.torch import load_file, save_file
a, b = (load_file(f"{folder}/diffusion_pytorch_model.safetensors") for folder in sys.argv[1:3])
save_file({name: ((a[name].float() + b[name].float()) / 2).to(a[name].dtype) for name in a}, sys.argv[3])
"""
COPY = "import shutil, sys, os; shutil.copyfile(sys.argv[1], sys.argv[2]); os.sync()"
CHECK = """
import sys, torch, diffusers
from safetensors import safe_open
made = getattr(diffusers, sys.argv[1]).from_pretrained(sys.argv[2], torch_dtype=torch.bfloat16).state_dict()
files = [safe_open(f"{folder}/diffusion_pytorch_model.safetensors", "pt") for folder in sys.argv[3:5]]
for name, tensor in made.items():
    first, second = (file.get_tensor(name).float() for file in files)
    assert torch.equal(tensor, ((first + second) / 2).bfloat16()), name
print(sum(tensor.numel() for tensor in made.values()))
"""


def main() -> None:
    options = _arguments()
    work = options.work or Path(tempfile.mkdtemp(prefix="diffusion-"))
    rows = []
    for name, (kind, config) in SCALES[options.scale].items():
        folders = [work / f"{name}-{seed}" for seed in (0, 1)]
        for seed, folder in enumerate(folders):
            if not (folder / "config.json").is_file():
                _run("-c", MAKE, kind, json.dumps(config), str(seed), str(folder))
        file = folders[0] / "diffusion_pytorch_model.safetensors"
        for path in folders:  # into the system's cache; not read here, where a child's peak memory would begin
            _run("-c", COPY, str(path / "diffusion_pytorch_model.safetensors"), os.devnull)
        out = work / "out"
        ways = {
            "copy": ("-c", COPY, str(file), str(work / "copied.safetensors")),
            "naive": ("-c", NAIVE, *map(str, folders), str(work / "naive.safetensors")),
            "isomerge": ("-m", "isomerge", "merge", *map(str, folders), "-o", str(out), "--quiet", "--no-verify",
                         "--threads", "1"),
            "isomerge slerp": ("-m", "isomerge", "merge", *map(str, folders), "-o", str(work / "slerp"), "--quiet",
                               "--method", "slerp", "--t", "0.3", "--no-verify", "--threads", "1"),
        }  # fmt: skip
        measured = {way: _run(*command) for way, command in ways.items()}
        parameters = int(_run("-c", CHECK, kind, str(out), *map(str, folders))["said"])
        for way, one in measured.items():
            row = {key: value for key, value in one.items() if key != "said"}
            rows.append({"model": name, "parameters": parameters, "way": way, **row})
            line = f"{one['seconds']:7.1f} s  {one['cpu']:7.1f} s of a core  {one['peak'] / 1e6:7.0f} MB"
            print(f"{name:12} {parameters / 1e6:6.0f}M  {way:15} {line}")
        for path in (out, work / "slerp"):
            shutil.rmtree(path)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    if not options.work:
        shutil.rmtree(work)


def _run(*command: str) -> dict[str, Any]:
    """A process of its own: its wall and processor time, its peak memory, what it printed last."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, *command], stdout=said)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{command[:3]} failed with {status}")
        said.seek(0)
        text = said.read().decode().strip()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024,
            "said": text.rpartition("\n")[2]}  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=list(SCALES), default="real")
    parser.add_argument("--work", type=Path, help="where the models are kept; else a temporary folder")
    parser.add_argument("--out", type=Path, help="a JSON file of all numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
