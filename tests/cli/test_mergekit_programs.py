"""mergekit's command lines: each flag does its work, is explained, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from isomerge.cli.mergekit import COMMON, ELSEWHERE, EXTRACT, MULTI, Flag, in_bytes
from isomerge.errors import RequestError
from models import tensors

# What `mergekit-yaml --help` of mergekit 0.1.5 lists; tests/peers asks mergekit itself.
YAML = """
--allow-crimes --no-allow-crimes --unsafe-truncate-embeddings --no-unsafe-truncate-embeddings --transformers-cache
--lora-merge-cache --lora-merge-dtype --cuda --no-cuda --device --low-cpu-memory --no-low-cpu-memory --out-shard-size
--copy-tokenizer --no-copy-tokenizer --clone-tensors --no-clone-tensors --trust-remote-code --no-trust-remote-code
--random-seed --lazy-unpickle --no-lazy-unpickle --write-model-card --no-write-model-card --safe-serialization
--no-safe-serialization -v --quiet --no-quiet --read-to-gpu --no-read-to-gpu --multi-gpu --no-multi-gpu --num-threads -j
--gpu-rich --async-write --no-async-write --write-threads
"""
RECIPE = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\n"


def another(flag: Flag) -> Any:
    """A value that is not the default."""
    if flag.kind is bool:
        return not flag.default
    return {int: 7, float: 0.5, str: "5B", list[str]: ["x"]}[flag.kind]


@pytest.mark.parametrize("flag", [*COMMON, *MULTI, *EXTRACT], ids=lambda flag: flag.name)
def test_a_flag_does_something_or_is_explained_or_refused(flag: Flag) -> None:
    assert sum(map(bool, (flag.help, flag.needless, flag.refused))) == 1
    if flag.refused:
        with pytest.raises(RequestError, match=f"{flag.name} cannot be obeyed: "):
            flag.translated(another(flag))
        return
    words, note = flag.translated(another(flag))
    assert bool(note) is bool(flag.needless)
    assert note is None or (note.endswith(f" is not needed: {flag.needless}.") and not words)
    if not flag.always:
        assert flag.translated(flag.default) == ((), None)


@pytest.mark.parametrize(("size", "count"), [("5B", 5 * 10**9), ("200M", 2 * 10**8), ("100k", 10**5), ("77", 77)])
def test_a_size_is_in_bytes(size: str, count: int) -> None:
    assert in_bytes(size) == ["--shard-size", str(count)]


def test_every_flag_of_mergekit_is_known(run: Any) -> None:
    import typer

    from isomerge.cli.app import app

    group: Any = typer.main.get_command(app)
    for name in ("mergekit-yaml", "mergekit-multi", "mergekit-moe", "mergekit-tokensurgeon", "mergekit-extract-lora"):
        known = {flag for one in group.commands[name].params for flag in (*one.opts, *one.secondary_opts)}
        assert set(YAML.split()) <= known


@pytest.fixture
def recipe(here: Path) -> Path:
    (here / "recipe.yml").write_text(RECIPE)
    (here / "a" / "tokenizer_config.json").write_text("{}")
    return here


def test_a_whole_command_line_runs_as_it_is(run: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", constants.HF_HUB_CACHE)  # both are as they were afterwards
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE)
    line = "recipe.yml out --copy-tokenizer --allow-crimes --lazy-unpickle --out-shard-size 1k -v -j 1 --random-seed 3"
    done = run(f"mergekit-yaml {line} --no-cuda --no-write-model-card --transformers-cache cache")
    assert done.exit_code == 0, done.output
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == ["--allow-crimes", "--lazy-unpickle", "-v"]
    a, b, merged = (tensors(recipe / name) for name in ("a", "b", "out"))
    assert all(torch.allclose(merged[name], (a[name] + b[name]) / 2, atol=1e-7) for name in a)
    assert len(list((recipe / "out").glob("model-*.safetensors"))) > 1
    assert (recipe / "out" / "tokenizer_config.json").exists() and not (recipe / "out" / "README.md").exists()
    lock = json.loads((recipe / "out" / "isomerge.lock.json").read_text())
    assert lock["seed"] == 3 and constants.HF_HUB_CACHE == "cache"


def test_without_its_tokenizer_a_model_is_still_reproduced(run: Any, recipe: Path) -> None:
    assert run("mergekit-yaml recipe.yml out --no-copy-tokenizer --quiet").output == ""
    assert not (recipe / "out" / "tokenizer_config.json").exists()
    assert run("reproduce out").exit_code == 0
    occupied = run("mergekit-yaml recipe.yml out")
    assert occupied.exit_code == 2 and "--force" in occupied.stderr
    assert run("mergekit-yaml recipe.yml out --force --json").exit_code == 0
    assert (recipe / "out" / "tokenizer_config.json").exists()


def test_what_cannot_be_obeyed_ends_before_any_work(run: Any, recipe: Path) -> None:
    done = run("mergekit-yaml recipe.yml out --unsafe-truncate-embeddings")
    assert done.exit_code == 2 and "source: union" in done.stderr and not (recipe / "out").exists()
    done = run("mergekit-yaml recipe.yml out --out-shard-size 5GB")
    assert done.exit_code == 2 and "as in 5B" in done.stderr


@pytest.mark.parametrize("program", ELSEWHERE)
def test_a_program_that_is_not_here_says_what_does_its_work(run: Any, program: str) -> None:
    done = run(f"{program} config.yml out")
    assert done.exit_code == 2 and ELSEWHERE[program] in done.stderr


def test_a_recipe_may_be_followed_by_the_folder(run: Any, recipe: Path) -> None:
    assert run("merge recipe.yml out --no-report").exit_code == 0 and (recipe / "out" / "config.json").exists()
    for line in ("merge recipe.yml out -o other", "merge recipe.yml other another"):
        done = run(line)
        assert done.exit_code == 2 and "A recipe names its models" in done.stderr and not (recipe / "other").exists()
    assert "Missing option '-o'" in run("merge recipe.yml").stderr


def test_slerp_goes_from_the_first_model_to_the_second(run: Any, recipe: Path) -> None:
    assert run("merge a b --method slerp --t 0.2 -o first --no-report").exit_code == 0
    assert run("merge a b --method slerp --t 0.2 --base a -o named --no-report").exit_code == 0
    assert run("merge a b --method slerp --t 0 -o start --no-report").exit_code == 0
    first, named, start, a = (tensors(recipe / name) for name in ("first", "named", "start", "a"))
    assert all(torch.equal(first[name], named[name]) for name in named)
    assert all(torch.allclose(start[name], a[name], atol=1e-6) for name in a)


def test_several_documents_are_one_command(run: Any, recipe: Path) -> None:
    text = "name: mean\n" + RECIPE + "---\n" + RECIPE.replace("model: b", "model: mean")
    Path("many.yml").write_text(text)
    done = run("mergekit-multi many.yml --out-path out -I between --no-lazy")
    assert done.exit_code == 0 and "--intermediate-dir is not needed" in done.stderr and not Path("between").exists()
    a, b, merged = (tensors(recipe / name) for name in ("a", "b", "out"))
    assert all(torch.allclose(merged[name], (3 * a[name] + b[name]) / 4, atol=1e-6) for name in a)


def test_an_adapter_is_extracted_from_the_layers_that_are_named(run: Any, recipe: Path) -> None:
    from safetensors.torch import load_file

    line = "--model b --base-model a --out-path adapter --max-rank 3 -i q_proj -i mlp -e layers.1 --no-distribute-scale"
    done = run(f"mergekit-extract-lora {line}")
    assert done.exit_code == 0, done.output
    assert "--no-distribute-scale is not needed" in done.stderr
    found = load_file(recipe / "adapter" / "adapter_model.safetensors")
    layers = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in found}
    wanted = {
        n.removesuffix(".weight") for n in tensors(recipe / "a") if ("q_proj" in n or "mlp" in n) and ".1." not in n
    }
    assert layers == wanted
    assert max(found[name].shape[0] for name in found if "lora_A" in name) == 3
