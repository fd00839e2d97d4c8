"""Code that lies beside a model never runs unasked, whatever is typed; with --trust-remote-code it does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import isomerge
from isomerge.adapters.layout import ModuleLayout
from isomerge.cli.app import app
from isomerge.errors import CheckpointError
from isomerge.running.stock import load_stock, stock_class
from models import gpt2, model, tensors
from samples import WORDS

CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnConfig(GPT2Config):
    model_type = "own"
class OwnForCausalLM(GPT2LMHeadModel):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "own.OwnConfig",
    "AutoModelForCausalLM": "own.OwnForCausalLM",
    "AutoModel": "own.OwnForCausalLM",
}
TOKENIZER_MAP = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with texts; code that is run after all is not kept for later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "texts.txt").write_text("\n".join(" ".join(WORDS[k : k + 6]) for k in range(12)) + "\n")
    (tmp_path / "lines.txt").write_text((tmp_path / "texts.txt").read_text() * 5)
    return tmp_path


def poisoned(here: Path, kind: str) -> Path:
    """Models `a` and `b` with code beside them, of a type that transformers knows or not; the file their code makes."""
    marker = here / "the-code-ran"
    for seed, name in enumerate("ab"):
        folder = here / name
        gpt2(folder, seed=seed)
        (folder / "own.py").write_text(CODE.format(marker=str(marker)))
        edit(folder / "tokenizer_config.json", auto_map=TOKENIZER_MAP)
        edit(folder / "config.json", auto_map=AUTO_MAP)
        if kind == "own":
            edit(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"])
            edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    (here / "recipe.yml").write_text(
        "merge_method: linear\nmodels:\n- model: a\n- model: b\ntokenizer: {source: union}\n"
    )
    return marker


RUN_THE_MODEL = [
    "eval a --data texts.txt", "calibrate a --data texts.txt -o out.safetensors", "barrier a b --data texts.txt",
    "curve a b --data lines.txt --steps 2 --points 3 --point 0.5 -o out",
    "ensemble a b --data texts.txt", "merge a b --method regmean --data texts.txt -o out",
    "merge a b --method fisher --data texts.txt -o out",
    "sweep a b --over models.0.weight=0:1:0.5 --data texts.txt", "merge a b --repair --data texts.txt -o out",
    "search a b --over models.0.weight=0:1 --evaluations 3 --data lines.txt",
]  # fmt: skip
OTHERS = [
    "align a b -o out", "align a b --data texts.txt -o out", "merge a b --align -o out",
    "merge a b --tokenizer union -o out", "merge recipe.yml -o out", "merge a b -o out", "plan recipe.yml", "check a b",
    "selftest a", "verify a", "extract a b -o out", "check a b --data texts.txt", "report a", "reproduce a",
]  # fmt: skip


def told(line: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, line.split(), input="y\nyes\n" * 10)
    assert "defect" not in done.output and "Do you wish to run" not in done.output
    return done.exit_code, done.output


@pytest.mark.parametrize("line", [*RUN_THE_MODEL, *OTHERS])
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_no_verb_runs_code_beside_a_model(line: str, kind: str, here: Path) -> None:
    marker = poisoned(here, kind)
    code, output = told(line)
    assert not marker.exists()
    assert not (here / "modules").exists()
    if kind == "own" and line in RUN_THE_MODEL:
        assert code == 1 and "code that comes with it" in output and "--trust-remote-code" in output
    if kind == "stock" and line in RUN_THE_MODEL:
        assert code == 0, output


@pytest.mark.parametrize("line", [RUN_THE_MODEL[0], RUN_THE_MODEL[2], "merge a b --tokenizer union -o out", "verify a"])
def test_it_runs_where_it_is_asked_for(line: str, here: Path) -> None:
    marker = poisoned(here, "own")
    code, output = told(f"{line} --trust-remote-code")
    assert code == 0, output
    assert marker.exists()


def test_trust_ends_with_its_block(here: Path) -> None:
    marker = poisoned(here, "own")
    with isomerge.trust_remote_code():
        trusted = isomerge.evaluate(here / "a", here / "texts.txt")
    gpt2(here / "plain", seed=0)
    assert trusted.loss == isomerge.evaluate(here / "plain", here / "texts.txt").loss
    marker.unlink()
    with pytest.raises(CheckpointError, match="not run unasked") as caught:
        isomerge.evaluate(here / "a", here / "texts.txt")
    assert caught.value.keys == ("trust_remote_code",)
    assert not marker.exists()


def test_a_merged_model_is_run_by_the_code_of_its_parents(here: Path) -> None:
    poisoned(here, "own")
    with isomerge.trust_remote_code():
        isomerge.merge([here / "a", here / "b"]).save(here / "out")
        shutil.rmtree(here / "b")
        curve = isomerge.barrier(here / "a", here / "out", data=here / "texts.txt")
    assert len(curve.points) > 2


KERNELS = ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]


@pytest.mark.parametrize("kernel", ["someone/kernel", "flash_attention_2", {"": "someone/kernel"}, 3])
@pytest.mark.parametrize("key", KERNELS)
def test_attention_kernels_are_not_fetched_from_a_hub(key: str, kernel: Any) -> None:
    """transformers takes org/name there as code to download and run, and some other names too."""
    folder = model("llama", 0)
    config = {**json.loads((folder / "config.json").read_text()), key: kernel}
    loaded = load_stock(config, tensors(folder), dtype=torch.float64)
    assert loaded.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("key", KERNELS)
def test_no_kernel_is_asked_for_to_know_the_names_of_layers(key: str, tmp_path: Path) -> None:
    """Where kernels are installed, transformers would fetch it; where not, it fails."""
    gpt2(tmp_path / "a", seed=0)
    edit(tmp_path / "a" / "config.json", **{key: "someone/kernel"})
    layout = ModuleLayout(isomerge.open_checkpoint(tmp_path / "a"))
    assert layout.model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("wrong", [{"n_head": 5}, {"n_embd": "16"}, {"activation_function": "nope"}, {"dtype": "os"}])
def test_a_config_that_no_class_can_be_built_from_is_named(wrong: dict[str, Any], here: Path) -> None:
    gpt2(here / "a", seed=0)
    edit(here / "a" / "config.json", **wrong)
    with pytest.raises(CheckpointError, match="cannot build it from this config.json"):
        isomerge.evaluate(here / "a", here / "texts.txt")


@pytest.mark.parametrize(
    "named", ["pipeline", "AutoModel", "logging", "GPT2Config", "__file__", 3, None, ["GPT2Model"]]
)
def test_only_a_model_class_is_a_class_of_a_model(named: Any) -> None:
    with pytest.raises(CheckpointError, match="has no class"):
        stock_class({"model_type": "gpt2", "architectures": [named]})
