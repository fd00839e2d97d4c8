"""Every reader of files, called as the verbs reach it, with whole files to start from.

A reader is a function of a folder. Its seeds are good folders, made once by the code that people make such files with;
`damage` says which of their files are changed, and how.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuzz import mutators as m

Seed = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """One kind of file."""

    seeds: Callable[[Path], list[Seed]]
    """Good folders by file name; the folder given is scratch space that stays while readers run."""
    damage: Mapping[str, m.Mutator]
    read: Callable[[Path], Any]
    safetensors: str | None = None
    """A file that the safetensors library must accept whenever we do."""

    def make(self, seeds: list[Seed], rng: random.Random) -> Seed:
        """A damaged folder."""
        whole = rng.choice([seed for seed in seeds if seed.keys() & self.damage.keys()])
        target = rng.choice([name for name in self.damage if name in whole])
        return {**whole, target: self.damage[target](whole[target], rng)}


READERS: dict[str, Reader] = {}
# How the time is shared: much to readers that every verb uses, and to those that are quick.
WEIGHTS = {
    "safetensors": 8, "adapter": 8, "table": 10, "image": 7, "barrier": 6, "archive": 5, "points": 4, "preprocessor": 4,
    "config": 3, "transform": 3, "statistics": 3, "recipe": 3, "tokenizer": 3, "index": 2, "record": 2, "merge": 0.7,
    "page": 0.4,
}  # fmt: skip


def reader(name: str, seeds: Callable[[Path], list[Seed]], damage: Mapping[str, m.Mutator], **more: Any) -> Any:
    def register(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
        READERS[name] = Reader(seeds, damage, read, **more)
        return read

    return register


def content_of(folder: Path) -> Seed:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stored(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save(dict(tensors), dict(metadata) if metadata else None)


# --- checkpoints ------------------------------------------------------------------------------------------------------
SMALL = {
    "a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "steps": torch.tensor(3), "none": torch.zeros(0, 5), "flags": torch.tensor([True, False]),
}  # fmt: skip


@reader(
    "safetensors", lambda scratch: [{"model.safetensors": stored(SMALL, {"format": "pt"})}],
    {"model.safetensors": m.mutate_safetensors}, safetensors="model.safetensors",
)  # fmt: skip
def read_safetensors(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint

    opened = open_checkpoint(folder)
    for name in opened.tensors:
        opened.read(name)


def _pickled(scratch: Path) -> list[Seed]:
    made = io.BytesIO()
    torch.save(SMALL, made)
    return [{"pytorch_model.bin": made.getvalue()}]


@reader("bin", _pickled, {"pytorch_model.bin": m.mutate_bytes})
def read_bin(folder: Path) -> None:
    read_safetensors(folder)


def _sharded(scratch: Path) -> list[Seed]:
    names = sorted(SMALL)
    shards = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    index = {"metadata": {"total_size": 1}, "weight_map": {t: shard for shard, ts in shards.items() for t in ts}}
    files = {shard: stored({t: SMALL[t] for t in ts}, {"format": "pt"}) for shard, ts in shards.items()}
    modules = [{"idx": 0, "name": "0", "path": "1_Pooling", "type": "x"}]
    return [{**files, "model.safetensors.index.json": json.dumps(index).encode(), "config.json": b'{"model_type": "x"}',
             "modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": b"{}"}]  # fmt: skip


@reader("index", _sharded, {"model.safetensors.index.json": m.mutate_json, "modules.json": m.mutate_json})
def read_index(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint

    open_checkpoint(folder).side_files()


FAMILIES = ("llama", "bert", "gpt2", "t5", "vit", "neox", "deberta", "opt", "mixtral", "distilbert", "gemma2", "qwen3")


def _models(scratch: Path) -> list[Seed]:
    from models import model

    return [content_of(model(name, 0, torch.float32)) for name in FAMILIES]


@reader("config", _models, {"config.json": m.mutate_json})
def read_config(folder: Path) -> None:
    """What every verb that knows architectures asks of a config.json."""
    from isomerge.architectures import describe
    from isomerge.checkpoint import open_checkpoint
    from isomerge.checkpoint.checks import require_floating
    from isomerge.data.task_heads import label_names, task_of
    from isomerge.evaluation.tokens import special_token_problems, vocabulary_rows
    from isomerge.merging.plan.model_parts import read_build
    from isomerge.merging.vocabulary.files import declared_rows

    checkpoint = open_checkpoint(folder)
    require_floating(checkpoint)
    task_of(checkpoint.config)
    label_names(checkpoint.config)
    declared_rows(checkpoint.config)
    special_token_problems(folder, checkpoint.config, vocabulary_rows(checkpoint.config) or 1)
    read_build(checkpoint)
    if checkpoint.config.get("model_type") in KNOWN:
        describe(checkpoint)


def _known() -> set[str]:
    from isomerge.architectures import FAMILIES as known

    return set(known)


KNOWN = _known()


def _pair(scratch: Path) -> list[Seed]:
    from models import model

    shutil.copytree(model("llama", 1, torch.float32), scratch / "second", dirs_exist_ok=True)
    return [content_of(model("llama", 0, torch.float32))]


@reader("merge", _pair, {"config.json": m.mutate_json, "generation_config.json": m.mutate_json})
def read_merge(folder: Path) -> None:
    """A plain merge, which needs no architecture."""
    import isomerge

    merged = isomerge.merge([str(folder), str(scratch_of("merge") / "second")], threads=1)
    merged.save(scratch_of("merge") / "out", force=True)


def scratch_of(name: str) -> Path:
    return SCRATCH[0] / name


SCRATCH: list[Path] = []


# --- adapters ---------------------------------------------------------------------------------------------------------
def _adapter(scratch: Path) -> list[Seed]:
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {layer + "A.weight": torch.ones(2, 12), layer + "B.weight": torch.ones(16, 2)}
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
        "rank_pattern": {"layers.0.q_proj": 2}, "alpha_pattern": {"q_proj": 4}, "use_rslora": False,
        "modules_to_save": None, "base_model_name_or_path": "base", "fan_in_fan_out": False,
        "init_lora_weights": True, "use_dora": False,
    }  # fmt: skip
    return [{"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": stored(factors)}]


@reader(
    "adapter", _adapter, {"adapter_config.json": m.mutate_json, "adapter_model.safetensors": m.mutate_safetensors},
    safetensors="adapter_model.safetensors",
)  # fmt: skip
def read_adapter(folder: Path) -> None:
    from isomerge.adapters.adapter import open_adapter

    adapter = open_adapter(folder)
    for target in adapter.targets.values():
        adapter.factors(target)


# --- what isomerge itself writes --------------------------------------------------------------------------------------
def _transform(scratch: Path) -> list[Seed]:
    import isomerge
    from models import model

    seeds = []
    for name in ("llama", "bert"):
        for seed in (0, 1):
            shutil.copytree(model(name, seed, torch.float32), scratch / f"{name}-{seed}", dirs_exist_ok=True)
        aligned = isomerge.align(scratch / f"{name}-1", anchor=scratch / f"{name}-0")
        aligned.save_transform(scratch / f"{name}.safetensors")
        seeds.append({"transform.safetensors": (scratch / f"{name}.safetensors").read_bytes(), name: b""})
    return seeds


@reader("transform", _transform, {"transform.safetensors": m.mutate_safetensors},
        safetensors="transform.safetensors")  # fmt: skip
def read_transform(folder: Path) -> None:
    from isomerge.alignment.storage import load_transform
    from isomerge.checkpoint import open_checkpoint

    name = "llama" if (folder / "llama").exists() else "bert"
    models = [open_checkpoint(scratch_of("transform") / f"{name}-{seed}") for seed in (1, 0)]
    load_transform(folder / "transform.safetensors", *models)


@reader("apply", _transform, {"transform.safetensors": m.mutate_safetensors})
def read_and_apply(folder: Path) -> None:
    """A stored transform, and the model that it moves."""
    import isomerge

    name = "llama" if (folder / "llama").exists() else "bert"
    source = scratch_of("apply") / f"{name}-1"
    moved = isomerge.align(source, transform=folder / "transform.safetensors", threads=1).moved()
    for name, _ in moved.changed():
        assert name


def _statistics(scratch: Path) -> list[Seed]:
    import isomerge
    from models import model

    folder = model("llama", 0, torch.float32)
    batches = [{"input_ids": torch.arange(8).reshape(2, 4)}]
    for what in (("gram",), ("gram", "activations", "units", "fisher")):
        isomerge.calibrate(folder, batches, what=what).save(scratch / f"{len(what)}.safetensors")
    return [{"statistics.safetensors": path.read_bytes()} for path in sorted(scratch.glob("*.safetensors"))]


@reader("statistics", _statistics, {"statistics.safetensors": m.mutate_safetensors},
        safetensors="statistics.safetensors")  # fmt: skip
def read_statistics(folder: Path) -> None:
    from isomerge.calibration.statistics import open_statistics

    statistics = open_statistics(folder / "statistics.safetensors")
    statistics.to_dict()
    for weight in statistics.weights:
        statistics.gram(weight).shifted(torch.zeros(1)).mean.sum()
    for site in statistics.info.get("sites", {}):
        statistics.moment(site)
    for weight in statistics.info.get("units", {}):
        statistics.units(weight)
    statistics.fisher.keys()


def _curves(scratch: Path) -> list[Seed]:
    points = [{"t": t / 4, "loss": 1.0 + t, "metric": 0.5} for t in range(5)]
    parents = [{"model": name, "loss": 1.0, "metric": 0.5} for name in "ab"]
    line = {
        "points": points, "barrier": 0.5, "metric_barrier": None, "parents": parents, "models": ["a", "b"],
        "ensemble": {"loss": 1.0, "metric": 0.7}, "task": "image", "notes": ["a note"], "seconds": 1.5,
        "metric_name": "accuracy", "higher_is_better": True, "examples": 10,
        "data": {"name": "digits", "sha256": "0" * 64, "size": 10, "kind": "images"},
        "aligned": {"points": points, "barrier": 0.1, "metric_barrier": 0.0, "parents": parents, "ensemble": None,
                    "level": "full", "verdict": "aligned", "notes": []},
    }  # fmt: skip
    plane = {
        "x": [-1.0, 0.0, 1.0], "y": [0.0, 1.0], "loss": [[1.0, 2.0, None], [3.0, 2.0, 1.0]],
        "metric": [[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]], "notes": [], "task": "image",
        "models": [{"model": name, "x": 0.0, "y": 1.0, "loss": 1.0, "metric": 0.2} for name in "abc"],
    }  # fmt: skip
    return [{"curve.json": json.dumps(one).encode()} for one in (line, plane)]


@reader("barrier", _curves, {"curve.json": m.mutate_json})
def read_barrier(folder: Path) -> None:
    from isomerge.reporting.curve_sections import connection_sections, read_curve

    connection_sections([read_curve(folder / "curve.json")])


def _records(scratch: Path) -> list[Seed]:
    from typer.testing import CliRunner

    import isomerge
    from isomerge.checkpoint.lock import LOCK
    from isomerge.cli.app import app
    from models import model

    for seed in (0, 1):
        shutil.copytree(model("llama", seed, torch.float32), scratch / f"m{seed}", dirs_exist_ok=True)
    verbs = CliRunner()
    pair = [str(scratch / "m0"), str(scratch / "m1")]
    for out, words in {
        "linear": ["merge", *pair],
        "aligned": ["merge", *pair, "--align"],
        "ties": ["merge", pair[1], "--base", pair[0], "--method", "ties"],
        "align": ["align", *pair],
    }.items():
        done = verbs.invoke(app, [*words, "-o", str(scratch / out)])
        assert done.exit_code == 0, (out, done.output)
    kept = ("isomerge.json", "report.html", LOCK)
    folders = [scratch / out for out in ("linear", "aligned", "ties", "align")]
    assert isomerge.__version__
    return [{name: (folder / name).read_bytes() for name in kept if (folder / name).is_file()} for folder in folders]


@reader("record", _records, {"isomerge.json": m.mutate_json})
def read_record(folder: Path) -> None:
    from isomerge.reporting.page import report

    report(folder, out=folder / "page.html")


@reader("page", _records, {"report.html": m.mutate_bytes})
def read_page(folder: Path) -> None:
    from isomerge.reporting.page import page_curves

    page_curves(folder / "report.html")


@reader("lock", _records, {"isomerge.lock.json": m.mutate_json})
def read_locks(folder: Path) -> None:
    from isomerge.reporting.page import lock_summary

    lock_summary(folder)


def _points(scratch: Path) -> list[Seed]:
    row = {"key": "0" * 64, "loss": 1.0, "metric": 0.5, "seconds": 1.0, "broken": [], "metric_name": "accuracy",
           "higher_is_better": True, "examples": 10}  # fmt: skip
    text = "".join(json.dumps({**row, "key": f"{n:064}"}) + "\n" for n in range(3))
    return [{"points.jsonl": text.encode()}]


def _saved_name() -> str:
    from isomerge.choices import POINTS

    return POINTS


@reader(
    "points", lambda scratch: [{_saved_name(): _points(scratch)[0]["points.jsonl"]}], {_saved_name(): m.mutate_jsonl}
)
def read_points(folder: Path) -> None:
    from isomerge.sweeping.saved_points import SavedPoints

    saved = SavedPoints(folder, {})
    for known in list(saved._known.values()):  # what `find` makes of each
        dict.fromkeys(known["broken"], 0.0)


# --- recipes ----------------------------------------------------------------------------------------------------------
RECIPES = (
    """merge_method: ties
