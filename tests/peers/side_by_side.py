"""The two programs on one recipe: mergekit in its own environment, isomerge in this one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

from isomerge.cli.app import app
from models import tensors, vocabulary_of

ROOT = Path(__file__).resolve().parents[2]
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
AGREE = 1e-6
"""Of a tensor's largest magnitude: a few roundings of float32."""


class PeerError(Exception):
    """mergekit stopped with an error."""


class Mergekit:
    """One process of mergekit's environment, asked line by line."""

    def __init__(self, hash_seed: int = 0) -> None:
        python = os.environ.get("MERGEKIT_PYTHON") or str(ROOT / ".venv-peers" / "bin" / "python")
        if not Path(python).exists():
            raise FileNotFoundError(f"mergekit's environment is missing ({python}). Run make test-peers.")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        script = str(Path(__file__).with_name("mergekit_side.py"))
        self._process = subprocess.Popen(
            [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip

    def merge(self, recipe: Path, out: Path, *options: str, intermediate: Path | None = None) -> Path:
        request = {"recipe": str(recipe), "out": str(out), "options": options}
        if intermediate:
            request["intermediate"] = str(intermediate)
        self._ask(request)
        return out

    def methods(self) -> set[str]:
        """The names of all merge methods it has."""
        return set(self._ask({})["methods"])

    def flags(self, program: str) -> list[str]:
        """All flags of one of its programs."""
        return list(self._ask({"flags": program})["flags"])

    def run(self, program: str, words: list[str], *, float32: bool = False) -> None:
        """One of its programs with these words; `float32`: where it computes in bfloat16 by itself."""
        self._ask({"program": program, "words": words, "float32": float32})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"mergekit's process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if answer["error"]:
            raise PeerError(answer["error"] + "\n" + answer["traceback"])
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def write_recipe(text: str, models: Path, file: Path, **more: Any) -> Path:
    """The recipe with the folders of `models` in place of their $names."""
    names = {folder.name: str(folder) for folder in models.iterdir() if folder.is_dir()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(Template(text).substitute(names | {k: str(v) for k, v in more.items()}))
    return file


def refused(recipe: Path, out: Path, *options: str) -> str:
    """What isomerge says when it will not merge."""
    result = CliRunner().invoke(app, ["merge", str(recipe), "-o", str(out), "--quiet", *options])
    assert result.exit_code == 2, result.output
    assert not out.exists()
    return " ".join(result.output.split())


def isomerge(recipe: Path, out: Path, *options: str) -> Path:
    """`isomerge merge RECIPE -o OUT`, in this process."""
    result = CliRunner().invoke(app, ["merge", str(recipe), "-o", str(out), "--quiet", *options])
    assert result.exit_code == 0, result.output
    return out


def mergekit_yaml(recipe: Path, out: Path, *flags: str) -> Path:
    """`isomerge mergekit-yaml RECIPE OUT`, in this process."""
    result = CliRunner().invoke(app, ["mergekit-yaml", str(recipe), str(out), "--quiet", *flags])
    assert result.exit_code == 0, result.output
    return out


def by_token(folder: Path) -> dict[str, Tensor]:
    """The tensors, with the rows of token tables in the order of the tokens' texts: mergekit numbers new tokens anew in
    every run."""
    found, vocabulary = tensors(folder), vocabulary_of(folder)
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    order = [vocabulary[token] for token in sorted(vocabulary)]
    for name in TABLES:
        padding = range(len(order), len(found[name]))
        found[name] = found[name][torch.tensor([*order, *padding])]
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest magnitude."""
    if not expected.numel():
        return 0.0
    largest = expected.double().abs().max().item()
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / largest if largest else difference


def assert_same_tensors(
    ours: Path, theirs: Path, tolerance: float = AGREE, exact: Callable[[], Path] | None = None
) -> None:
    """The same names, shapes and dtypes, and every value within the tolerance.

    Where mergekit's own rounding is larger than that, its answer in float64 (`exact`) decides.
    """
    mine, other = tensors(ours), tensors(theirs)
    assert sorted(mine) == sorted(other)
    for name, tensor in other.items():
        assert (mine[name].shape, mine[name].dtype) == (tensor.shape, tensor.dtype), name
    wrong = {name: gap for name, tensor in other.items() if not (gap := apart(mine[name], tensor)) <= tolerance}
    if wrong and exact:
        truth = tensors(exact())
        wrong = {name: gap for name in wrong if not (gap := apart(mine[name], truth[name])) <= tolerance}
    told = [f"{name} {tuple(other[name].shape)}: {gap:.1e} of the largest" for name, gap in wrong.items()]
    assert not wrong, f"{len(wrong)} of {len(other)} tensors differ:\n" + "\n".join(told[:8])


def assert_same_config(ours: Path, theirs: Path, *keys: str) -> None:
    mine, other = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
    for key in keys:
        assert mine.get(key) == other.get(key), key
