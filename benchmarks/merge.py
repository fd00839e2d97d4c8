"""How fast is merging? One table: whole commands, beside mergekit's and beside only copying the bytes.

    python benchmarks/merge.py --scale tiny                   # seconds: does it run?
    python benchmarks/merge.py --work DIR                     # 1.1 billion parameters in bfloat16, about 9 GB of disk
    python benchmarks/merge.py --scale 7b --methods linear    # 6.7 billion, 41 GB of disk
    python benchmarks/merge.py --methods linear ties --skip-peer

The checkpoints are synthetic: a random base and two fine-tunes of it, written once into --work and used again. Every
number is the wall time of a command of its own, imports included, with the inputs read once before, the disk synced
before and the output deleted after; the median of --runs (mergekit: of --peer-runs), all kinds of run in turn. The
processor time is beside it, as other work on the machine changes it less. The copying limit is a process that reads
every input once, writes one output through one buffer and syncs it; isomerge syncs too, mergekit does not. Peak memory
is the largest resident size of the command and its children. mergekit runs in its own environment: $MERGEKIT_PYTHON,
else .venv-peers/bin/python.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCALES: dict[str, dict[str, int]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 320},
    "1.1b": {"num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "7b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
}  # fmt: skip
MEMBERS = ("base", "a", "b")
SHARD = 2**32  # bytes of a weight file
DRAWN = 2**24 + 1
SPREAD, STEP = 0.02, 0.002  # standard deviations: of the base's weights, and of what a fine-tune adds to them

METHODS: dict[str, dict[str, Any]] = {
    "linear": {"parameters": {"weight": 0.5}},
    "slerp": {"base_model": "a", "parameters": {"t": 0.5}},
    "ties": {"base_model": "base", "parameters": {"weight": 0.5, "density": 0.5}},
    "dare_ties": {"base_model": "base", "parameters": {"weight": 0.5, "density": 0.5}},
    "model_stock": {"base_model": "base"},
    "karcher": {},
}


LIGHT, HEAVY = ("linear", "slerp", "model_stock"), ("ties", "dare_ties", "karcher")


@dataclass(frozen=True)
class Goal:
    """What a number should be at most or at least."""

    name: str
    value: Callable[[dict[str, Any]], float | None]
    limit: float
    at_most: bool = True
    methods: tuple[str, ...] = tuple(METHODS)

    def verdict(self, row: dict[str, Any]) -> str | None:
        """None where it does not apply or was not measured."""
        value = self.value(row) if row["method"] in self.methods else None
        if value is None:
            return None
        reached = value <= self.limit if self.at_most else value >= self.limit
        return f"{self.name} {'≤' if self.at_most else '≥'} {self.limit:g}: {'yes' if reached else 'NO'}"


GOALS = (
    Goal("÷ limit", lambda r: r["default"] / r["limit"], 1.0, methods=("linear",)),
    Goal("× mergekit", lambda r: r["mergekit"] and r["mergekit"] / r["default"], 5.0, False, LIGHT),
    Goal("× mergekit", lambda r: r["mergekit"] and r["mergekit"] / r["default"], 15.0, False, HEAVY),
    Goal("peak MB", lambda r: r["default_mb"], 600.0),
)
HELP_GOAL = 0.5

COPY = """
import os, sys
*sources, out = sys.argv[1:]
block = memoryview(bytearray(8 << 20))
files = [os.open(s, os.O_RDONLY) for s in sources]
target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for number, file in enumerate(files):
    while count := os.readv(file, [block]):
        part = block[:count] if number == 0 else b""
        while part:
            part = part[os.write(target, part):]
os.fsync(target)
"""


# --- checkpoints ------------------------------------------------------------------------------------------------------
def shapes_of(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a stock decoder with these sizes."""
    width, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = width // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (rows, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (width,)
        yield layer + "post_attention_layernorm.weight", (width,)
        for name, out in (("q", width), ("k", narrow), ("v", narrow), ("o", width)):
            yield f"{layer}self_attn.{name}_proj.weight", (out, width)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            yield f"{layer}mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (rows, width)


