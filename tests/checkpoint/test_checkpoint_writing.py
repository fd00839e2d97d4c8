"""What is written is what was planned, in the format others read."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file

from isomerge.checkpoint import TensorInfo, open_checkpoint, refuse_overwrite, write_checkpoint
from isomerge.checkpoint.shards import split_shards
from isomerge.errors import CheckpointError, RequestError


def plan_of(tensors):
    return {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}


def write(out, tensors, **options):
    return write_checkpoint(out, plan_of(tensors), tensors.items(), **options)


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def many():
    """Widths mixed so that plan order alone would leave tensors misaligned."""
    return {
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.float16),
        "ids": torch.arange(7),
        "brain": torch.randn(3).to(torch.bfloat16),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
        "turned": torch.randn(4, 3).T,
        "byte": torch.arange(5, dtype=torch.uint8),
        "float8": torch.randn(3).to(torch.float8_e5m2),
        "complex": torch.randn(2, dtype=torch.complex64),
        "naïve.名": torch.randn(2),
    }


def test_safetensors_reads_back_every_dtype(tmp_path, many):
    written = write(tmp_path / "out", many, config={"model_type": "toy"})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(many)
        for name, tensor in many.items():
            got = file.get_tensor(name)
            assert got.dtype == tensor.dtype and got.shape == tensor.shape, name
            if tensor.numel():
                flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got, tensor)]
                assert torch.equal(*flat), name
    assert written.tensors == len(many) and written.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    checkpoint = open_checkpoint(tmp_path / "out")
    assert dict(checkpoint.tensors) == {name: plan_of(many)[name] for name in sorted(many)}


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path, many):
    write(tmp_path / "out", many)
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        assert entry["data_offsets"][0] % many[name].dtype.itemsize == 0


@pytest.mark.parametrize("shard_size", ["1GB", 30])
def test_same_inputs_same_bytes_and_the_digest_is_of_the_tensors(tmp_path, many, shard_size):
    first, second = (write(tmp_path / n, many, shard_size=shard_size) for n in "xy")
    assert first.sha256 == second.sha256
    assert files_in(tmp_path / "x") == files_in(tmp_path / "y")
    for a, b in zip(first.files, second.files, strict=True):
        assert a.read_bytes() == b.read_bytes()
    raw = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in many.items()}
    lines = "".join(f"{name}  {blake3(raw[name]).hexdigest()}\n" for name in sorted(raw))
    assert first.sha256 == hashlib.sha256(lines.encode()).hexdigest()


def test_shards_have_the_hubs_names_and_an_index(tmp_path, many):
    written = write(tmp_path / "out", many, shard_size=40)
    folder = tmp_path / "out"
    shards = sorted(folder.glob("model-*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors" and len(shards) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in plan_of(many).values())
    assert sorted(index["weight_map"]) == sorted(many)
    loaded = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert torch.equal(loaded["turned"], many["turned"]) and sorted(loaded) == sorted(many)
    assert sorted(written.files) == sorted(p for p in folder.iterdir())


def test_shards_are_cut_where_huggingface_hub_cuts_them():
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = {f"t{i:02d}": torch.zeros(size) for i, size in enumerate([3, 5, 2, 8, 1, 1, 7, 4, 4, 10, 2])}
    theirs = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=40
    )
    ours = split_shards(plan_of(tensors), 40)
    assert {name: list(shard) for name, shard in ours.items()} == theirs.filename_to_tensors


def test_a_tensor_larger_than_a_shard_gets_its_own_without_changing_the_order():
    shards = split_shards({n: TensorInfo((size,), torch.int8) for n, size in [("a", 2), ("b", 99), ("c", 2)]}, 10)
    assert [list(shard) for shard in shards.values()] == [["a"], ["b"], ["c"]]


def test_tensors_are_asked_for_one_at_a_time(tmp_path):
    alive = []

    def produce():
        for name in "abc":
            yield name, torch.ones(4)
            alive.append([p.stat().st_size for p in (tmp_path / "out").rglob("*.safetensors")])

    seen = []
    write_checkpoint(tmp_path / "out", plan_of({n: torch.ones(4) for n in "abc"}), produce(), progress=seen.append)
    assert seen == [16, 16, 16] and len(alive) == 3


def test_side_files_are_copied_and_config_keeps_the_donors_keys_and_order(tmp_path, model_folder, state):
    donor = open_checkpoint(model_folder)
    written = write(tmp_path / "out", state, donor=donor, config={"vocab_size": 9, "zeta": 2})
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert list(config.items()) == [("zeta", 2), ("model_type", "toy"), ("torch_dtype", "float32"), ("vocab_size", 9)]
    for path in donor.side_files():
        assert (out / path.relative_to(model_folder)).read_bytes() == path.read_bytes()
    assert "tf_model.h5" not in files_in(out) and written.files[-1] == out / "config.json"


def test_an_unchanged_config_is_the_donors_bytes(tmp_path, model_folder, state):
    write(tmp_path / "out", state, donor=open_checkpoint(model_folder))
    assert (tmp_path / "out" / "config.json").read_bytes() == (model_folder / "config.json").read_bytes()


def test_a_folder_in_use_is_refused_unless_forced(tmp_path, state):
    out = tmp_path / "out"
    write(out, state, config={"v": 1}, shard_size=8)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="not empty.*set force"):
        write(out, state, config={"v": 2})
    assert json.loads((out / "config.json").read_text()) == {"v": 1}
    write(out, state, config={"v": 2}, force=True)
    assert files_in(out) == ["config.json", "model.safetensors", "notes.txt"]
    assert list(open_checkpoint(out).tensors) == sorted(state)


def test_a_forced_write_leaves_no_adapter_of_what_was_there(tmp_path, state):
    """Wherever peft is installed, transformers would put it on top of the new model."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapters.txt"):
        (out / name).write_text("{}")
    write(out, state, config={"v": 1}, force=True)
    assert files_in(out) == ["adapters.txt", "config.json", "model.safetensors"]


