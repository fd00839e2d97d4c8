"""How does time grow with layers, width and the number of models? Processor seconds, and the exponent fitted to them.

    python benchmarks/growth.py                    # a few minutes on one core
    python benchmarks/growth.py --what "merge, linear" "align, strangers"

Random vision transformers, of 4 layers and width 192 unless the column says otherwise; feed-forwards are four times as
wide, heads 32. Time is fitted as c·xᵃ by least squares on the logarithms, ± the standard error of a: with three points
that says how straight the line is, and no more. One thread, the least of some runs, models in memory: what a disk takes
is not in it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence

import torch
from transformers import ViTConfig, ViTForImageClassification

import isomerge
from isomerge.checkpoint import Checkpoint, open_checkpoint

LAYERS, WIDTH, MODELS = 4, 192, 2
STEPS = {"layers": (2, 4, 8), "width": (128, 256, 512), "models": (2, 3, 5)}
State = dict[str, torch.Tensor]


def models(layers: int, width: int, count: int, near: bool) -> list[Checkpoint]:
    """Independent ones, or fine-tunes 1 % apart."""
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32, intermediate_size=4 * width,
        image_size=32, patch_size=4,
    )  # fmt: skip
    states: list[State] = []
    for seed in range(count):
        torch.manual_seed(seed)
        opened = open_checkpoint(ViTForImageClassification(config))  # under the names that files have
        own = {n: opened.read(n) + 0.02 * torch.randn(info.shape) for n, info in opened.tensors.items()}
        if near and states:
            own = {n: t + 0.01 * t.std().nan_to_num(0.01) * torch.randn_like(t) for n, t in states[0].items()}
        states.append(own)
    about = {**config.to_dict(), "architectures": ["ViTForImageClassification"]}
    return [open_checkpoint(state, config=about) for state in states]


def aligned(given: Sequence[Checkpoint]) -> None:
    isomerge.align_family(list(given[1:]), anchor=given[0], threads=1)


def merged(method: str) -> Callable[[Sequence[Checkpoint]], object]:
    def merge(given: Sequence[Checkpoint]) -> object:
        more = {"base": given[0]} if method == "ties" else {}
        return isomerge.merge(list(given[1:] if more else given), method=method, threads=1, **more).state_dict()

    return merge


WHAT: dict[str, tuple[bool, Callable[[Sequence[Checkpoint]], object]]] = {
    "merge, linear": (True, merged("linear")),
    "merge, ties": (True, merged("ties")),
    "align, siblings": (True, aligned),
    "align, strangers": (False, aligned),
}


def seconds(work: Callable[[Sequence[Checkpoint]], object], given: Sequence[Checkpoint], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        work(given)
        times.append(time.process_time() - start)
    return min(times)


def exponent(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """a of y = c·xᵃ, and its standard error.

    >>> tuple(round(value, 6) for value in exponent([1, 2, 4], [3, 12, 48]))
    (2.0, 0.0)
    """
    u, v = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    spread = sum((each - mean_u) ** 2 for each in u)
    a = sum((p - mean_u) * (q - mean_v) for p, q in zip(u, v, strict=True)) / spread
    left = sum((q - mean_v - a * (p - mean_u)) ** 2 for p, q in zip(u, v, strict=True))
    return a, math.sqrt(left / max(1, len(u) - 2) / spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| processor seconds | " + " | ".join(f"{by}: {', '.join(map(str, x))} | exponent" for by, x in STEPS.items())
    )
    print("|---" * (1 + 2 * len(STEPS)) + "|")
    for name in options.what:  # one more model for ties, which is the base
        near, work = WHAT[name]
        work(models(2, 64, 3, near))  # which imports what it needs
        cells = []
        for by, steps in STEPS.items():
            sizes = {"layers": LAYERS, "width": WIDTH, "models": MODELS}
            found = []
            for step in steps:
                sizes[by] = step
                base = name == "merge, ties"
                given = models(sizes["layers"], sizes["width"], sizes["models"] + base, near)
                found.append(seconds(work, given, options.runs))
            a, error = exponent(steps, found)
            cells.append(f"{', '.join(f'{each:.3g}' for each in found)} | {a:.2f} ± {error:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
