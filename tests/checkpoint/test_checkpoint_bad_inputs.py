"""Each bad input gives one error that names the file, the cause and the next step."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from isomerge.checkpoint import open_checkpoint, require_finite, require_floating
from isomerge.errors import CheckpointError, RequestError


def message(source) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    text = str(caught.value)
    assert text.startswith("While ") and "\n" not in text
    return text


def test_missing_path_names_the_nearest_folder(model_folder):
    text = message(model_folder.parent / "model_a")
    assert "no such file or folder" in text and "Did you mean 'model-a'?" in text


def test_a_name_that_is_neither_path_nor_hub_id_says_so():
    assert "does not look like a hub id" in message("no-such-model-anywhere")


def test_empty_folder(tmp_path):
    assert "the folder is empty" in message(tmp_path)
    (tmp_path / "images").mkdir()
    assert "holds no weights (it has 'images/')" in message(tmp_path)


def test_folder_without_weights(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    assert "holds no weights" in message(tmp_path)


@pytest.mark.parametrize("name", ["model.ggml", "tf_model.h5", "flax_model.msgpack"])
def test_foreign_formats_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    text = message(tmp_path)
    assert name in text and "Use the" in text and "safetensors" in text


def test_several_unindexed_files_are_ambiguous(tmp_path, state):
    for name in ("x.safetensors", "y.safetensors"):
        save_file(state, tmp_path / name)
    assert "'x.safetensors', 'y.safetensors'" in message(tmp_path)


def test_missing_shard(sharded_folder):
    (sharded_folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: named by model.safetensors.index.json but not" in message(sharded_folder)


def test_truncated_file(model_folder):
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert "model.safetensors: it is truncated" in message(model_folder)


def test_file_longer_than_its_header_says(model_folder):
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"abc")
    assert "3 bytes more than its header announces" in message(model_folder)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "too short"),
        (b"\xff" * 100, "corrupt"),
        ((50).to_bytes(8, "little") + b"{", "truncated inside the header"),
        ((8).to_bytes(8, "little") + b"{{{{{{{{", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    ],
)
def test_corrupt_headers(tmp_path, data, cause):
    (tmp_path / "model.safetensors").write_bytes(data)
    assert cause in message(tmp_path)


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "should take 8 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at byte 4"),
        ({"dtype": "F6_E2M3", "shape": [1], "data_offsets": [0, 1]}, "stored as F6_E2M3"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
        ("nonsense", "data_offsets"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path, entry, cause):
    text = json.dumps({"t": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert cause in message(tmp_path) and "'t'" in message(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "a\\..\\..\\b.bin"]
)
def test_index_cannot_leave_the_folder(sharded_folder, shard):
    index = {"weight_map": {"a.weight": shard}}
    (sharded_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "points outside the folder" in message(sharded_folder)


def test_index_naming_a_tensor_its_shard_lacks(sharded_folder):
    path = sharded_folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert "the index puts 'ghost' in it" in message(sharded_folder)


def test_broken_index(sharded_folder):
    (sharded_folder / "model.safetensors.index.json").write_text("{")
    assert "not an index with a weight_map" in message(sharded_folder)


def test_all_problems_are_listed_at_once(sharded_folder):
    (sharded_folder / "config.json").write_text("{")
    (sharded_folder / "model-00001-of-00002.safetensors").unlink()
    (sharded_folder / "model-00002-of-00002.safetensors").write_bytes(b"short")
    text = message(sharded_folder)
    assert "3 problems: (1) config.json" in text and "00001" in text and "(3) model-00002" in text


class Evil:
    def __reduce__(self):
        return (print, ("the pickle ran",))


def test_pickles_that_would_run_code_are_refused(tmp_path, capsys):
    torch.save({"w": torch.zeros(1), "x": Evil()}, tmp_path / "pytorch_model.bin")
    assert "could run code" in message(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    message(tmp_path)
    assert "the pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_a_pickle_in_either_format_cannot_run_code(tmp_path, capsys, archive):
    path = tmp_path / "pytorch_model.bin"
    for content in ({"w": torch.zeros(1), "x": Evil()}, Evil(), [Evil()]):
        torch.save(content, path, _use_new_zipfile_serialization=archive)
        assert "could run code" in message(tmp_path)
    # As the magic number that the old format begins with, or anywhere behind it.
    torch.save({"w": torch.zeros(1)}, path, _use_new_zipfile_serialization=archive)
    path.write_bytes(pickle.dumps(Evil(), protocol=2) + path.read_bytes())
    message(tmp_path)
    assert "the pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_every_truncation_of_a_pickle_is_explained(tmp_path, archive):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.arange(8.0), "b": torch.ones(3, 2)}, path, _use_new_zipfile_serialization=archive)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert "pytorch_model.bin: " in message(tmp_path)


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_a_few_bytes_cannot_stand_for_a_huge_tensor(tmp_path, archive):
    path = tmp_path / "pytorch_model.bin"
    for tensor in (torch.zeros(1).expand(10**12), torch.zeros(1).to_sparse(), torch.zeros(9, device="meta")):
        torch.save({"w": tensor}, path, _use_new_zipfile_serialization=archive)
        assert "tensor 'w' is not stored in full" in message(tmp_path)


def test_pickles_of_other_things_are_explained(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"state_dict": {"w": torch.zeros(1)}}, path)
    assert "not a flat state_dict" in message(tmp_path)
    torch.save({"w": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:1500])
    assert "truncated or corrupt" in message(tmp_path)


def test_sources_of_no_known_kind_are_refused(tmp_path):
    with pytest.raises(RequestError, match="neither a path"):
        open_checkpoint(3)  # type: ignore[arg-type]
    (tmp_path / "model.doc").write_bytes(b"x")
    assert ".safetensors, .gguf and .bin" in message(tmp_path / "model.doc")
    (tmp_path / "model.gguf").write_bytes(b"x")
    assert "does not begin as a GGUF file does" in message(tmp_path / "model.gguf")
    assert "not a tensor" in message({"w": [1.0]})
    assert "no values" in message({"w": torch.zeros(1, device="meta")})


def test_reading_an_unknown_tensor_names_the_nearest(model_folder):
    with pytest.raises(CheckpointError, match="Did you mean 'a.weight'"):
        open_checkpoint(model_folder).read("a.wieght")


def test_reading_a_file_that_shrank_since_says_so(model_folder):
    checkpoint = open_checkpoint(model_folder)
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        checkpoint.read("b.weight")


def test_quantised_weights_are_refused_and_named():
    tensors = {"l.qweight": torch.zeros(2, dtype=torch.int32), "l.weight": torch.zeros(2).to(torch.float8_e4m3fn)}
    checkpoint = open_checkpoint(tensors, config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(CheckpointError) as caught:
        require_floating(checkpoint)
    text = str(caught.value)
    assert (
        "gptq" in text and "int32: 'l.qweight'" in text and "float8_e4m3fn: 'l.weight'" in text and "dequantise" in text
    )


def test_integer_buffers_and_masks_are_allowed():
    tensors = {
        "bert.embeddings.position_ids": torch.arange(4),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "mask": torch.tensor([True]),
        "routing_table": torch.arange(6),
        "w": torch.zeros(1),
    }
    require_floating(open_checkpoint(tensors))
    with pytest.raises(CheckpointError, match="int32: 'routing_table'"):
        require_floating(open_checkpoint({**tensors, "routing_table": torch.arange(6, dtype=torch.int32)}))


def test_nan_and_infinity_are_counted():
    bad = torch.tensor([1.0, float("nan"), float("inf"), float("nan")])
    checkpoint = open_checkpoint({"w": bad})
    with pytest.raises(CheckpointError, match=r"tensor 'w'.*2 of its 4 values are NaN and 1 are infinite"):
        require_finite("w", bad, checkpoint)
    require_finite("w", torch.ones(2), checkpoint)
    require_finite("ids", torch.arange(3), checkpoint)