base_model: a
models:
  - model: b
    parameters: {weight: 0.5, density: [0.1, 0.9]}
  - model: c@main+d
    parameters:
      weight:
        - filter: mlp
          value: 0.3
        - value: 1
parameters: {normalize: true}
dtype: bfloat16
tokenizer:
  source: union
  tokens:
    <s>: {source: b, force: true}
    x: {source: {kind: zero}}
align: {level: rotation, layers: "0-4"}
seed: 3
""",
    """name: one
merge_method: linear
models: &list
  - {model: a, parameters: {weight: 1.0}}
  - {model: b, parameters: {weight: 0.5}}
---
merge_method: slerp
base_model: one
models: [{model: one}, {model: c}]
parameters: {t: [0, 0.5, 1]}
""",
    """merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 4]}]
  - sources: [{model: b, layer_range: [2, 6]}]
""",
    """merge_method: regmean
models: [{model: a, data: x.txt}, {model: b, data: {path: y.csv, limit: 5}}]
calibrate: {limit: 10, only: q_proj}
repair: {only: mlp}
data: z.txt
""",
)


@reader("recipe", lambda scratch: [{"recipe.yml": text.encode()} for text in RECIPES], {"recipe.yml": m.mutate_yaml})
def read_recipe(folder: Path) -> None:
    from isomerge.merging.recipe.load import load_recipe

    for recipe in load_recipe(folder / "recipe.yml"):
        recipe.to_yaml()


CARD = b"---\nbase_model: [a/b]\ntags: &t [x, y]\nlicense: mit\n---\n# A model\n"


@reader(
    "card", lambda scratch: [{"README.md": CARD, "model.safetensors": stored(SMALL)}], {"README.md": m.mutate_yaml_head}
)
def read_card(folder: Path) -> None:
    from isomerge.checking.headers import stated_base
    from isomerge.checkpoint import open_checkpoint
    from isomerge.reporting.card import card_data

    checkpoint = open_checkpoint(folder)
    stated_base([checkpoint])
    card_data(checkpoint)


# --- tokenizers -------------------------------------------------------------------------------------------------------
def _tokenizers(scratch: Path) -> list[Seed]:
    added = [{"id": 4, "content": "<s>", "special": True, "single_word": False}]
    words = {"a": 0, "b": 1, "c": 2, "d": 3}
    table = {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": words, "merges": ["a b"]}}
    unigram = {"added_tokens": added, "model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ x }}", "model_max_length": 10**30,
              "added_tokens_decoder": {"4": {"content": "<s>"}}, "bos_token": "<s>"}  # fmt: skip
    weights = {"model.safetensors": stored(SMALL), "config.json": b'{"vocab_size": 5}'}
    generation = {"generation_config.json": b'{"eos_token_id": [4, 2], "bos_token_id": 1}'}
    return [
        {"tokenizer.json": json.dumps(table).encode(), "tokenizer_config.json": json.dumps(config).encode(), **weights},
        {"tokenizer.json": json.dumps(unigram).encode(), **generation, **weights},
        {"vocab.json": json.dumps(words).encode(), "added_tokens.json": b'{"<s>": 4}', "merges.txt": b"a b", **weights},
        {"vocab.txt": b"a\nb\nc\n", **weights},
        {"vocab.json": json.dumps({**words, "<unk>": 4}).encode(), **weights},
    ]


@reader("tokenizer", _tokenizers, {
    "tokenizer.json": m.mutate_json, "tokenizer_config.json": m.mutate_json, "vocab.json": m.mutate_json,
    "added_tokens.json": m.mutate_json, "vocab.txt": m.mutate_lines, "generation_config.json": m.mutate_json,
})  # fmt: skip
def read_tokenizer(folder: Path) -> None:
    from isomerge.checking.tokenizers import compare_tokenizers
    from isomerge.checkpoint import open_checkpoint
    from isomerge.evaluation.tokens import special_token_problems, tokenizer_problems
    from isomerge.merging.vocabulary.files import other_ids

    checkpoint = open_checkpoint(folder)
    tokenizer_problems(folder, 5)
    special_token_problems(folder, checkpoint.config, 5)
    other_ids([checkpoint, checkpoint])
    compare_tokenizers([checkpoint, checkpoint])


# --- data -------------------------------------------------------------------------------------------------------------
def _picture(kind: str, size: tuple[int, int] = (8, 6)) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    image = Image.frombytes("RGB", size, bytes(range(size[0] * size[1])) * 3)
    image.save(made, kind, **({"save_all": True} if kind == "GIF" else {}))
    return made.getvalue()


PICTURES = {
    "a.png": "PNG",
    "a.jpg": "JPEG",
    "a.gif": "GIF",
    "a.bmp": "BMP",
    "a.webp": "WEBP",
    "a.tif": "TIFF",
    "a.ppm": "PPM",
}


@reader("image", lambda scratch: [{name: _picture(kind)} for name, kind in PICTURES.items()],
        dict.fromkeys(PICTURES, m.mutate_bytes))  # fmt: skip
def read_image(folder: Path) -> None:
    from isomerge.data.images import Pixels

    (path,) = folder.iterdir()
    Pixels(3, (4, 4), edge=5).decode(path.read_bytes(), path.name)


SETTINGS = {
    "do_resize": True, "size": {"height": 8, "width": 8}, "do_center_crop": True, "resample": 3, "do_rescale": True,
    "crop_size": {"height": 6, "width": 6}, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.00392,
}  # fmt: skip


def _preprocessors(scratch: Path) -> list[Seed]:
    rest = {"model.safetensors": stored(SMALL), "config.json": b'{"num_channels": 3, "image_size": 8}'}
    short = {**SETTINGS, "size": {"shortest_edge": 8}, "crop_pct": 0.9, "do_center_crop": False}
    return [{"preprocessor_config.json": json.dumps(one).encode(), **rest} for one in (SETTINGS, short)] + [rest]


@reader("preprocessor", _preprocessors, {"preprocessor_config.json": m.mutate_json, "config.json": m.mutate_json})
def read_preprocessor(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint
    from isomerge.data.images import pixels_for

    pixels = pixels_for(open_checkpoint(folder))
    pixels.numbers(pixels.decode(PNG, "a.png")[None])


PNG = _picture("PNG")


def _archives(scratch: Path) -> list[Seed]:
    names = ("train/cat/1.png", "train/dog/2.png", "test/cat/3.png")
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), PNG)
    with tarfile.open(fileobj=tarred, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(PNG)
            archive.addfile(entry, io.BytesIO(PNG))
    plain = tarred.getvalue()
    return [{"a.zip": zipped.getvalue()}, {"a.tar": plain}, {"a.tar.gz": gzip.compress(plain, mtime=0)}]


@reader("archive", _archives, {"a.zip": m.mutate_zip, "a.tar": m.mutate_tar, "a.tar.gz": m.mutate_tar})
def read_archive(folder: Path) -> None:
    from isomerge.data.images import Pixels
    from isomerge.data.open import open_data

    (path,) = folder.iterdir()
    data = open_data(path)
    assert data.sha256
    data._decode(Pixels(3, (4, 4)), 0)  # type: ignore[attr-defined]


TABLES: Seed = {
    "a.csv": b'text,label\nhello there,1\n"good, bye",0\nwhat is it,1\n',
    "a.tsv": b"id\tsentence1\tsentence2\tlabel\n1\ta b c\td e f\t1\n2\tg h i\tj k l\t0\n",
    "a.txt": b"first line of a text\nsecond line of it\n\nthird\n",
    "a.conll": b"Rome B-1\nis O\n\nHello O\n",
    "a.jsonl": b'{"text": "a b c", "label": 1}\n{"text": "d e f", "label": 0}\n',
    "a.json": b'[{"tokens": ["a", "b"], "ner_tags": ["0", "1"]}, {"tokens": ["c"], "ner_tags": ["0"]}]',
    "b.json": b'{"data": [{"question": "a", "answer": "b", "split": "train"}]}',
}
CHANGES: dict[str, m.Mutator] = {
    name: m.mutate_jsonl if name.endswith("jsonl") else m.mutate_json if name.endswith("json") else m.mutate_lines
    for name in TABLES
}


@reader("table", lambda scratch: [{name: text} for name, text in TABLES.items()], CHANGES)
def read_table(folder: Path) -> None:
    from isomerge.data.open import open_data
    from isomerge.data.texts import _Targets

    (path,) = folder.iterdir()
    data = open_data(path)
    assert data.sha256 and data.describe()
    if data.kind in ("texts", "pairs", "tokens"):
        config = {
            "id2label": {"0": "0", "1": "1", "2": "O", "3": "B-1"},
            "architectures": ["XForSequenceClassification"],
        }
        task = "token" if data.kind == "tokens" else "sequence"
        targets = _Targets(data, Stub(config), task)  # type: ignore[arg-type]
        targets.usable()


@dataclass
class Stub:
    """As much of a checkpoint as labels need."""

    config: dict[str, Any]
