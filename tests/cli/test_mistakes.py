"""Plausible mistakes, each met with one paragraph that names the file, the cause and the next step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cli.defects import (
    adapter,
    adapter_and_text,
    alone,
    another_family,
    body,
    classes,
    config_not_json,
    config_with_nan,
    image_model,
    link_to,
    occupied,
    only,
    pickled,
    pictures,
    quantised,
    recipe,
    truncated,
    weights_gone,
    wider,
    with_tensor,
    without_config,
    written,
)
from cli.invoke import MERGE, MODELS, told
from isomerge.cli.app import app


@dataclass(frozen=True)
class Mistake:
    line: str
    says: tuple[str, ...]
    """The file or flag, the cause, the next step."""
    spoil: Callable[[Path], None] | None = None
    """What to do to the folder `b` beforehand."""
    code: int = 2


MISTAKES = {
    "a path that is not there": Mistake(
        "merge a ./bb -o out", ("./bb", "no such file or folder", "Did you mean 'b'?")
    ),
    "a path that is not there, to evaluate": Mistake(
        "eval ./bb --data x.txt", ("./bb", "no such file or folder", "Did you mean 'b'?"), written("x.txt", b"words")
    ),
    "the page of a model": Mistake(
        "merge https://huggingface.co/org/model/tree/main a -o out", ("address of a page", "hub id alone, org/model.")
    ),
    "an address of something": Mistake(
        "merge ftp://example.org/model.safetensors a -o out", ("begin with s3://", "Download the model", "org/name")
    ),
    "another name of the output": Mistake("merge a b --output x", ("No such option: --output", "with -o/--out.")),
    "a method in capitals": Mistake(f"{MERGE} --method TIES", ("--method cannot be 'TIES'", "Did you mean 'ties'?")),
    "weights without commas": Mistake(
        "merge a b --weights 0.2 0.8 -o out", ("'0.8' was read as a model", "by commas", "--weights 0.2,0.8.")
    ),
    "weights with a space": Mistake(
        "merge a b --weights 0.2, 0.8 -o out", ("'0.8' was read as a model", "without spaces", "--weights 0.2,0.8.")
    ),
    "densities without commas": Mistake(
        "merge a b --method ties --base a --density 0.2 0.8 -o out", ("'0.8' was read as a model", "by commas")
    ),
    "more models than a pair": Mistake(
        "merge a b c --method slerp --base d -o out", ("slerp merges exactly 1 model", "karcher and multislerp")
    ),
    "a range with a dash": Mistake(
        "sweep a b --over lambda=0-1 --data x.txt", ("'lambda=0-1'", "written with colons", "(lambda=0:1:0.1, say")
    ),
    "a file to verify": Mistake(
        "verify b/model.safetensors", ("b/model.safetensors", "it is a file", "Name the folder that holds it")
    ),
    "a GGUF file to verify": Mistake(
        "verify b/model.gguf", ("b/model.gguf", "it is a file of GGUF", "isomerge convert"), only("model.gguf")
    ),
    "the images of one class": Mistake(
        "eval b --data images/test/cat", ("on cat", "no class folders", "folder above, images/test, if 'cat', 'dog'"),
        classes,
    ),
    "images without classes": Mistake(
        "eval b --data alone", ("on alone", "no class folders", "Put each into a folder named after its class"), alone
    ),
    "a wider model to extract from": Mistake(
        "extract a b -o out", ("b and its base a: different width: hidden_size is 12 and 24. Name a model",), wider
    ),
    "a hub id with a typing mistake, offline": Mistake(
        "merge a orgg/modle -o out", ("orgg/modle", "cannot be reached", "Check the spelling", "hf download"), code=1
    ),
    "a recipe that is not there": Mistake(
        "merge recipe.yaml -o out", ("recipe.yaml", "there is no such file", "Check the path")
    ),
    "a wrong key": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "line 2", "'merge_methd' is not a key", "mean 'merge_method'?"),
        recipe(f"name: x\nmerge_methd: linear\n{MODELS}"),
    ),
    "a tab in a recipe": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "line 3", "there is a tab", "spaces only"),
        recipe("merge_method: linear\nmodels:\n\t- model: a\n"),
    ),
    "a wrong indent": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "line 4", "not YAML", "look at the indentation"),
        recipe("merge_method: linear\nmodels:\n  - model: a\n     parameters:\n    weight: 1\n"),
    ),
    "a wrong method": Mistake(
        f"{MERGE} --method tise", ("--method cannot be 'tise'", "Did you mean 'ties'?")
    ),
    "a device by another name": Mistake("align b a -o out --device gpu", ("device 'gpu'", "cuda (NVIDIA", "Use cpu")),
    "data to check that are not there": Mistake("check a b --data nope.txt", ("nope.txt", "Check the path")),
    "a picture of another kind": Mistake(
        "barrier a b --data x.txt --plot curve.doc", ("curve.doc", ".svg or .png", "Name it curve.svg")
    ),
    "a digit too many": Mistake(
        "barrier a b --data x.txt --points 1000000", ("1,000,000 points", "at most 10,000", "fewer")
    ),
    "statistics below a file": Mistake(
        "calibrate a --data x.txt -o a/config.json/stats.safetensors", ("not a writable folder", "Name another folder")
    ),
    "a setting that is no number": Mistake(MERGE, ("config.json", "a setting is NaN", "correct"), config_with_nan, 1),
    "one model to merge": Mistake("merge a -o out", ("at least two models", "isomerge merge model-a model-b -o OUT")),
    "a base with an adapter, to evaluate": Mistake(
        "eval a+b --data x.txt", ("a+b", "taken by the verbs that merge", "isomerge merge a+b -o OUT"),
        written("x.txt", b"words"),
    ),
    "one model for a method of two": Mistake("merge a --method nuslerp -o out", ("nuslerp merges", "2 models")),
    "one model to sweep": Mistake(
        "sweep a --over t=0:1:0.1 --data x.tsv", ("at least two models", "isomerge sweep model-a model-b --over")
    ),
    "a flag with a typing mistake": Mistake(f"{MERGE} --densty 0.5", ("No such option: --densty", "'--density'")),
    "mixed architectures": Mistake(
        MERGE, ("'llama'", "'bert'", "Only models of one architecture", "merge fine-tunes of one base"), another_family
    ),
    "a body without its head": Mistake(
        MERGE, ("b lacks 2 tensors", "has 'norm.weight' for 'model.norm.weight'", "save all with one"), body
    ),
    "a missing base": Mistake(f"{MERGE} --method ties", ("ties needs 'base_model'", "--base")),
    "weights that do not match the models": Mistake(
        f"{MERGE} --weights 0.2,0.3,0.5", ("--weights has 3 numbers for 2 models", "one per model")
    ),
    "a density out of range": Mistake(
        "merge b --base a --method ties --density 50 -o out", ("'density'", "a share between 0 and 1", "50")
    ),
    "a wrong dtype": Mistake(
        f"{MERGE} --out-dtype bfloat61", ("--out-dtype cannot be 'bfloat61'", "Did you mean 'bfloat16'?")
    ),
    "a wrong size": Mistake(f"{MERGE} --shard-size 5XB", ("--shard-size cannot be '5XB'", "Write 5GB")),
    "the same model twice": Mistake("merge a a -o out", ("a is here twice", "sum of the weights")),
    "an output folder that exists": Mistake(
        MERGE, ("out", "not empty", "nothing is overwritten unasked", "Name a new folder", "--force"), occupied
    ),
    "the output is an input": Mistake(
        "merge a b -o b --force", ("b", "folder of the input", "never modified", "Name a folder elsewhere")
    ),
    "a GGUF file": Mistake(
        "merge a b/model.gguf -o out", ("b/model.gguf", "of version 0 of GGUF", "Download or copy"),
        only("model.gguf"), 1,
    ),
    "a folder with nothing but GGUF": Mistake(
        MERGE, ("checkpoint b", "model-Q4_K_M.gguf", "of version 0 of GGUF"), only("model-Q4_K_M.gguf"), 1
    ),
    "ONNX weights": Mistake(
        MERGE, ("checkpoint b", "'onnx/model.onnx'", "ONNX is not read", "safetensors"), only("onnx/model.onnx"), 1
    ),
    "TensorFlow weights": Mistake(
        MERGE, ("checkpoint b", "'tf_model.h5'", "does not read", "save_pretrained"), only("tf_model.h5"), 1
    ),
    "an adapter where a model is expected": Mistake(
        MERGE, ("Opening b", "an adapter and not a model", "Write base+adapter"), adapter
    ),
    "an adapter among models to check": Mistake(
        "check a b", ("Opening b", "an adapter and not a model", "Write base+adapter"), adapter
    ),
    **{
        f"an adapter to {line.split()[0]}": Mistake(
            line, ("Opening b", "an adapter and not a model", "into its base first (isomerge merge BASE+b -o OUT)"),
            adapter_and_text,
        )
        for line in (
            "align b a -o out", "selftest b", "extract b a -o out", "eval b --data x.txt", "ensemble a b --data x.txt",
            "barrier a b --data x.txt", "calibrate b --data x.txt -o s.safetensors",
        )
    },
    "an adapter to extract from": Mistake(
        "extract a b -o out", ("adapter from b", "it is an adapter already", "Use it as it is", "merge BASE+b"), adapter
    ),
    "a model where an adapter is expected": Mistake(
        "merge a+b b -o out", ("adapter b", "no adapter_config.json", "Name the folder that PEFT"), code=1
    ),
    "a pickle that would run code": Mistake(
        MERGE, ("checkpoint b", "pytorch_model.bin", "could run code", "Use the model's safetensors"), pickled, 1
    ),
    "no config.json": Mistake(MERGE, ("'b' has no config.json", "Copy it from where the model came"), without_config),
    "no config.json, to align": Mistake(
        "align b a -o out", ("b has no config.json", "copy it from where the model came"), without_config
    ),
    "a config.json that is not JSON": Mistake(
        MERGE, ("checkpoint b", "config.json", "not valid JSON", "column 21", "Download or copy"), config_not_json, 1
    ),
    "a truncated file": Mistake(
        MERGE, ("checkpoint b", "model.safetensors", "truncated", "Download or copy"), truncated, 1
    ),
    "an empty folder": Mistake(
        MERGE, ("checkpoint b", "the folder is empty", "model.safetensors", "hub id"),
        lambda folder: [path.unlink() for path in folder.iterdir()] and None, 1,
    ),
    "a GPTQ checkpoint": Mistake(
        MERGE, ("weights of b", "quantization_config (gptq)", "int32", "it was quantised from"), quantised("gptq"), 1
    ),
    "an AWQ checkpoint": Mistake(
        "align b a -o out", ("weights of b", "(awq)", "dequantise it with the package"), quantised("awq"), 1
    ),
    "a bitsandbytes checkpoint": Mistake(
        MERGE, ("weights of b", "(bitsandbytes)", "uint8", "model.dequantize()"), quantised("bitsandbytes"), 1
    ),
    "a tokenizer that is not there": Mistake(
        "merge recipe.yml -o out", ("a has no tokenizer files", "b has no tokenizer files", "leave out"),
        recipe(f"merge_method: linear\n{MODELS}tokenizer: {{source: union}}\n"),
    ),
    "a device that is not there": Mistake(f"{MERGE} --device cuda:99", ("cuda:99", "Use cpu")),
    "data that is not there": Mistake("eval a --data images.zip", ("images.zip", "no such file or folder")),
    "an image model on a table": Mistake(
        "eval b --data rows.csv", ("b on rows.csv", "reads images", "data is texts", "Name a folder or archive of ima"),
        image_model,
    ),
    "an address as data": Mistake(
        "eval a --data https://example.org/x.csv", ("no such file", "not downloaded: name a file or folder on this")
    ),
    "a data set of the hub": Mistake(
        "eval a --data glue/sst2", ("glue/sst2", "no such file", "load_dataset(NAME).save_to_disk")
    ),
    "text as images": Mistake(
        "eval a --data x.txt --kind images",
        ("x.txt", "no images in it", "leave kind out. On the command line: --kind KIND"),
        written("x.txt", b"some words"),
    ),
    "a part of running text": Mistake(
        "eval a --data x.txt --split test",
        ("x.txt", "no part 'test'", "Leave split out", "On the command line: --split PART"),
        written("x.txt", b"some words"),
    ),
    "a folder without data": Mistake(
        "eval a --data there", ("data there", "neither images nor .txt", "Name the folder that does"),
        lambda folder: Path("there").mkdir(),
    ),
    "a column that is not there": Mistake(
        "eval b --data x.csv --label lable",
        ("x.csv", "label 'lable' is not a column", "It has 'text', 'label'", "Did you mean 'label'?"),
        written("x.csv", b"text,label\ngood,1\nbad,0\n"),
    ),
    "a recipe as a model": Mistake(
        "check a recipe.yml", ("recipe.yml", "a recipe, and not a model", "isomerge merge recipe.yml -o OUT"),
        recipe(f"merge_method: linear\n{MODELS}"), 1,
    ),
    "a task that is in no module": Mistake(
        "eval a --task measures:mine", ("measures:mine", "No module named", "the folder that holds measures.py")
    ),
    "a task that fails": Mistake(
        "eval a --task math:sqrt", ("math:sqrt", "called as f(model)", "TypeError", "Correct it", "--debug")
    ),
    "a model as data": Mistake("eval a --data b", ("data b", "a model, and not data", "Name the images or texts")),
    "weights as data": Mistake(
        "barrier a b --data a/model.safetensors", ("a/model.safetensors", "a model, and not data", "Name the images")
    ),
    "another task": Mistake(
        "eval a --data x.txt --task token", ("a as 'token'", "for 'causal-lm'", "Leave task out", "--task TASK"),
        written("x.txt", b"some words"),
    ),
    "two models to evaluate": Mistake(
        "eval a b --data x.txt", ("eval takes one MODEL", "'b'", "each separately", "isomerge ensemble a b --data PATH")
    ),
    "two folders to verify": Mistake("verify a b", ("verify takes one OUT", "'b'", "Run it once for each")),
    "a recipe that is no text": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "no text in UTF-8", "byte 3 is 0xff", "Save it as UTF-8"),
        written("recipe.yml", b"a: \xff"[1:]),
    ),
    "a recipe in UTF-16 that does not say so": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "no text in UTF-8", "byte 2 is 0x00", "Save it as UTF-8"),
        written("recipe.yml", "name: x".encode("utf-16-le")),
    ),
    "a recipe that is a folder": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "it is a folder", "Name the YAML file in it"),
        lambda folder: Path("recipe.yml").mkdir(),
    ),
    "a recipe that is a link to nothing": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "link to gone.yml", "Repair the link"),
        lambda folder: Path("recipe.yml").symlink_to("gone.yml"),
    ),
    "a model that is a link to nothing": Mistake(
        MERGE, ("checkpoint b", "a link to gone, which is not there", "Repair the link"), link_to("gone"), 1
    ),
    "a model that is a link to itself": Mistake(
        MERGE, ("checkpoint b", "leads back to itself", "Repair the link, or name the model's own folder"),
        link_to("b"), 1,
    ),
    "weights that are a link to nothing": Mistake(
        MERGE, ("checkpoint b: model.safetensors", "a link to ../blobs/1234", "download or copy the model again"),
        weights_gone, 1,
    ),
    "a missing tensor": Mistake(
        MERGE, ("b lacks a tensor that others have: 'model.norm.weight'", "if it is incomplete, get it again"),
        with_tensor("model.norm.weight", None),
    ),
    "a tensor too many": Mistake(
        MERGE, ("a lacks a tensor that others have: 'value_head.weight'", "save them without"),
        with_tensor("value_head.weight", torch.zeros(3)),
    ),
    "a missing tensor, to align": Mistake(
        "align b a -o out", ("b", "missing: model.norm.weight", "get weights and config.json again"),
        with_tensor("model.norm.weight", None), 1,
    ),
    "a tensor of another shape, to run": Mistake(
        "calibrate b --data x.txt -o s.safetensors",
        ("of another shape: 'model.norm.weight'", "config.json of one and the same model"),
        with_tensor("model.norm.weight", torch.zeros(3)), 1,
    ),
    "a line to another architecture": Mistake(
        "barrier a b --data x.txt", ("from a to b", "'llama'", "'bert'", "Name models of one architecture"),
        another_family,
    ),
    "a level of no alignment": Mistake(
        "barrier a b --data x.txt --level rotation", ("--level rotation", "no effect without --align", "Add --align"),
    ),
    "statistics under another ending": Mistake(
        "calibrate a --data x.txt -o s.npz", ("s.npz", ".safetensors file", "Name it like"),
    ),
    "images for a model of texts, to calibrate": Mistake(
        "calibrate a --data images -o s.safetensors", ("a on images", "reads texts", "Name data of texts"), pictures,
    ),
    "a pattern of no weight": Mistake(
        "calibrate a --data x.txt -o s.safetensors --only qproj", ("'qproj'", "names are like 'lm_head.weight'"),
        written("x.txt", b"some words"),
    ),
    "a file to reproduce": Mistake(
        "reproduce a/config.json", ("a/config.json", "a file and not a folder", "Name a folder"), code=1
    ),
    "a value for a switch": Mistake(
        f"{MERGE} --report=false", ("--report", "does not take a value", "--no-report to turn it off", "merge --help")
    ),
    "a value for a switch without an opposite": Mistake(
        f"{MERGE} --align=yes", ("--align", "does not take a value", "write --align alone", "merge --help")
    ),
    "an option without its value": Mistake("eval a --data", ("'--data' requires an argument", "Write --data PATH")),
    "no output": Mistake("merge a b", ("Missing option '-o' / '--out'", "Example: isomerge merge model-a model-b")),
    "a place that cannot be swept": Mistake(
        "sweep a b --over wieght=0:1:0.5 --data x.txt",
        ("'wieght'", "linear has no such option", "Did you mean 'weight'?", "models.1.weight (b)", "t (the share of"),
        written("x.txt", b"some words"),
    ),
    "one weight for all": Mistake(
        "sweep a b --over weight=0:1:0.5 --data x.txt",
        ("weight=0", "add up to zero", "models.1.weight (b), or t for the share of the second"),
        written("x.txt", b"some words"),
    ),
    "a pattern that is none": Mistake(
        "merge recipe.yml -o out", ("recipe.yml", "line 5", "'*up*' is no regular expression", "A part of the name"),
        recipe(f"merge_method: regmean\n{MODELS}calibrate: {{only: '*up*'}}\ndata: x.txt\n"),
    ),
    "no lock to reproduce from": Mistake(
        "reproduce a", ("lock of a", "no isomerge.lock.json", "Name a folder that was merged"), code=1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_met_with_a_message_to_act_on(name: str, here: Path) -> None:
    mistake = MISTAKES[name]
    if mistake.spoil is not None:
        mistake.spoil(here / "b")
    before = sorted(p.relative_to(here) for p in here.rglob("*"))
    code, message = told(mistake.line)
    assert code == mistake.code, message
    assert message.startswith("isomerge: ") and len(message.strip().splitlines()) == 1
    for part in mistake.says:
        assert part in message, message
    assert sorted(p.relative_to(here) for p in here.rglob("*")) == before  # nothing was left behind


def test_an_adapter_is_verified_as_one_and_told_how_to_become_a_model(here: Path) -> None:
    adapter(here / "b")
    done = CliRunner().invoke(app, ["verify", "b", "--json"])
    structure = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "structure")
    assert done.exit_code == 0 and structure["passed"] is None
    assert "an adapter and not a model" in structure["detail"] and "isomerge merge BASE+b -o OUT" in structure["detail"]
    code, message = told("merge a+b -o made")  # as the messages say
    assert code == 0, message
    name = "model.layers.0.self_attn.q_proj.weight"
    base, made = (load_file(here / folder / "model.safetensors")[name] for folder in ("a", "made"))
    assert torch.allclose(made, base + 2 * torch.ones(16, 2) @ torch.ones(2, 12))  # the scale is alpha / r
    assert told("verify made")[0] == 0


def test_there_are_at_least_twenty() -> None:
    assert len(MISTAKES) >= 20


def test_one_model_is_written_anew_where_the_method_takes_one(here: Path) -> None:
    code, said = told("merge a --method passthrough --scale 0.5 --out-dtype float64 -o out")
    assert code == 0, said
    before, after = (load_file(folder / "model.safetensors") for folder in (here / "a", here / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], 0.5 * tensor.double()) for name, tensor in before.items())


def test_check_says_why_a_body_and_a_model_with_a_head_share_no_name(here: Path) -> None:
    body(here / "b")
    shown = CliRunner().invoke(app, ["check", "a", "b"]).output
    assert "b has 'embed_tokens.weight' for 'model.embed_tokens.weight', so it was saved by another class" in shown
