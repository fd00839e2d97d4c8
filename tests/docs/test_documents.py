"""Every command, program and recipe in the documents is run on tiny models, or stands in a table that says why not.

A block's language says what is done with it: console, bash, sh or none are commands; python is run, all blocks of a
page in one namespace; yaml is merged; json is read; text is a picture or a form, whose verbs and flags must exist.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import isomerge
from docs import scratch_folder, shell
from docs.blocks import Block, blocks_of, documents, name_of, prose_of, spans_of
from isomerge.alignment.solvers.by_group import SOLVERS
from isomerge.architectures import FAMILIES
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.methods import METHODS
from provenance.stand_in_hub import hub_of_this_computer

COMMANDS = ("console", "bash", "sh", "")
PAGES = [page for page in documents() if blocks_of(page)]

SLOW = {
    f"docs/{name}.md"
    for name in ("tutorial", "sweep", "search", "soups", "transport", "reconstruct", "cookbook", "guides/strangers")
}
"""Pages whose blocks take more than a few seconds together."""

NOT_RUN = {
    ("README.md", "src/isomerge/"): "the tree of the source, which tests/test_repository.py compares with the disk",
    ("README.md", "@software{isomerge,"): "how to cite, for BibTeX",
}
"""Blocks that no test here runs, by page and first line, and why."""

ONLY_LOOKED_AT = {
    "isomerge demo": "it trains models and merges them in every way, for half a minute; tests/demonstration/ runs it",
    "isomerge studio": "it serves a page until Ctrl-C; tests/browser goes the whole way through it",
    "ssh": "it connects to another computer",
    "make": "a target runs tests, benchmarks or a demo as a whole; the Makefile must have it",
    "pip": "it installs from a network; pyproject.toml must have the extras",
    "python": "benchmarks take minutes or a GPU; the script and its flags must exist (those in examples/ are run, but "
    "those in examples/federated, which start servers and clients: tests/federated runs them)",
    ".": "it activates an environment in the reader's own shell",
}
"""Commands by their first words that are not started, and why."""

FORMS = {
    "docs/cli.md": "the reference shows how a command is formed: OUT, [--force]; each verb's own example is run below",
    "docs/remote.md": "its addresses stand for others; tests/remote/ runs such commands with servers of its own",
}
"""Pages whose commands have words that stand for others. The verb and its flags must exist."""

FRAGMENT: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [{"model": "model-a"}, {"model": "model-b"}],
}
"""What a piece of a recipe is completed by."""

KINDS = {
    "docs/adapters.md": "text",
    "docs/calibration.md": "sequence",
    "docs/cookbook.md": "text",
    "docs/ensembles.md": "text",
    "docs/formats.md": "text",
    "docs/guides/llms-on-a-laptop.md": "text",
    "docs/guides/two-fine-tunes.md": "text",
    "docs/mixture.md": "text",
    "docs/rebase.md": "text",
    "docs/moe.md": "text",
    "docs/recipes.md": "text",
    "docs/tokenizers.md": "text",
    "docs/transplant.md": "text",
}
"""What models a page speaks about, where they are not image classifiers."""

FROM_NOTHING = ("docs/tutorial.md",)
"""Pages that make everything they use."""

READS_MERGED = ("docs/trust.md",)
"""Pages that speak about a model merged before."""

ONE_STORY = ("docs/tutorial.md", "docs/cookbook.md", "docs/guides/")
"""Pages read from top to bottom: what one block writes, the next one finds. Elsewhere each block may write anew."""


def given(kind: str) -> dict[str, Any]:
    """Names that programs in the documents take from their readers."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageClassification as Images
    from transformers import AutoModelForSequenceClassification as Texts

    names: dict[str, Any] = {"isomerge": isomerge, "torch": torch}
    names["state_a"], names["state_b"] = (load_file(f"model-{x}/model.safetensors") for x in "ab")
    names["images"] = torch.randn(2000, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(3, 35).reshape(4, 8)
    names["batches"] = lambda: [{"pixel_values": names["images"][:16]} if kind == "image" else {"input_ids": tokens}]
    names["batches_a"] = names["batches_b"] = names["batches"]
    names["accuracy"] = lambda state: float(sum(tensor.double().sum() for tensor in state.values()))
    if kind in ("image", "sequence"):
        load = {"image": Images, "sequence": Texts}[kind].from_pretrained
        names["merged_model"], names["parent_a"], names["parent_b"] = (load(f"model-{x}") for x in "cab")
    return names


@pytest.fixture
def registries() -> Iterator[None]:
    """What an example enters into a list of plug-ins leaves it again."""
    kept = [(found, dict(found)) for found in (METHODS, ALL_METHODS, FAMILIES, SOLVERS)]
    yield
    for found, before in kept:
        found.clear()
        found.update(before)


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline cache in place of the hub."""
    from huggingface_hub import constants

    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in; models are trained for one epoch, and no browser opens."""
    from isomerge.demonstration import digits

    monkeypatch.setattr(digits, "EPOCHS", 1)
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if name_of(page) in SLOW else []) for page in PAGES],
    ids=name_of,
)
def test_every_block_of_a_page_runs(page: Path, hub: Path, registries: None, scratch: Path) -> None:
    kind = KINDS.get(name_of(page), "image")
    found = blocks_of(page)
    if name_of(page) not in FROM_NOTHING:
        scratch_folder.set_stage(scratch, kind, page.read_text())
    scratch_folder.fill_hub(hub, page.read_text())
    recipe = recipe_of(found, kind)
    names = {} if name_of(page) in FROM_NOTHING else given(kind)
    story = name_of(page).startswith(ONE_STORY)
    for block in found:
        if (block.page, block.first) in NOT_RUN:
            continue
        if not story and block.page not in FORMS:
            scratch_folder.set_stage(scratch, kind_of(block.code, kind), block.code + recipe)
        if name_of(page) not in FROM_NOTHING:
            Path("recipe.yml").write_text(recipe)
        if block.page in READS_MERGED:
            shutil.copytree(scratch_folder.image_model(0), scratch / "merged")
        with told_where(block):
            assert run_block(block, names, kind, anew=not story) > 0, "there is nothing in it to run or to look at"


