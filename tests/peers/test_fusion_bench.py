"""What docs/comparison.md says about fusion_bench 0.2.33, on its own code in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import isomerge
from peers.side_by_side import AGREE, ROOT, apart

pytestmark = pytest.mark.peers
State = dict[str, Tensor]
Merge = Callable[..., State]


def state(seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> State:
    """Two tensors whose sizes of change differ by far, as embeddings and norms do."""
    draw = torch.Generator().manual_seed(seed)
    large, small = (torch.randn(12, 10, generator=draw) for _ in range(2))
    return {"large.weight": (scale * large).to(dtype), "small.weight": (scale * 0.01 * small).to(dtype)}


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("FUSION_BENCH_PYTHON") or str(ROOT / ".venv-fusion-bench" / "bin" / "python")
    if not Path(found).exists():
        raise FileNotFoundError(f"fusion_bench's environment is missing ({found}). Run make test-peers.")
    return found


@pytest.fixture(scope="module")
def process(python: str) -> Iterator[subprocess.Popen[str]]:
    """One process for all questions: importing it takes seconds."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    side = str(Path(__file__).with_name("fusion_bench_side.py"))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen([python, side], text=True, env=environment, **pipes)
    yield started
    assert started.stdin
    started.stdin.close()
    started.wait()


@pytest.fixture
def theirs(process: subprocess.Popen[str], tmp_path: Path) -> Merge:
    """Merge there: a method, models by name, its options."""

    def merge(method: str, models: dict[str, State], **options: Any) -> State:
        assert process.stdin and process.stdout
        files = {name: str(tmp_path / f"{name}.safetensors") for name in models}
        for name, weights in models.items():
            save_file(weights, files[name])
        out = str(tmp_path / "out.safetensors")
        request = {"method": method, "models": files, "options": options, "out": out}
        print(json.dumps(request), file=process.stdin, flush=True)
        assert json.loads(process.stdout.readline()) == ""
        return load_file(out)

    return merge


def agree(first: State, second: State) -> bool:
    assert first.keys() == second.keys()
    return all(apart(first[name], second[name]) < AGREE for name in first)


def test_the_version_is_the_one_the_document_names(python: str) -> None:
    code = "import importlib.metadata as m; print(m.version('fusion_bench'))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert f"fusion_bench {version}" in (ROOT / "docs" / "comparison.md").read_text()


def test_the_plain_average_is_the_same(theirs: Merge) -> None:
    found = theirs("simple_average", {"a": state(1), "b": state(2), "c": state(3)})
    assert agree(found, isomerge.merge_state_dicts([state(1), state(2), state(3)], method="linear"))


def test_slerp_is_the_same(theirs: Merge) -> None:
    found = theirs("slerp", {"a": state(1), "b": state(2)}, t=0.3)
    assert agree(found, isomerge.merge_state_dicts([state(2)], method="slerp", base=state(1), t=0.3))


def test_task_arithmetic_is_the_same(theirs: Merge) -> None:
    models = {"_pretrained_": state(0), "a": state(1), "b": state(2)}
    found = theirs("task_arithmetic", models, scaling_factor=0.4)
    ours = isomerge.merge_state_dicts([state(1), state(2)], method="task_arithmetic", base=state(0), weight=0.4)
    assert agree(found, ours)


def ties(theirs: Merge, models: dict[str, State]) -> tuple[State, State]:
    found = theirs("ties", models, scaling_factor=1.0, threshold=50, remove_keys=[], merge_func="mean")
    tuned = [weights for name, weights in models.items() if name != "_pretrained_"]
    return found, isomerge.merge_state_dicts(tuned, method="ties", base=models["_pretrained_"], density=0.5)


def test_ties_of_one_tensor_is_the_same(theirs: Merge) -> None:
    models = {name: {"large.weight": state(n)["large.weight"]} for n, name in enumerate(("_pretrained_", "a", "b"))}
    found, ours = (weights["large.weight"] for weights in ties(theirs, models))
    assert int((found - ours).abs().gt(AGREE).sum()) <= 2  # of 120: theirs keeps one weight more of each model


def test_ties_there_cuts_over_all_tensors_at_once_and_here_in_each(theirs: Merge) -> None:
    models = {name: state(n) for n, name in enumerate(("_pretrained_", "a", "b"))}
    found, ours = ties(theirs, models)
    before = models["_pretrained_"]["small.weight"]
    kept = [float((weights["small.weight"] - before).abs().gt(1e-7).double().mean()) for weights in (found, ours)]
    assert kept[0] < 0.05  # the small tensor loses nearly all of its changes to the large one
    assert kept[1] > 0.5


def test_an_average_in_bfloat16_is_rounded_at_every_step_there_and_once_here(theirs: Merge) -> None:
    states = [state(seed, torch.bfloat16) for seed in range(5)]
    found = theirs("simple_average", {f"m{n}": weights for n, weights in enumerate(states)})
    ours = isomerge.merge_state_dicts(states, method="linear")
    true = {name: torch.stack([s[name].double() for s in states]).mean(0) for name in states[0]}
    errors = [sum(float((w[name].double() - true[name]).abs().sum()) for name in true) for w in (found, ours)]
    assert all((ours[name].double() - true[name]).abs().le(true[name].abs() / 256 + 1e-9).all() for name in true)
    assert errors[0] > 1.5 * errors[1]


def test_random_masks_follow_the_seed_here_and_the_global_state_there(theirs: Merge) -> None:
    models = {"_pretrained_": state(0), "a": state(1)}
    options = {"scaling_factor": 1.0, "sparsity_ratio": 0.5, "only_on_linear_weights": False, "rescale": True}
    assert not agree(theirs("dare", models, **options), theirs("dare", models, **options))
    ours = [
        isomerge.merge_state_dicts([state(1)], method="dare_linear", base=state(0), density=0.5, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert agree(ours[0], ours[1]) and not agree(ours[0], ours[2])


def test_models_that_are_one_function_in_two_orders_average_to_another_there(theirs: Merge, family: Any) -> None:
    """The same network with its hidden units in another order; aligned, the mean is the network itself."""
    folder = family("bert") / "a"
    weights = load_file(folder / "model.safetensors")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    moved = dict(weights)
    for layer in range(3):
        at = f"bert.encoder.layer.{layer}."
        for name in (at + "intermediate.dense.weight", at + "intermediate.dense.bias"):
            moved[name] = weights[name][order].contiguous()
        moved[at + "output.dense.weight"] = weights[at + "output.dense.weight"][:, order].contiguous()
    found = theirs("simple_average", {"a": weights, "b": moved})
    assert not agree(found, weights)
    config = json.loads((folder / "config.json").read_text())
    both = [isomerge.open_checkpoint(w, config=config, name=n) for w, n in ((weights, "a"), (moved, "b"))]
    aligned = isomerge.merge(both, align=True, level="permutation")
    assert agree(aligned.state_dict(), weights)
