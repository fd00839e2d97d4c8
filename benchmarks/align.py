"""How fast is alignment? One table: seconds and peak memory, beside a plain loop of the published algorithm.

    python benchmarks/align.py                    # the four shapes on the CPU
    python benchmarks/align.py --device cuda      # … on a GPU
    python benchmarks/align.py --shapes vit       # one of them

Weights are random: independent (strangers) or near-identical (1 % apart). The loop is the founding paper's algorithm as
published: per layer and head, one SVD each, one assignment per feed-forward; once in float32, once in float64, which is
what isomerge solves and applies in. Both start from float32 tensors on the device and end with the tensors that moved
there. Ratios are loop ÷ isomerge in the same run, best of `--repeat`; peak memory is above the imports, from files.
Rotary positions and grouped queries are beyond the published algorithm, so decoders have no loop beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 7,
            "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "image_size": 32,
            "patch_size": 4},
    "roberta-base": {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "num_hidden_layers": 12,
                     "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 50265,
                     "max_position_embeddings": 514, "tie_word_embeddings": True},
    "smollm2-135m": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30,
                     "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
                     "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    "deberta-v3-large": {"model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"],
                         "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16,
                         "intermediate_size": 4096, "vocab_size": 128100, "max_position_embeddings": 512,
                         "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
                         "share_att_key": True, "pos_att_type": "p2c|c2p", "type_vocab_size": 0,
                         "position_biased_input": False},
}  # fmt: skip
NAMES = {  # per family that the paper's algorithm is for: q, k, v, o, ffn in, ffn out
    "vit": ("vit.encoder.layer.{}.attention.attention.query", "vit.encoder.layer.{}.attention.attention.key",
            "vit.encoder.layer.{}.attention.attention.value", "vit.encoder.layer.{}.attention.output.dense",
            "vit.encoder.layer.{}.intermediate.dense", "vit.encoder.layer.{}.output.dense"),
    "roberta": ("roberta.encoder.layer.{}.attention.self.query", "roberta.encoder.layer.{}.attention.self.key",
                "roberta.encoder.layer.{}.attention.self.value", "roberta.encoder.layer.{}.attention.output.dense",
                "roberta.encoder.layer.{}.intermediate.dense", "roberta.encoder.layer.{}.output.dense"),
    "deberta-v2": ("deberta.encoder.layer.{}.attention.self.query_proj",
                   "deberta.encoder.layer.{}.attention.self.key_proj",
                   "deberta.encoder.layer.{}.attention.self.value_proj",
                   "deberta.encoder.layer.{}.attention.output.dense",
                   "deberta.encoder.layer.{}.intermediate.dense", "deberta.encoder.layer.{}.output.dense"),
}  # fmt: skip
State = dict[str, torch.Tensor]
WHAT = (("rotation, no FFN", "rotation", False), ("rotation", "rotation", True), ("full", "full", True))


def random_models(shape: str, near: bool) -> tuple[State, State, dict[str, Any]]:
    """Two random checkpoints with the tensors a stock model of this shape has on disk."""
    import transformers

    from isomerge.checkpoint import open_checkpoint

    config = SHAPES[shape]
    kind = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    model = kind(kind.config_class(**{k: v for k, v in config.items() if k not in ("model_type", "architectures")}))
    opened = open_checkpoint(model)
    anchor = {n: opened.read(n) + 0.02 * torch.randn(i.shape) for n, i in opened.tensors.items()}
    if near:
        source = {n: t + 0.01 * t.std().nan_to_num(0.01) * torch.randn_like(t) for n, t in anchor.items()}
    else:
        source = {n: t.flatten()[torch.randperm(t.numel())].reshape(t.shape) for n, t in anchor.items()}
    return source, anchor, {**opened.config, **config}


def published_loop(
    source: State, anchor: State, config: dict[str, Any], *, ffn: bool, device: str, dtype: torch.dtype = torch.float32
) -> State:
    """The founding paper's matching, as published: loops over layers and heads."""
    from scipy.optimize import linear_sum_assignment

    names = NAMES[config["model_type"]]
    heads = config["num_attention_heads"]
    out = dict(source)
    for layer in range(config["num_hidden_layers"]):
        q, k, v, o, fc1, fc2 = (n.format(layer) for n in names)
        W = {n: (source[n + ".weight"].to(dtype), anchor[n + ".weight"].to(dtype)) for n in (q, k, v, o)}
        b = {n: (source[n + ".bias"].to(dtype), anchor[n + ".bias"].to(dtype)) for n in (q, k, v)}
        moved = {n: W[n][0].clone() for n in (q, k, v, o)}
        shifted = {n: b[n][0].clone() for n in (q, k, v)}
        e = W[q][0].shape[0] // heads
        for h in range(heads):
            s = slice(h * e, (h + 1) * e)
            C = sum(W[n][0][s] @ W[n][1][s].T + torch.outer(b[n][0][s], b[n][1][s]) for n in (q, k))
            U, _, Vh = torch.linalg.svd(C)
            R = U @ Vh
            for n in (q, k):
                moved[n][s], shifted[n][s] = R.T @ W[n][0][s], b[n][0][s] @ R
            C = W[v][0][s] @ W[v][1][s].T + W[o][0][:, s].T @ W[o][1][:, s] + torch.outer(b[v][0][s], b[v][1][s])
            U, _, Vh = torch.linalg.svd(C)
            R = U @ Vh
            moved[v][s], shifted[v][s] = R.T @ W[v][0][s], b[v][0][s] @ R
            moved[o][:, s] = W[o][0][:, s] @ R
        out |= {n + ".weight": t.float() for n, t in moved.items()}
        out |= {n + ".bias": t.float() for n, t in shifted.items()}
        if ffn:
            parts = (fc1 + ".weight", fc1 + ".bias", fc2 + ".weight")
            (i, c, p), (i2, c2, p2) = ([m[n].to(dtype) for n in parts] for m in (source, anchor))
            cost = i @ i2.T + torch.outer(c, c2) + p.T @ p2
            rows, columns = linear_sum_assignment(cost.cpu().numpy(), maximize=True)
            order = torch.empty(len(rows), dtype=torch.int64)
            order[torch.from_numpy(columns)] = torch.from_numpy(rows)
            order = order.to(device)
            out |= dict(zip(parts, (i[order].float(), c[order].float(), p[:, order].float()), strict=True))
    return out