def recipe_of(blocks: list[Block], kind: str) -> str:
    """What `recipe.yml` is on a page: its first whole recipe, if the commands speak of the same models."""
    whole = [block.code for block in blocks if block.language == "yaml" and is_whole(block.code)]
    if whole and kind == "text":
        return whole[0]
    named = sorted(set(re.findall(r"\b([ab])\.weight", " ".join(block.code for block in blocks))))
    return yaml.safe_dump({**FRAGMENT, "models": [{"model": name} for name in ("a", "b")]} if named else FRAGMENT)


def kind_of(code: str, otherwise: str) -> str:
    """The models that a block is about, by the data and the parts it names."""
    told = {r"images|cifar10": "image", r"\.csv|\.jsonl": "sequence", "vision_tower": "seeing", "layer_range": "deep"}
    return next((kind for words, kind in told.items() if re.search(words, code)), otherwise)


@contextlib.contextmanager
def told_where(block: Block) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trace = "".join(traceback.format_tb(error.__traceback__)[-3:])
        pytest.fail(f"{block}: {type(error).__name__}: {error}\n{trace}\n{block.code}", pytrace=False)


def run_block(block: Block, names: dict[str, Any], kind: str, *, anew: bool) -> int:
    """How many commands, recipes or texts were run or looked at."""
    if block.language in COMMANDS:
        commands = list(shell.commands(block.code))
        for words, into in commands:
            run_command(words, into, form=block.page in FORMS, anew=anew)
        return len(commands)
    if block.language == "python":
        exec(compile(block.code, str(block), "exec"), names)
    elif block.language == "yaml":
        run_recipe(block, kind)
    elif block.language == "json":
        json.loads(block.code)
    else:
        assert block.language == "text", f"no test knows what to do with a block of {block.language}"
        require_forms(block.code)
    return 1


def run_command(words: list[str], into: str | None, *, form: bool, anew: bool) -> None:
    listed = words[0] in ONLY_LOOKED_AT or " ".join(words[:2]) in ONLY_LOOKED_AT
    if words[0] == "python" and words[1].startswith("examples/") and not words[1].startswith("examples/federated/"):
        shell.run_example(words[1:])
    elif listed or (form and shell.is_form(words)):
        shell.look(words)
    else:
        assert words[0] == "isomerge", f"no test runs {words[0]}, and no table says why"
        shell.run(words, into, anew=anew)


def run_recipe(block: Block, kind: str) -> None:
    """Merge as it says; a piece of a recipe is completed first."""
    recipe = block.code if is_whole(block.code) else completed(block.code)
    scratch_folder.put_models(Path.cwd(), kind_of(block.code, "text"), recipe)
    isomerge.merge_recipe(recipe).save(f"from-line-{block.line}")
    scratch_folder.put_models(Path.cwd(), kind, recipe)


