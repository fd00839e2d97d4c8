"""Small files that stood for more than a machine has, and files that ended in an exception of Python's own."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import isomerge
from commands import verb
from isomerge.adapters.adapter import open_adapter
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.lock import read_lock
from isomerge.data.images import Pixels
from isomerge.data.open import open_data
from isomerge.errors import CheckpointError, IsomergeError, RequestError, SpecificationError
from isomerge.evaluation.tokens import tokenizer_problems
from isomerge.json_files import JsonError, parse_json, read_text
from isomerge.merging.recipe.load import load_recipe
from isomerge.reporting.measurements import read_measurement
from isomerge.reporting.record import read_record
from isomerge.yaml_files import load
from models import model

DEEP = "[" * 100_000 + "]" * 100_000


def expect_refusal(kind: type[IsomergeError], call: Callable[[], object], match: str) -> None:
    """An error of this kind, and soon."""
    start = time.process_time()
    with pytest.raises(kind, match=match):
        call()
    assert time.process_time() - start < 5


# --- aliases, depth, counts -------------------------------------------------------------------------------------------
def laughs(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def test_a_recipe_of_aliases_is_refused_before_it_is_written_out() -> None:
    assert len(laughs(8)) < 500
    expect_refusal(RequestError, lambda: load_recipe(laughs(8)), "aliases stand for more than 200,000 values")


def test_merged_mappings_count_as_written_out() -> None:
    text = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
    expect_refusal(RequestError, lambda: load_recipe(text), "aliases stand for")


def test_an_alias_that_contains_itself_is_refused() -> None:
    expect_refusal(RequestError, lambda: load_recipe("models: &a [*a]\nmerge_method: linear\n"), "contains itself")


@pytest.mark.parametrize("text", [DEEP, "{a: " * 5000, "- " * 5000, "[" * 5000])
def test_deep_yaml_is_refused(text: str) -> None:
    expect_refusal(RequestError, lambda: load_recipe(text + "\n"), "deep|not YAML")


def test_the_head_of_a_card_is_bounded_too() -> None:
    import yaml

    with pytest.raises(yaml.YAMLError, match="aliases"):
        load(laughs(8))


@pytest.mark.parametrize("setting", ["num_hidden_layers", "num_experts", "encoder_layers"])
def test_a_billion_layers_are_refused(tmp_path: Path, setting: str) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for config in ({setting: 10**9}, {"text_config": {setting: 10**9}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        expect_refusal(CheckpointError, lambda: open_checkpoint(tmp_path), f"{setting} is 1,000,000,000")


def write_adapter(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    layer = "base_model.model." + "a" * 60 + ".lora_"
    save_file({layer + "A.weight": torch.ones(2, 3), layer + "B.weight": torch.ones(3, 2)},
              folder / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["x"], **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("pattern", ["(a+)+[b-c]", "(a|aa)+[b-c]", "([^b]*)*[b-c]", ".*.*.*.*.*.*.*.*[b-c]"])
def test_a_pattern_that_never_ends_is_stopped(tmp_path: Path, pattern: str) -> None:
    folder = write_adapter(tmp_path / "adapter", rank_pattern={pattern: 2})
    start = time.process_time()
    try:
        open_adapter(folder)  # where it can be decided at once, it is
    except RequestError as error:
        assert "more than 1 s" in str(error)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("pattern", ["(a{900}){900}", "a{99999999999}", "(", "[z-a]"])
def test_a_pattern_that_is_none_is_named(tmp_path: Path, pattern: str) -> None:
    folder = write_adapter(tmp_path / "adapter", alpha_pattern={pattern: 2})
    expect_refusal(CheckpointError, lambda: open_adapter(folder), "alpha_pattern")


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"rank_pattern": [1]}, "rank_pattern"), ({"lora_alpha": [4]}, "lora_alpha"), ({"bias": "some"}, "bias"),
     ({"alpha_pattern": {"a": "F32"}}, "alpha_pattern"), ({"r": True}, "'r'")],
)  # fmt: skip
def test_settings_of_another_type_are_named(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    expect_refusal(CheckpointError, lambda: open_adapter(write_adapter(tmp_path / "adapter", **changes)), named)


# --- pictures and archives --------------------------------------------------------------------------------------------
def png(width: int, height: int) -> bytes:
    """One that says so and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", start) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_picture_of_too_many_pixels_is_not_decoded() -> None:
    expect_refusal(RequestError, lambda: Pixels(3, (4, 4)).decode(png(30_000, 30_000), "a.png"), "pixels")
    expect_refusal(RequestError, lambda: Pixels(3, (4, 4)).decode(png(9_000, 9_000), "a.png"), "9000 × 9000 pixels")


