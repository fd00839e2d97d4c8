"""GGUF files open as the models they were made from. The truth: the stock models, the gguf package's reader, and
transformers' own loader."""

from __future__ import annotations

import copy
import pickle
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file

import isomerge
from gguf_files import KINDS, paired, write_gguf
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.formats.gguf_open import GgufDecoder
from isomerge.errors import CheckpointError, IsomergeError
from isomerge.running.stock import load_stock

IDS = torch.arange(3, 43).reshape(2, 20)
SEMI = ["qwen2_moe", "qwen3_moe"]


def loaded(path: Path):
    checkpoint = open_checkpoint(path)
    state = {name: checkpoint.read(name) for name in checkpoint.tensors}
    return checkpoint, load_stock(checkpoint.config, state, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_float32_is_the_stock_model(kind: str, tmp_path: Path) -> None:
    model = write_gguf(kind, tmp_path / "m.gguf")
    checkpoint, made = loaded(tmp_path / "m.gguf")
    truth = load_file(tmp_path / "m" / "model.safetensors")
    assert set(checkpoint.tensors) == set(truth)
    shifted = kind.startswith("gemma")
    for name, tensor in truth.items():  # 1 + w is rounded by whoever writes the file
        expected = (tensor + 1) - 1 if shifted and name.endswith("norm.weight") else tensor
        assert torch.equal(checkpoint.read(name), expected), name
    with torch.no_grad():
        assert torch.allclose(made(IDS).logits, model(IDS).logits, atol=2e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*SEMI, "mixtral", "mistral")])
def test_the_config_is_that_of_the_stock_model(kind: str, tmp_path: Path) -> None:
    model = write_gguf(kind, tmp_path / "m.gguf")
    config = type(model.config).from_dict(open_checkpoint(tmp_path / "m.gguf").config).to_dict()
    given = model.config.to_dict()
    free = {"dtype", "transformers_version", "architectures", "_name_or_path", "model_type"}
    for key in given.keys() - free:
        if key in ("rms_norm_eps",):  # stored as float32
            assert config[key] == pytest.approx(given[key])
        else:
            assert config.get(key) == given[key], key


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "phi3"])
def test_transformers_loads_the_same_from_the_same_file(kind: str, tmp_path: Path) -> None:
    write_gguf(
        kind, tmp_path / "m.gguf", qtype=Q.Q8_0, **({"head_dim": 128} if kind == "qwen3" else {})
    )  # its only one
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    state = theirs.state_dict()
    for name, info in checkpoint.tensors.items():
        rows = checkpoint.read_rows(name, 0, info.shape[0])
        assert torch.equal(rows.float(), state[name]), name


RAW = [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.IQ2_XXS, Q.IQ3_S, Q.IQ1_S, Q.IQ1_M]
PLAIN = [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.TQ1_0, Q.TQ2_0, Q.MXFP4]


@pytest.mark.parametrize("qtype", PLAIN + RAW, ids=lambda kind: kind.name)
def test_every_quantisation_is_read_as_the_package_reads_it(qtype: Q, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, qtype=qtype, raw=qtype in RAW, head_dim=64)
    checkpoint = open_checkpoint(path)
    truth = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    name = "model.layers.1.mlp.down_proj.weight"
    expected = torch.from_numpy(truth["blk.1.ffn_down.weight"])
    assert torch.equal(checkpoint.read_rows(name, 0, 256).float(), expected)
    assert torch.equal(checkpoint.read_rows(name, 37, 61).float(), expected[37:61])
    assert torch.equal(checkpoint.read(name), expected.to(checkpoint.tensors[name].dtype))
    dtype = checkpoint.tensors[name].dtype
    assert torch.equal(checkpoint.read_span(name, 1000, 5001), expected.reshape(-1)[1000:5001].to(dtype))


def test_blocks_of_query_rows_put_rotary_pairs_back(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "m.gguf", qtype=Q.Q4_0)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = checkpoint.read_rows(name, 0, 128)
    assert np.array_equal(paired(whole.numpy(), 4), stored["blk.0.attn_q.weight"])
    assert not np.array_equal(whole.numpy(), stored["blk.0.attn_q.weight"])  # or the order would not matter
    for start, stop in [(0, 1), (5, 70), (31, 33), (120, 128)]:
        assert torch.equal(checkpoint.read_rows(name, start, stop), whole[start:stop])


def test_a_tensor_is_never_dequantised_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        write_gguf("llama", tmp_path / f"{seed}.gguf", seed=seed, qtype=Q.Q8_0, intermediate_size=8192)
    sizes = []
    rows = GgufDecoder.rows

    def counted(self, stored, start, stop):
        found = rows(self, stored, start, stop)
        sizes.append((found.numel(), found.numel() if self.info.shape == () else torch.Size(self.info.shape).numel()))
        return found

    monkeypatch.setattr(GgufDecoder, "rows", counted)
    merged = isomerge.merge([tmp_path / "0.gguf", tmp_path / "1.gguf"])
    merged.save(tmp_path / "out")
    assert any(whole > part for part, whole in sizes)
    assert max(part for part, _ in sizes) <= 2**21