def is_whole(code: str) -> bool:
    """Not a piece of a recipe; one of a mixture of experts names no method, as in mergekit."""
    return "merge_method" in code or "experts:" in code


def completed(piece: str) -> str:
    """A recipe around a piece of one, with every model that it names."""
    named = sorted(set(re.findall(r"org/[\w-]+", piece)))
    models = FRAGMENT["models"] + [{"model": name} for name in named]
    return yaml.safe_dump({**FRAGMENT, "models": models, **yaml.safe_load(piece)})


def require_forms(text: str) -> None:
    """Lines of a text that are commands are forms: real commands belong into a block that is run."""
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words and words[0] in shell.PROGRAMS:
            assert words[0] == "isomerge" and shell.is_form(words), f"'{line}' is a command in a block that is not run"
            shell.require_form(words[1:])


@pytest.mark.parametrize("verb", sorted(shell.examples()))
def test_the_example_of_every_verb_runs(verb: str, scratch: Path) -> None:
    example = shell.examples()[verb]
    kind = kind_of(
        example, "text" if re.search(r"finetuned|model\.layers|moe|tokeni|surgeon|gguf", example) else "image"
    )
    scratch_folder.set_stage(scratch, kind, example + " images")
    experts = {"base_model": "base", "gate_mode": "random", "experts": [{"source_model": "base"}] * 2}
    Path("recipe.yml").write_text(yaml.safe_dump(experts if "-moe" in example else FRAGMENT))
    if " merged" in example and "-o merged" not in example:
        shell.run(["isomerge", "merge", "model-a", "model-b", "-o", "merged"])
    if "curve.json" in example:
        shell.run(["isomerge", "barrier", "model-a", "model-b", "--data", "images", "--json"], "curve.json")
    commands = list(shell.commands(example))
    assert commands and all(words[:2] == ["isomerge", verb] for words, _ in commands), "an example of another verb"
    with hub_of_this_computer(scratch, "hf_good") if verb == "push" else contextlib.nullcontext():
        for words, into in commands:
            run_command(words, into, form=False, anew=True)


def test_the_tables_of_exceptions_hold_only_what_exists() -> None:
    known = {(block.page, block.first) for page in PAGES for block in blocks_of(page)}
    assert set(NOT_RUN) <= known
    assert {*SLOW, *KINDS, *FORMS, *READS_MERGED, *FROM_NOTHING} <= {name_of(page) for page in documents()}


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_commands_in_sentences_exist(page: Path) -> None:
    wrong = []
    for span in spans_of(page):
        words = span.split()
        try:
            if words[0] == "isomerge" and len(words) > 1:
                shell.require_form(words[1:])
            elif words[0] in ("make", "pip", "python") and len(words) > 1:
                shell.look(shlex.split(span))
        except AssertionError as error:
            wrong.append(f"`{span}`: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_no_command_hides_outside_a_block(page: Path) -> None:
    """Four spaces make code too, in Markdown; formulas may stand there, commands belong between fences."""
    command = re.compile(r"    +(isomerge[ .]|make |pip |python )")
    hidden = [line for line in prose_of(page).splitlines() if command.match(line)]
    assert not hidden


@pytest.mark.parametrize(
    ("language", "code", "complaint"),
    [
        ("", "rm -rf everything", "no test runs rm"),
        ("", "make tea", "no target tea"),
        ("", 'pip install ".[tea]"', "no extra tea"),
        ("", "python benchmarks/tea.py", "there is no benchmarks/tea.py"),
        ("", "isomerge merge model-a nothing -o out", "ended with"),
        ("", "isomerge merge model-a model-b --methd ties -o out", "ended with 2"),
        ("python", "isomerge.mrege([])", "mrege"),
        ("yaml", "merge_method: ties\nmodels: [{model: model-a}]\ndensty: 1", "densty"),
        ("json", "{", "Expecting"),
        ("text", "isomerge check model-a model-b", "is a command in a block that is not run"),
        ("text", "isomerge check A B --tea", "no flag --tea"),
        ("fortran", "END", "fortran"),
    ],
)
def test_a_block_that_is_wrong_is_found(language: str, code: str, complaint: str, scratch: Path) -> None:
    scratch_folder.set_stage(scratch, "text", code)
    block = Block("a page", 1, language, code)
    with pytest.raises(pytest.fail.Exception, match=complaint), told_where(block):
        run_block(block, {"isomerge": isomerge}, "text", anew=False)