def test_a_thin_picture_is_not_resized_to_more_than_memory() -> None:
    from PIL import Image

    made = io.BytesIO()
    Image.new("L", (1, 60_000)).save(made, "PNG")
    expect_refusal(RequestError, lambda: Pixels(3, (4, 4), edge=2000).decode(made.getvalue(), "a.png"), "pixels")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_small_archive_of_a_huge_picture_is_refused(tmp_path: Path, kind: str) -> None:
    path, size = tmp_path / f"a.{kind}", 300 << 20
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("cat/1.png", bytes(size))
    else:
        with tarfile.open(path, "w:gz") as archive:
            entry = tarfile.TarInfo("cat/1.png")
            entry.size = size
            archive.addfile(entry, io.BytesIO(bytes(size)))
    assert path.stat().st_size < 1 << 20
    expect_refusal(RequestError, lambda: open_data(path).sha256, "314,572,800 bytes")


def test_folders_that_link_to_themselves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(png(1, 1))
    (tmp_path / "cat" / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dog").symlink_to(tmp_path, target_is_directory=True)
    expect_refusal(RequestError, lambda: open_data(tmp_path), "is a link to a folder that it lies in")


def test_a_folder_that_is_linked_twice_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "1.png").write_bytes(png(1, 1))
    (tmp_path / "data").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "real", target_is_directory=True)
    assert open_data(tmp_path / "data").size == 2


# --- JSON -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "why"),
    [(DEEP, "deep"), ("[" * 70 + "]" * 70, "deep"), ("NaN", "NaN"), ("1e999", "too large"), ("9" * 400, "400 digits"),
     (b"\xff", "UTF-8"), ('"\\ud800"', "surrogate"), ("{", "not valid JSON"), ("", "not valid JSON")],
)  # fmt: skip
def test_json_is_bounded(text: str | bytes, why: str) -> None:
    with pytest.raises(JsonError, match=why):
        parse_json(text)


def test_deep_nesting_is_an_error_wherever_json_is_read(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for name in ("config.json", "isomerge.json", "curve.json", "tokenizer.json"):
        (tmp_path / name).write_text(DEEP)
    expect_refusal(CheckpointError, lambda: open_checkpoint(tmp_path), "config.json: it is nested")
    expect_refusal(CheckpointError, lambda: read_record(tmp_path), "nested")
    expect_refusal(RequestError, lambda: read_measurement(tmp_path / "curve.json"), "nested")
    assert tokenizer_problems(tmp_path, 3)[0] is False
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(DEEP)
    expect_refusal(CheckpointError, lambda: open_adapter(adapter), "nested")


# --- safetensors ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": {}, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]},
    ],
)
def test_headers_that_no_tensor_fits_are_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    offsets = entry["data_offsets"]
    assert isinstance(offsets, list)
    write_header(tmp_path / "model.safetensors", {"a": entry}, offsets[1])
    expect_refusal(CheckpointError, lambda: open_checkpoint(tmp_path).read("a"), "tensor 'a'")


@pytest.mark.parametrize("metadata", [[], "", 1, {"a": 1}, {"a": None}, {"a": ["b"]}])
def test_metadata_that_the_safetensors_library_refuses_is_refused(tmp_path: Path, metadata: object) -> None:
    write_header(tmp_path / "model.safetensors", {"__metadata__": metadata}, 0)
    expect_refusal(CheckpointError, lambda: open_checkpoint(tmp_path), "__metadata__")


