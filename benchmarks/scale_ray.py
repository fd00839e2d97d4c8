"""Ray against threads: one merge by both engines in turn, on models of a given size, with the hashes compared.

    python benchmarks/scale_ray.py --parameters 400e6 --method ties --workers 2 --repeat 3 FOLDER

Both compute the same units with one thread each, `--workers` at once. The cluster is started before the clock: its
start, and the import of torch in a fresh worker, are printed apart. Processor seconds count this process and the
workers; they say more than seconds on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import isomerge
from isomerge.checkpoint import TensorInfo, write_checkpoint

WIDTH, FORWARD = 2048, 5632
TOKEN = uuid.uuid4().hex
"""In the environment of the workers, by which their processes are found."""


def shapes(parameters: float) -> dict[str, TensorInfo]:
    """Layers of a decoder, as many as make so many parameters."""
    one = {"q": (WIDTH, WIDTH), "k": (WIDTH // 8, WIDTH), "v": (WIDTH // 8, WIDTH), "o": (WIDTH, WIDTH),
           "gate": (FORWARD, WIDTH), "up": (FORWARD, WIDTH), "down": (WIDTH, FORWARD)}  # fmt: skip
    size = sum(rows * columns for rows, columns in one.values())
    layers = max(1, round(parameters / size))
    return {
        f"model.layers.{layer}.{name}.weight": TensorInfo(shape, torch.bfloat16)
        for layer in range(layers)
        for name, shape in one.items()
    }


def write_models(folder: Path, parameters: float) -> list[Path]:
    """A base and two fine-tunes of it, unless they are there."""
    plan = shapes(parameters)

    def stream(tune: int) -> Iterator[tuple[str, torch.Tensor]]:
        for place, (name, info) in enumerate(plan.items()):
            tensor = torch.randn(info.shape, generator=torch.Generator().manual_seed(place)) * 0.02
            if tune:
                noise = torch.randn(info.shape, generator=torch.Generator().manual_seed(1000 * tune + place))
                tensor += noise * 0.002
            yield name, tensor.bfloat16()

    paths = [folder / name for name in ("base", "a", "b")]
    for tune, path in enumerate(paths):
        if not (path / "config.json").exists():
            write_checkpoint(path, plan, stream(tune), config={"model": path.name}, force=True)
    return paths


def processor_seconds() -> float:
    """Of this process and of the workers, since they were started."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = folder.name == str(os.getpid()) or TOKEN.encode() in (folder / "environ").read_bytes()
            if ours:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def merge(models: list[Path], out: Path, method: str, engine: str, workers: int) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    base, *others = models
    start, used = time.perf_counter(), processor_seconds()
    merged = isomerge.merge(others, method=method, base=base, density=0.5, engine=engine, threads=workers)
    written = merged.save(out)
    seconds, used = time.perf_counter() - start, processor_seconds() - used
    return {"engine": engine, "seconds": seconds, "processor_seconds": used, "sha256": written.sha256}


def start_cluster(workers: int) -> float:
    """Seconds until every worker has imported what it needs."""
    import ray

    from isomerge.engine import engine_of

    start = time.perf_counter()
    source = str(Path(isomerge.__file__).parents[1])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "ISOMERGE_BENCHMARK": TOKEN, "PYTHONPATH": source}
    ray.init(
        address="local", num_cpus=workers, object_store_memory=80 * 2**20, include_dashboard=False,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    engine_of("ray").each(lambda _: time.sleep(2), list(range(workers)), lambda *_: None)
    return time.perf_counter() - start


def ray_against_threads(folder: Path, parameters: float, method: str, workers: int, repeat: int) -> dict[str, Any]:
    """The record of all runs, and the ratio of the medians."""
    models = write_models(folder, parameters)
    record: dict[str, Any] = {"method": method, "parameters": sum(i.nbytes // 2 for i in shapes(parameters).values())}
    record |= {"workers": workers, "start_seconds": start_cluster(workers), "runs": []}
    for _ in range(repeat):
        for engine in ("threads", "ray"):
            record["runs"].append(merge(models, folder / f"out-{engine}", method, engine, workers))
            print(record["runs"][-1], flush=True)
    for key in ("seconds", "processor_seconds"):
        of = {name: median(run[key] for run in record["runs"] if run["engine"] == name) for name in ("threads", "ray")}
        record[f"{key}_ray_by_threads"] = of["ray"] / of["threads"]
    record["same_hashes"] = len({run["sha256"] for run in record["runs"]}) == 1
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=float, default=400e6)
    parser.add_argument("--method", default="ties", help="one with a density")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    print(json.dumps(ray_against_threads(**vars(given)), indent=2))


if __name__ == "__main__":
    main()
