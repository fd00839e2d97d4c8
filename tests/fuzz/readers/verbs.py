"""Whole verbs on folders with one damaged file: what they read beside the files that have readers of their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fuzz import mutators as m
from fuzz.readers.registry import Seed, content_of, reader

TOKENIZER = {
    "tokenizer.json": m.mutate_json, "tokenizer_config.json": m.mutate_json, "chat_template.jinja": m.mutate_lines,
}  # fmt: skip


@cache
def _pair() -> tuple[Path, Path]:
    from models import gpt2, scratch

    folders = (scratch() / "verbs-0", scratch() / "verbs-1")
    for seed, folder in enumerate(folders):
        gpt2(folder, seed=seed)
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        (folder / "README.md").write_text("---\nbase_model: x/y\n---\n# A model\n")
    return folders


@cache
def _texts() -> Path:
    from models import scratch
    from samples import WORDS

    path = scratch() / "verbs-texts.txt"
    path.write_text("\n".join(" ".join(WORDS[k : k + 6]) for k in range(8)) + "\n")
    return path


def _model() -> list[Seed]:
    return [content_of(_pair()[0])]


@reader("words", _model, TOKENIZER)
def read_words(folder: Path) -> None:
    """A model's own tokenizer on texts, and the model."""
    import isomerge

    isomerge.evaluate(folder, _texts())


@reader("union", _model, {**TOKENIZER, "config.json": m.mutate_values, "generation_config.json": m.mutate_json})
def read_union(folder: Path) -> None:
    """A merge of vocabularies."""
    import isomerge

    recipe = {
        "merge_method": "linear", "models": [{"model": str(folder)}, {"model": str(_pair()[1])}],
        "tokenizer": {"source": "union"}, "chat_template": "auto",
    }  # fmt: skip
    isomerge.merge_recipe(recipe).save(folder.with_name("merged"), force=True, report=False)


@reader("check", _model, {
    "config.json": m.mutate_values, "README.md": m.mutate_yaml_head, "tokenizer.json": m.mutate_json,
    "tokenizer_config.json": m.mutate_json,
})  # fmt: skip
def read_check(folder: Path) -> None:
    import isomerge

    isomerge.check(folder, _pair()[1])


@cache
def _merged() -> list[Seed]:
    import isomerge
    from models import scratch

    isomerge.merge(list(_pair())).save(scratch() / "verbs-out", report=False)
    return [content_of(scratch() / "verbs-out")]


@reader("verify", _merged, {
    "config.json": m.mutate_values, "generation_config.json": m.mutate_json, "isomerge.lock.json": m.mutate_json,
    "tokenizer.json": m.mutate_json, "model.safetensors": m.mutate_safetensors,
})  # fmt: skip
def read_verify(folder: Path) -> None:
    import isomerge

    isomerge.verify(folder)


@reader("reproduce", _merged, {"isomerge.lock.json": m.mutate_json})
def read_reproduce(folder: Path) -> None:
    import isomerge

    isomerge.reproduce(folder)