def write_header(path: Path, header: dict[str, object], size: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


# --- recipes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    ["name: [x]", "name: {x: 1}", f"base_model: {'x' * 5000}", "seed: 0x" + "f" * 400, 'base_model: "a\\0b"',
     '"\\0": 1', "dtype: !!int x", "? [a]\n: b"],
)  # fmt: skip
def test_odd_values_in_recipes_are_errors(change: str) -> None:
    recipe = f"merge_method: linear\nmodels: [{{model: a}}, {{model: b}}]\n{change}\n"
    try:
        load_recipe(recipe)
    except RequestError:
        return
    assert change.startswith("base_model: x")  # a long name may be a model's; it is looked for later


# --- config.json ------------------------------------------------------------------------------------------------------
def copied(folder: Path, seed: int, **changes: object) -> Path:
    """A tiny Llama whose config.json has other values, or (None) lacks some."""
    import shutil

    shutil.copytree(model("llama", seed, torch.float32), folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("missing", ["num_attention_heads", "hidden_size", "architectures"])
def test_a_merge_needs_no_architecture(tmp_path: Path, missing: str) -> None:
    pair = [copied(tmp_path / str(seed), seed, **{missing: None}) for seed in (0, 1)]
    done = verb("merge", *pair, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert open_checkpoint(tmp_path / "out").tensors.keys() == open_checkpoint(pair[0]).tensors.keys()


@pytest.mark.parametrize(
    "changes",
    [{"num_attention_heads": None}, {"num_attention_heads": 0}, {"num_attention_heads": "4"}, {"hidden_size": [12]},
     {"hidden_size": 2**40}, {"head_dim": "x"}, {"num_key_value_heads": 0}],
)  # fmt: skip
def test_sizes_that_are_none_are_named_by_what_needs_them(tmp_path: Path, changes: dict[str, object]) -> None:
    from isomerge.architectures import describe

    checkpoint = open_checkpoint(copied(tmp_path / "model", 0, **changes))
    expect_refusal(SpecificationError, lambda: describe(checkpoint), next(iter(changes)))


# --- paths ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 3000, "a\0b", "~nobody-of-this-name/x"])
def test_paths_that_no_file_can_have_are_refused(path: str) -> None:
    for call in (open_checkpoint, open_adapter, open_data, read_record, load_recipe):
        expect_refusal(RequestError, lambda call=call: call(path), "no file can be called so")  # type: ignore[misc]


@pytest.mark.parametrize("weight", [1e308, -1e308, 10**400, "1e308"])
def test_weights_whose_sum_is_no_number_are_refused(weight: object) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": weight}} for m in "ab"]}
    expect_refusal(RequestError, lambda: load_recipe(recipe), "'weight' must be a number")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without an end")
def test_files_without_an_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a repository can have them: links to devices."""
    monkeypatch.setattr("isomerge.merging.recipe.load.LARGEST", 1 << 20)
    for name in ("README.md", "isomerge.lock.json", "recipe.yml"):
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(OSError, match="a pipe or a device"):
        read_text(tmp_path / "README.md")
    with pytest.raises(CheckpointError, match="a pipe or a device"):
        read_lock(tmp_path)
    with pytest.raises(RequestError, match="no text in UTF-8"):
        load_recipe(tmp_path / "recipe.yml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_place_of_a_config_is_not_waited_for(tmp_path: Path) -> None:
    shutil.copytree(model("llama", 0), tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    os.mkfifo(tmp_path / "model" / "config.json")
    expect_refusal(CheckpointError, lambda: open_checkpoint(tmp_path / "model"), "a pipe or a device")


def test_text_larger_than_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isomerge.json_files.LARGEST", 1 << 20)
    (tmp_path / "README.md").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(OSError, match="larger than 1 MiB"):
        read_text(tmp_path / "README.md")


def test_the_recipe_of_a_lock_is_no_path(tmp_path: Path) -> None:
    """Else a forged lock would have another file read and carried out."""
    first, second = (model("llama", seed, torch.float32) for seed in (0, 1))
    isomerge.merge([first, second]).save(tmp_path / "out", report=False)
    other = tmp_path / "other.yml"
    other.write_text(f"merge_method: linear\nmodels:\n- model: {first}\n")
    path = tmp_path / "out" / "isomerge.lock.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "recipe": str(other)}))
    with pytest.raises(IsomergeError, match="a recipe is a mapping"):
        isomerge.reproduce(tmp_path / "out")
