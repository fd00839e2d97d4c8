"""The example's fleet: what Flower's engine and real processes do is what the loop of the benchmark does."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "federated"


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference, but of the keys' biases: softmax does not see them, so their gradient is rounding alone,
    which Adam blows up to whole steps."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one if not n.endswith("key.bias"))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/federated.py, under another name than this folder's."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("federated_benchmark", ROOT / "benchmarks" / "federated.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the script adds
    spec.loader.exec_module(script)
    return script


def test_a_split_gives_every_image_to_one_client_and_the_servers_to_none(loop: Any) -> None:
    digits = loop.load_digits()
    for alpha in (0.05, 1.0, 1000.0):
        parts = loop.task.split(digits, 10, alpha, 3)
        assert sorted(torch.cat(parts).tolist()) == list(range(loop.task.SERVER, len(digits.train_labels)))
        assert min(map(len, parts)) > 0
    unlike, alike = (
        [len(set(digits.train_labels[part].tolist())) for part in loop.task.split(digits, 10, alpha, 0)]
        for alpha in (0.05, 1000.0)
    )
    assert min(alike) == 10 and sum(unlike) < 60


def test_clients_trained_side_by_side_are_those_trained_one_by_one(loop: Any) -> None:
    digits = loop.load_digits()
    start = loop.task.sent(loop.task.new_model(1))
    given = {"clients": 3, "steps": 3, "seed": 1}
    together = loop.task.answers(start, 2, digits, range(3), given)
    for number, (state, examples) in enumerate(together):
        ((alone, count),) = loop.task.answers(start, 2, digits, [number], given)
        assert count == examples and apart(state, alone) < 1e-4
        assert apart(state, start) > 0.01
    model = loop.task.model_of(start).train()  # plain training, of the stock class and with a stock optimiser
    part = loop.task.split(digits, 3, 1.0, 1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.task.RATE, weight_decay=0.01)
    generator = torch.Generator().manual_seed(100_200)
    for _ in range(3):
        batch = part[torch.randint(len(part), (loop.task.BATCH,), generator=generator)]
        scores = model(digits.train_images[batch]).logits
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores, digits.train_labels[batch]).backward()
        optimizer.step()
    assert apart(together[0][0], loop.task.sent(model)) < 1e-4


def test_a_hostile_client_turns_its_update_around(loop: Any) -> None:
    digits, start = loop.load_digits(), loop.task.sent(loop.task.new_model(0))
    honest, turned = (
        loop.task.answers(start, 1, digits, range(2), {"clients": 2, "steps": 2, "hostile": count, "flip": 5.0})
        for count in (0, 1)
    )
    for name, before in start.items():
        assert torch.allclose(turned[0][0][name] - before, -5 * (honest[0][0][name] - before), atol=1e-5)
        assert torch.equal(turned[1][0][name], honest[1][0][name])


def test_the_record_keeps_what_the_page_says(loop: Any) -> None:
    """The guards' accuracy with a fifth of the clients hostile, as a share of FedAvg's without them."""
    runs = json.loads((ROOT / "docs" / "results" / "federated.json").read_text(encoding="utf-8"))["runs"]
    seeds = [key.rpartition("/")[2] for key in runs if key.startswith("clean/fedavg/")]
    last = {key: loop.last(one) for key, one in runs.items()}
    clean = sum(last[f"clean/fedavg/{seed}"] for seed in seeds)
    assert len(seeds) >= 3
    for name in ("median", "krum"):
        for setting in ("hostile", "hostile x5"):
            assert sum(last[f"{setting}/{name}/{seed}"] for seed in seeds) >= 0.95 * clean, (name, setting)
    assert sum(last[f"hostile x5/fedavg/{seed}"] for seed in seeds) < 0.5 * clean  # which needs a guard


@pytest.mark.slow
def test_flowers_engine_gives_the_numbers_of_the_loop(tmp_path: Path, loop: Any) -> None:
    command = [
        sys.executable, str(EXAMPLE / "simulate.py"), "--strategy", "aligned-common", "--apart", "--clients", "4",
        "--rounds", "2", "--keep", str(tmp_path / "keep"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rounds = list(loop.rounds_of("aligned-common", 2, {"clients": 4, "apart": True}))
    kept = load_file(tmp_path / "keep" / "round-00002" / "model.safetensors")
    # Clients come in another order, so sums are rounded otherwise, and Adam begins with the signs of gradients.
    assert apart(kept, rounds[-1].model) < 2e-3
    digits = loop.load_digits()
    printed = [float(share) / 100 for share in re.findall(r"round +[12]: ([\d.]+)%", done.stdout)]
    assert printed == pytest.approx([loop.task.accuracy(one.model, digits) for one in rounds], abs=0.0041)
    plain = list(loop.rounds_of("fedavg", 2, {"clients": 4, "apart": True}))
    assert apart(kept, plain[-1].model) > 0.02


@pytest.mark.slow
def test_a_killed_client_and_a_killed_server_do_not_end_the_rounds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, str(EXAMPLE / "deploy.py"), str(run), "--rounds", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=tmp_path)
    logs = "".join(log.read_text(errors="replace")[-3000:] for log in sorted(run.glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + logs
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    again = next(place for place in range(1, len(lines)) if lines[place]["round"] <= lines[place - 1]["round"])
    before, after = lines[:again], lines[again:]
    assert before[0]["round"] == 0 and [line["round"] for line in before] == list(range(len(before)))
    assert after[0]["round"] in (len(before) - 1, len(before)) and after[-1]["round"] == 4  # it did not begin anew
    both, alone = 2 * before[1]["bytes"] / 2, before[1]["bytes"] / 2
    assert alone in [line["bytes"] for line in lines] and both in [line["bytes"] for line in lines]
    assert after[-1]["accuracy"] > before[1]["accuracy"] > before[0]["accuracy"]
    assert after[0]["accuracy"] >= 0.3  # random weights have a tenth
    loaded, info = transformers.ViTForImageClassification.from_pretrained(
        run / "keep" / "round-00004", output_loading_info=True, trust_remote_code=False
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.config.hidden_size == 32
    mine = [one for one in psutil.process_iter(["cmdline"]) if any(str(run) in w for w in one.info["cmdline"] or [])]
    assert not mine, mine