def test_an_empty_folder_may_be_filled_and_a_file_may_not_be_replaced(tmp_path, state):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", state)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="is a file"):
        write(tmp_path / "file", state)


@pytest.mark.parametrize(
    ("produced", "cause"),
    [
        ([("b", torch.zeros(2))], "tensor 'a'.*'b' was produced in its place"),
        ([("a", torch.zeros(3))], r"\(3,\) tensor of torch.float32 .* plan has \(2,\)"),
        ([("a", torch.zeros(2).double())], "float64"),
        ([], "ended before it"),
        ([("a", torch.zeros(2)), ("z", torch.zeros(1))], "'z' was produced but is not in the plan"),
    ],
)
def test_tensors_that_do_not_fit_the_plan_are_refused(tmp_path, produced, cause):
    with pytest.raises(CheckpointError, match=cause):
        write_checkpoint(tmp_path / "out", {"a": TensorInfo((2,), torch.float32)}, produced)
    assert not (tmp_path / "out").exists()


def test_a_plan_without_tensors_and_an_unwritable_dtype_are_refused(tmp_path):
    with pytest.raises(RequestError, match="no tensor"):
        write(tmp_path / "out", {})
    with pytest.raises(CheckpointError, match="no place for torch.complex128"):
        write(tmp_path / "out", {"a": torch.zeros(1, dtype=torch.complex128)})


def test_inputs_are_never_overwritten(tmp_path, model_folder, state):
    link = tmp_path / "link"
    link.symlink_to(model_folder)
    opened = open_checkpoint(model_folder)
    for out in (model_folder, link, model_folder / "merged", model_folder / ".." / "model-a"):
        for source in (opened, model_folder, str(model_folder / "model.safetensors")):
            with pytest.raises(RequestError, match="inputs are never modified"):
                refuse_overwrite(out, [open_checkpoint(state), source])
    refuse_overwrite(tmp_path / "out", [opened, open_checkpoint(state), "org/name"])


def test_a_loose_weight_file_protects_its_folder_but_not_what_lies_below(tmp_path, model_folder):
    loose = tmp_path / "a.safetensors"
    loose.write_bytes((model_folder / "model.safetensors").read_bytes())
    refuse_overwrite(tmp_path / "out", [open_checkpoint(loose)])
    with pytest.raises(RequestError, match="inputs are never modified"):
        refuse_overwrite(tmp_path, [open_checkpoint(loose)])


def test_the_output_loads_in_stock_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))
    source = open_checkpoint(model)
    tensors = ((name, source.read(name)) for name in source.tensors)
    write_checkpoint(tmp_path / "out", source.tensors, tensors, donor=source, shard_size=500)
    again = type(model).from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