def ours(source: State, anchor: State, config: dict[str, Any], *, level: str, ffn: bool, device: str) -> State:
    import isomerge
    from isomerge.checkpoint import open_checkpoint

    models = [open_checkpoint(m, config=config) for m in (source, anchor)]
    only = None if ffn or level == "full" else "attention"
    alignment = isomerge.align(*models, level=level, only=only, device=device)
    return dict(alignment.moved().changed())


def best_of(function: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_above_imports(shape: str, level: str, ffn: bool) -> dict[str, float]:
    """Peak memory of one alignment from files on disk, in a process of its own, above what the imports took."""
    code = (
        "import sys,json; sys.path.insert(0, sys.argv[1]); import align as b; "
        "print(json.dumps(b.measure_memory(*sys.argv[2:4], sys.argv[4] == 'True')))"
    )
    here = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here, shape, level, str(ffn)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_memory(shape: str, level: str, ffn: bool) -> dict[str, float]:
    import tempfile

    import isomerge
    from isomerge.alignment.units import Unit
    from isomerge.architectures import describe

    with tempfile.TemporaryDirectory() as folder:
        _write_models(shape, Path(folder))
        model = describe(isomerge.open_checkpoint(Path(folder) / "a"))
        roots = [s for s, g in model.architecture.spaces.items() if not g.per and s != "residual"]
        units = [Unit(r, model.architecture.spaces) for r in roots]
        touched = [[lay for lay in model.layouts.values() if u.members & lay.spaces()] for u in units]
        sizes = [sum(torch.Size(lay.shape).numel() for lay in layouts) for layouts in touched]
        # A child process, watched every few milliseconds. Pages of the input files that stay mapped are not counted:
        # the system takes them back whenever it wants to.
        code = (
            "import sys,threading,time,isomerge,isomerge.alignment.api,scipy.optimize\n"
            "now=lambda: next(int(l.split()[1])*1024 for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
            "before=now(); peak=[before]; going=[True]\n"
            "def watch():\n"
            "    while going: peak[0]=max(peak[0],now()); time.sleep(0.003)\n"
            "threading.Thread(target=watch,daemon=True).start()\n"
            "isomerge.align(sys.argv[1]+'/b',sys.argv[1]+'/a',level=sys.argv[2],"
            "only=None if sys.argv[3]=='True' else 'attention').save(sys.argv[1]+'/out',verify=False)\n"
            "going.clear(); print(peak[0]-before)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, folder, level, str(ffn)], capture_output=True, text=True, check=True
        )
    return {"peak": float(done.stdout.split()[-1]), "two_largest_units": 2 * 4.0 * max(sizes)}


def _write_models(shape: str, folder: Path) -> None:
    from safetensors.torch import save_file

    source, anchor, config = random_models(shape, near=False)
    for name, state in (("a", anchor), ("b", source)):
        (folder / name).mkdir()
        save_file({k: v.contiguous() for k, v in state.items()}, folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config, default=str))


