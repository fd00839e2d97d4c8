"""A plan on paper: merging mixtures of experts of 671 billion parameters on 16 machines, from headers alone.

    python benchmarks/scale_plan.py FOLDER [--network 3e9 --read 40e9 --write 20e9 --rate 23.6]

The models are sparse files: their headers are those of the real shape, and their weights take no room. `isomerge.plan`
reads the headers; bytes, units and memory are its own. Seconds are bytes by the bandwidths that are assumed, and
processor seconds by a rate measured with benchmarks/scale_ray.py; nothing is merged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import isomerge

WIDTH, HEADS, LAYERS, DENSE, EXPERTS, VOCABULARY = 7168, 128, 61, 3, 256, 129280
SHARD = 163
"""Weight files per model."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Latent attention, three dense layers, then 256 routed experts and a shared one in each of 58."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }  # fmt: skip
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        attention = {
            "q_a_proj": (1536, WIDTH), "q_a_layernorm": (1536,), "q_b_proj": (HEADS * 192, 1536),
            "kv_a_proj_with_mqa": (576, WIDTH), "kv_a_layernorm": (512,), "kv_b_proj": (HEADS * 256, 512),
            "o_proj": (WIDTH, HEADS * 128),
        }  # fmt: skip
        found |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        found |= {f"{at}{name}.weight": (WIDTH,) for name in ("input_layernorm", "post_attention_layernorm")}
        blocks = {"mlp": 18432} if layer < DENSE else {f"mlp.experts.{one}": 2048 for one in range(EXPERTS)}
        if layer >= DENSE:
            blocks["mlp.shared_experts"] = 2048
            found[f"{at}mlp.gate.weight"] = (EXPERTS, WIDTH)
        for block, inner in blocks.items():
            found |= {f"{at}{block}.{name}_proj.weight": (inner, WIDTH) for name in ("gate", "up")}
            found[f"{at}{block}.down_proj.weight"] = (WIDTH, inner)
    return found


def write_headers(folder: Path) -> None:
    """Files of the right size with nothing in them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS, "dtype": "bfloat16"}))
    names = sorted(shapes())
    weight_map, total = {}, 0
    for number in range(SHARD):
        header, place = {}, 0
        for name in names[number::SHARD]:
            size = 2
            for axis in shapes_of[name]:
                size *= axis
            header[name] = {"dtype": "BF16", "shape": shapes_of[name], "data_offsets": [place, place + size]}
            place += size
            weight_map[name] = f"model-{number + 1:05d}-of-{SHARD:05d}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"model-{number + 1:05d}-of-{SHARD:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + place)
        total += place
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


shapes_of = shapes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machines", type=int, default=16)
    parser.add_argument("--cores", type=int, default=32)
    parser.add_argument("--network", type=float, default=3e9, help="bytes a second of one machine (25 GbE)")
    parser.add_argument("--read", type=float, default=40e9, help="bytes a second that the storage gives all machines")
    parser.add_argument("--write", type=float, default=20e9)
    parser.add_argument("--rate", type=float, default=23.6, help="processor seconds for 1e9 merged parameters")
    given = parser.parse_args()
    for name in ("base", "a", "b"):
        write_headers(given.folder / name)
    recipe = {
        "merge_method": "ties", "base_model": str(given.folder / "base"), "parameters": {"density": 0.5},
        "models": [{"model": str(given.folder / name), "parameters": {"weight": 0.5}} for name in ("a", "b")],
    }  # fmt: skip
    plan = isomerge.plan(recipe, threads=1)
    print(plan)
    parameters = plan.bytes_written / 2
    network = given.machines * given.network
    for what, seconds in {
        "reading": plan.bytes_read / min(network, given.read),
        "writing": plan.bytes_written / min(network, given.write),
        "processors": parameters / 1e9 * given.rate / given.machines / given.cores,
        "handing out units, at 1 ms": plan.tensors * 1e-3,
    }.items():
        print(f"{what}: {seconds:,.0f} s")


if __name__ == "__main__":
    main()
