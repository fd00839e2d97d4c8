"""Opening folders and files: headers only, then one tensor at a time."""

from __future__ import annotations

import builtins
import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import isomerge
from isomerge.checkpoint import TensorInfo, open_checkpoint
from isomerge.errors import CheckpointError


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_folder_with_one_shard_reads_what_safetensors_stored(model_folder, state):
    checkpoint = open_checkpoint(model_folder)
    assert list(checkpoint.tensors) == sorted(state)
    assert checkpoint.tensors["a.weight"] == TensorInfo((2, 5), torch.bfloat16)
    assert checkpoint.tensors["a.weight"].nbytes == 20
    assert all(same(checkpoint.read(name), state[name]) for name in state)
    assert checkpoint.config["model_type"] == "toy"
    assert checkpoint.folder == model_folder and checkpoint.revision is None


def test_shards_are_joined_by_the_index(sharded_folder, state):
    checkpoint = open_checkpoint(str(sharded_folder))
    assert list(checkpoint.tensors) == sorted(state)
    assert all(same(checkpoint.read(name), state[name]) for name in state)


def test_single_file_uses_the_config_beside_it(model_folder, state):
    checkpoint = open_checkpoint(model_folder / "model.safetensors")
    assert checkpoint.config["model_type"] == "toy"
    assert same(checkpoint.read("b.weight"), state["b.weight"])
    assert model_folder / "tokenizer.json" in checkpoint.side_files()


def test_single_file_alone_has_no_side_files(tmp_path, state):
    save_file(state, tmp_path / "x.safetensors")
    (tmp_path / "holiday.jpg").write_text("not ours")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.config == {} and checkpoint.side_files() == []


def test_a_lone_adapter_file_opens(tmp_path, state):
    save_file(state, tmp_path / "adapter_model.safetensors")
    assert list(open_checkpoint(tmp_path).tensors) == sorted(state)


def test_bin_is_read_through_the_restricted_loader(tmp_path, state, monkeypatch):
    torch.save(state, tmp_path / "pytorch_model.bin")
    calls = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: calls.append(k) or load(*a, **k))
    checkpoint = open_checkpoint(tmp_path)
    assert all(same(checkpoint.read(name), state[name]) for name in state)
    assert calls and all(call["weights_only"] is True and call["mmap"] is True for call in calls)


def test_bin_of_before_pytorch_1_6_is_read_as_transformers_reads_it(tmp_path):
    """BERT's own checkpoints are such files: pickles one behind the other, in no archive."""
    transformers.logging.disable_progress_bar()
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
    made = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=11, max_position_embeddings=5, **size))
    made.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = made.state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    expected = transformers.BertForMaskedLM.from_pretrained(tmp_path).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(state)
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.read(name), expected[name])
        assert torch.equal(checkpoint.read_span(name, 1, 4), expected[name].flatten()[1:4])
    merged = isomerge.merge([tmp_path, made]).state_dict()
    assert all(torch.equal(merged[name], state[name]) for name in merged)


def test_sharded_bin_reads_through_its_index(tmp_path, state):
    torch.save({"b.weight": state["b.weight"]}, tmp_path / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"b.weight": "pytorch_model-00001-of-00001.bin"}}'
    )
    assert same(open_checkpoint(tmp_path).read("b.weight"), state["b.weight"])


def test_safetensors_is_preferred_over_bin(model_folder, state):
    torch.save({"other": torch.zeros(1)}, model_folder / "pytorch_model.bin")
    assert list(open_checkpoint(model_folder).tensors) == sorted(state)


def test_a_tensor_the_index_forgot_is_read_where_it_lies(sharded_folder, state):
    index = sharded_folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"a.scale": "model-00001-of-00002.safetensors", ', ""))
    assert "a.scale" not in index.read_text()
    assert same(open_checkpoint(sharded_folder).read("a.scale"), state["a.scale"])


def test_side_files_are_everything_but_weights_config_and_stale_copies(model_folder):
    (model_folder / "checkpoint-500").mkdir()
    (model_folder / "checkpoint-500" / "trainer_state.json").write_text("{}")
    names = [p.relative_to(model_folder).as_posix() for p in open_checkpoint(model_folder).side_files()]
    expected = "1_Pooling/config.json LICENSE README.md chat_template.jinja generation_config.json tokenizer.json"
    assert names == expected.split()


def test_weights_of_sentence_transformers_modules_are_side_files(model_folder):
    (model_folder / "2_Dense").mkdir()
    (model_folder / "2_Dense" / "model.safetensors").write_bytes(b"x")
    (model_folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]')
    assert model_folder / "2_Dense" / "model.safetensors" in open_checkpoint(model_folder).side_files()


def test_opening_reads_the_header_and_no_tensor_bytes(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({"big": torch.ones(2**20)}, path)
    read = 0
    opened = Path.open

    class Counting(io.FileIO):
        def readinto(self, buffer):
            nonlocal read
            got = super().readinto(buffer)
            read += got
            return got

    def spy(self, mode="r", *args, **kwargs):
        if self == path:
            return io.BufferedReader(Counting(self), buffer_size=64)
        return opened(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    monkeypatch.setattr(builtins, "open", None)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["big"].nbytes == 4 * 2**20
    assert 0 < read < 1000
    assert checkpoint.read("big").sum() == 2**20


def test_reads_from_many_threads_agree(sharded_folder, state):
    checkpoint = open_checkpoint(sharded_folder)
    names = sorted(state) * 50
    with ThreadPoolExecutor(8) as pool:
        assert all(same(got, state[name]) for name, got in zip(names, pool.map(checkpoint.read, names), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_stored_dtypes_come_back_as_they_are(tmp_path, dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    got = open_checkpoint(tmp_path).read("t")
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_empty_tensors_and_scalars_survive(tmp_path):
    save_file({"none": torch.zeros(0, 3), "one": torch.tensor(2.0)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("none").shape == (0, 3) and checkpoint.read("one").item() == 2.0


def test_state_dict_opens_and_reads_are_copies(state):
    checkpoint = open_checkpoint(state, config={"model_type": "toy"}, name="mine")
    assert list(checkpoint.tensors) == sorted(state) and checkpoint.folder is None
    assert checkpoint.name == "mine" and checkpoint.config == {"model_type": "toy"}
    checkpoint.read("b.weight").zero_()
    assert state["b.weight"].abs().sum() > 0


def test_importing_the_package_imports_no_heavy_library():
    import subprocess
    import sys

    code = (
        "import sys, isomerge.checkpoint; print([m for m in ('transformers', 'huggingface_hub') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_folder_that_cannot_be_listed_is_an_error(model_folder, monkeypatch):
    """Path.rglob passes over it in silence, and a copy of the model would be without its tokenizer."""
    checkpoint = open_checkpoint(model_folder)
    (model_folder / "tokenizer.json").write_text("{}")
    assert model_folder / "tokenizer.json" in checkpoint.side_files()

    def fails(path: object = ".") -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.side_files()