def write_checkpoints(folder: Path, config: dict[str, int]) -> None:
    """Those that are there already are kept."""
    for number, path in enumerate(folder / name for name in MEMBERS):
        if not (path / "config.json").exists():
            print(f"writing {path}", file=sys.stderr)
            path.mkdir(parents=True, exist_ok=True)
            _write_weights(path, config, member=number)
            _write_side_files(path, config)


def _write_weights(path: Path, config: dict[str, int], member: int) -> None:
    """In files of about SHARD bytes, each held in memory while it is written."""
    from safetensors.torch import save_file

    files: list[list[tuple[int, str, tuple[int, ...]]]] = [[]]
    for number, (name, shape) in enumerate(shapes_of(config)):
        if sum(2 * math.prod(earlier) for _, _, earlier in files[-1]) >= SHARD:
            files.append([])
        files[-1].append((number, name, shape))
    places = {}
    for count, entries in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{count:05d}-of-{len(files):05d}.safetensors"
        state = {name: _values(number, shape, member) for number, name, shape in entries}
        save_file(state, path / file, {"format": "pt"})
        places |= dict.fromkeys(state, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": 2 * sum(math.prod(s) for _, s in shapes_of(config))}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _values(number: int, shape: tuple[int, ...], member: int) -> Any:
    """Normal numbers: each tensor begins at another place of a long list, as to draw billions would take too long."""
    tensor = SPREAD * _drawn(0).roll(9973 * number).repeat(-(-math.prod(shape) // DRAWN))[: math.prod(shape)]
    if member:
        tensor += STEP * _drawn(member).roll(9973 * number).repeat(-(-len(tensor) // DRAWN))[: len(tensor)]
    return tensor.reshape(shape).bfloat16()


@functools.cache
def _drawn(member: int) -> Any:
    import torch

    return torch.randn(DRAWN, generator=torch.Generator().manual_seed(member))


def _write_side_files(path: Path, config: dict[str, int]) -> None:
    """A tokenizer too: without one both programs would spend their time looking for it."""
    vocabulary = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                 "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    stock = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
             "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
             "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    (path / "config.json").write_text(json.dumps({**stock, **config}, indent=1))


def write_recipe(method: str, members: dict[str, Path], file: Path) -> Path:
    """JSON is YAML."""
    body = {"merge_method": method, **METHODS[method], "models": [{"model": str(members[name])} for name in "ab"]}
    if "base_model" in body:
        body["base_model"] = str(members[body["base_model"]])
    file.write_text(json.dumps(body, indent=1))
    return file


def inputs_of(method: str, members: dict[str, Path]) -> list[Path]:
    used = {"a", "b", METHODS[method].get("base_model", "a")}
    return [file for name, path in members.items() if name in used for file in sorted(path.glob("*.safetensors"))]


# --- measuring --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    seconds: float
    processor: float
    megabytes: float


def timed(command: list[str], out: Path, log: Path) -> Run:
    _remove(out)
    os.sync()
    with log.open("wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    _remove(out)
    unit = 1 if sys.platform == "darwin" else 1024  # what a maximal resident size is counted in
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 1e6)


def _remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)


def warm(files: list[Path]) -> None:
    """Into the page cache."""
    buffer = bytearray(8 << 20)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass


def measure(method: str, members: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table. The kinds of run take turns, so that a slow minute hits all of them."""
    work = options.work
    recipe, out, log = write_recipe(method, members, work / f"{method}.json"), work / "out", work / "log.txt"
    inputs = inputs_of(method, members)
    ours = [*isomerge_command(), "merge", str(recipe), "-o", str(out), "--quiet", *options.flags]
    commands = {
        "limit": [sys.executable, "-I", "-S", "-c", COPY, *map(str, inputs), str(out)],
        "default": ours,
        "no_lock": [*ours, "--no-lock"],
    }
    if not options.skip_peer:
        commands["mergekit"] = [str(peer_python().with_name("mergekit-yaml")), str(recipe), str(out), "--quiet"]
    runs: dict[str, list[Run]] = {kind: [] for kind in commands}
    warm(inputs)
    for turn in range(options.runs):
        for kind, command in commands.items():
            if kind != "mergekit" or turn < options.peer_runs:
                runs[kind].append(timed(command, out, log))
    row: dict[str, Any] = {"method": method, "inputs": len(inputs), "mergekit": None, "mergekit_mb": None}
    for kind, found in runs.items():
        seconds = [run.seconds for run in found]
        row |= {kind: statistics.median(seconds), f"{kind}_all": seconds}
        row[f"{kind}_processor"] = statistics.median(run.processor for run in found)
        row[f"{kind}_mb"] = max(run.megabytes for run in found)
    row["goals"] = [verdict for goal in GOALS if (verdict := goal.verdict(row))]
    return row


def isomerge_command() -> list[str]:
    return [sys.executable, "-m", "isomerge"]


def peer_python() -> Path:
    python = Path(os.environ.get("MERGEKIT_PYTHON") or ROOT / ".venv-peers" / "bin" / "python")
    if not python.exists():
        raise SystemExit(f"mergekit's environment is missing ({python}): run make test-peers, or pass --skip-peer.")
    return python


def help_seconds(options: argparse.Namespace) -> float:
    command, log = [*isomerge_command(), "--help"], options.work / "log.txt"
    return statistics.median(timed(command, options.work / "out", log).seconds for _ in range(max(3, options.runs)))


# --- the table --------------------------------------------------------------------------------------------------------
HEADS = (
    "method", "isomerge s", "processor s", "no lock s", "peak MB", "mergekit s", "processor s", "mergekit MB",
    "× mergekit", "× processor", "limit s", "÷ limit", "goals",
)  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    peer = row["mergekit"]
    cells = [
        row["method"],
        f"{row['default']:.2f}",
        f"{row['default_processor']:.2f}",
        f"{row['no_lock']:.2f}",
        f"{row['default_mb']:.0f}",
        f"{peer:.2f}" if peer else "–",
        f"{row['mergekit_processor']:.1f}" if peer else "–",
        f"{row['mergekit_mb']:.0f}" if peer else "–",
        f"{peer / row['default']:.1f}" if peer else "–",
        f"{row['mergekit_processor'] / row['default_processor']:.1f}" if peer else "–",
        f"{row['limit']:.2f}",
        f"{row['default'] / row['limit']:.2f}",
        "; ".join(row["goals"]),
    ]
    return "| " + " | ".join(cells) + " |"


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="1.1b", choices=list(SCALES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--runs", type=int, default=3, help="of isomerge and of the copy")
    parser.add_argument("--peer-runs", type=int, default=1, help="of mergekit")
    parser.add_argument("--skip-peer", action="store_true", help="leave mergekit out")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "isomerge-bench-merge")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags of isomerge merge")
    parser.add_argument("--json", type=Path, help="where the numbers go (default: merge-SCALE.json in --work)")
    parser.add_argument("--write-only", action="store_true", help="write the checkpoints and stop")
    return parser.parse_args()


def main() -> None:
    options = options_of()
    config = SCALES[options.scale]
    options.work.mkdir(parents=True, exist_ok=True)
    folder = options.work / options.scale
    if options.write_only:
        write_checkpoints(folder, config)
        return
    # In a process of its own: the peak memory of a child counts what its parent held when it was started.
    again = [sys.executable, __file__, "--scale", options.scale, "--work", str(options.work), "--write-only"]
    subprocess.run(again, check=True)
    members = {name: folder / name for name in MEMBERS}
    parameters = sum(math.prod(shape) for _, shape in shapes_of(config))
    print(f"{parameters / 1e9:.2f} billion parameters in bfloat16, {os.cpu_count()} cores, {platform.machine()}\n")
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|")
    rows = []
    for method in options.methods:
        rows.append(measure(method, members, options))
        print(line_of(rows[-1]), flush=True)
    seconds = help_seconds(options)
    print(f"\nisomerge --help: {seconds:.2f} s (goal ≤ {HELP_GOAL:g}: {'yes' if seconds <= HELP_GOAL else 'NO'})")
    record = {"scale": options.scale, "parameters": parameters, "cores": os.cpu_count(), "runs": options.runs,
              "peer_runs": options.peer_runs, "flags": options.flags, "help": seconds, "rows": rows}  # fmt: skip
    (options.json or options.work / f"merge-{options.scale}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