def row_of(shape: str, near: bool, what: str, level: str, ffn: bool, models: Any, options: Any) -> dict[str, Any]:
    """One line of the table, measured."""
    device, repeat = options.device, options.repeat
    published = SHAPES[shape]["model_type"] in NAMES
    kwargs = {"level": level, "ffn": ffn, "device": device}
    if device != "cpu":  # the first call loads kernels
        ours(*models, **kwargs)
        if published:
            published_loop(*models, ffn=False, device=device)
    row: dict[str, Any] = {"shape": shape, "pair": "near" if near else "independent", "what": what}
    if level == "rotation" and published:
        for key, dtype in (("loop", torch.float32), ("loop64", torch.float64)):
            row[key] = best_of(lambda d=dtype: published_loop(*models, ffn=ffn, device=device, dtype=d), repeat)
    row["isomerge"] = best_of(lambda: ours(*models, **kwargs), repeat if level == "rotation" else 1)
    if not near and not options.no_memory and device == "cpu" and level == "rotation":
        row |= peak_above_imports(shape, level, ffn)
    return row


def line_of(row: dict[str, Any]) -> str:
    def number(key: str, scale: float = 1.0, digits: int = 2) -> str:
        return f"{row[key] / scale:10.{digits}f}" if key in row else f"{'–':>10}"

    ratios = "".join(f"{row[k] / row['isomerge']:10.2f}" if k in row else f"{'–':>10}" for k in ("loop", "loop64"))
    memory = number("peak", 1e6, 0) + number("two_largest_units", 1e6, 0)
    seconds = number("loop") + number("loop64") + number("isomerge")
    return f"{row['shape']:18}{row['pair']:13}{row['what']:18}{seconds}{ratios}{memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--pairs", nargs="+", default=["independent", "near"], choices=["independent", "near"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-full", action="store_true")
    parser.add_argument("--no-ffn", action="store_true", help="only the attention rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    heads = ("loop s", "loop64 s", "isomerge s", "×loop", "×loop64", "peak MB", "2 units MB")
    print(f"{'shape':18}{'pair':13}{'what':18}" + "".join(f"{h:>10}" for h in heads))
    for shape in options.shapes:
        for near in (pair == "near" for pair in options.pairs):
            source, anchor, config = random_models(shape, near)
            source, anchor = ({n: t.to(options.device) for n, t in m.items()} for m in (source, anchor))
            for what, level, ffn in WHAT:
                if (level == "full" and options.no_full) or (ffn and options.no_ffn):
                    continue
                rows.append(row_of(shape, near, what, level, ffn, (source, anchor, config), options))
                print(line_of(rows[-1]), flush=True)
            del source, anchor
    if options.json:
        record = {"device": options.device, "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