def test_two_files_merge_as_their_dequantised_models(tmp_path: Path) -> None:
    means = []
    for seed in (0, 1):
        write_gguf("llama", tmp_path / f"{seed}.gguf", seed=seed, qtype=Q.Q8_0)
    for name in ("0.gguf", "1.gguf"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=name, dtype=torch.float32)
        means.append(theirs.state_dict())
    merged = isomerge.merge([tmp_path / "0.gguf", tmp_path / "1.gguf"])
    assert any("GGUF" in note and "Q8_0" in note for note in merged.notes)
    written = merged.save(tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, ((means[0][name] + means[1][name]) / 2).to(tensor.dtype)), name
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"
    assert isomerge.verify(tmp_path / "out").verdict != "bad"
    assert isomerge.reproduce(written).verdict == "identical"


def test_a_folder_with_one_file_and_a_split_file_open(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    write_gguf("qwen2", tmp_path / "home" / "m.gguf")
    whole = open_checkpoint(tmp_path / "home" / "m.gguf")
    assert open_checkpoint(tmp_path / "home").tensors == whole.tensors
    reader = gguf.GGUFReader(tmp_path / "home" / "m.gguf")
    (tmp_path / "parts").mkdir()
    half = len(reader.tensors) // 2
    for part, tensors in enumerate((reader.tensors[:half], reader.tensors[half:]), start=1):
        writer = gguf.GGUFWriter(tmp_path / "parts" / f"m-{part:05d}-of-00002.gguf", "qwen2")
        if part == 1:
            for key, field in reader.fields.items():
                if key.startswith("qwen2."):
                    kind = field.types[0]
                    writer.add_key_value(key, field.contents(), kind)
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for source in (tmp_path / "parts", tmp_path / "parts" / "m-00002-of-00002.gguf"):
        split = open_checkpoint(source)
        assert all(torch.equal(split.read(name), whole.read(name)) for name in whole.tensors)
    (tmp_path / "parts" / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="'m-00002-of-00002.gguf' is not beside it"):
        open_checkpoint(tmp_path / "parts" / "m-00001-of-00002.gguf")


def test_a_checkpoint_survives_pickling_and_copying(tmp_path: Path) -> None:
    write_gguf("qwen2", tmp_path / "m.gguf", qtype=Q.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert (checkpoint.folder / "config.json").is_file()
    for again in (pickle.loads(pickle.dumps(checkpoint)), copy.copy(checkpoint)):
        assert torch.equal(again.read("model.norm.weight"), checkpoint.read("model.norm.weight"))
        assert again.identity() == checkpoint.identity() is not None


# --- rotary positions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_frequencies_are_read_as_the_scaling_they_are_of(factor: float, tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (5e5 ** (torch.arange(0, 128, 2).double() / 128))
    from isomerge.checkpoint.formats.gguf_families import FAMILIES
    from isomerge.checkpoint.formats.gguf_rotary import FREQUENCIES, rotary_read, rotary_written

    stored = (plain / scaled).numpy()
    read = rotary_read(FAMILIES[0], {"llama.rope.freq_base": 5e5}, {FREQUENCIES: stored}.get, 128)
    assert read == {**rope, "factor": pytest.approx(factor)}
    said, tensors = rotary_written(FAMILIES[0], {"max_position_embeddings": 9, "rope_parameters": rope}, 128, "x")
    assert np.allclose(tensors[FREQUENCIES], stored, rtol=1e-5)
    assert said["freq_base"] == 5e5
    with pytest.raises(ValueError, match="cannot say"):
        rotary_read(FAMILIES[0], {"llama.rope.freq_base": 5e5}, {FREQUENCIES: stored * 1.01}.get, 128)


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    write_gguf("llama", path, qtype=Q.Q8_0, hidden_size=64, intermediate_size=32, vocab_size=40)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda b: b[:10], "does not begin"),
        (lambda b: b"GGML" + b[4:], "does not begin"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "other byte order"),
        (lambda b: b[:8] + struct.pack("<Q", 2**60) + b[16:], "counts 1,152,921,504,606,846,976 tensors"),
        (lambda b: b[:16] + struct.pack("<Q", 2**60) + b[24:], "metadata entries"),
        (lambda b: b[:24] + struct.pack("<Q", 2**62) + b[32:], "truncated inside the header"),
        (lambda b: b[:300], "truncated|counts"),
        (lambda b: b[:-4000], "truncated"),
        (lambda b: b.replace(b"attention.head_count\x04", b"attention.head_kount\x04"), "no 'llama.attention.head"),
        (lambda b: b.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_oops.weig"), "no tensor for"),
    ],
)  # fmt: skip
def test_a_damaged_file_says_what_is_wrong(damage, said: str, good: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(damage(good))
    with pytest.raises(CheckpointError, match=said) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)


def test_other_architectures_are_refused_with_those_that_are_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bloom")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'bloom'.*llama, qwen2.*Use the safetensors model"):
        open_checkpoint(tmp_path / "m.gguf")


def test_onnx_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(IsomergeError, match=r"ONNX is not read or written.*export"):
        open_checkpoint(tmp_path / "model.onnx")
