"""The lock file: its hashes are those of the bytes, its text is stable, its errors say what to do."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest
import torch
from safetensors.torch import save_file

from isomerge.checkpoint import hashing, open_checkpoint
from isomerge.checkpoint.hashing import hash_tensors, tensors_digest
from isomerge.checkpoint.lock import Lock, LockedTensor, read_lock
from isomerge.errors import CheckpointError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "bert", "vit"])
def test_hashes_are_those_of_the_stored_bytes(kind, save, tools):
    folder = save(kind, sharded=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert hash_tensors(open_checkpoint(folder), threads=3) == tools.true_hashes(folder)


def test_every_dtype_and_shape_is_hashed_as_stored(tmp_path, tools):
    torch.manual_seed(0)
    state = {f"t.{i}": (torch.randn(5, 3, 2) * 9).to(dtype) for i, dtype in enumerate(DTYPES)}
    state |= {"scalar": torch.tensor(3.5), "row": torch.arange(7.0), "empty": torch.zeros(0, 4)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert hash_tensors(open_checkpoint(tmp_path), threads=2) == tools.true_hashes(tmp_path)


def test_blocks_give_the_hash_of_the_whole(tmp_path, tools, monkeypatch):
    save_file({"w": torch.randn(37, 5, 3), "v": torch.randn(101)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(hashing, "BLOCK", 256)  # 4 rows of w, the last block shorter
    assert hash_tensors(open_checkpoint(tmp_path), threads=1) == tools.true_hashes(tmp_path)


def test_no_more_than_a_block_per_thread_is_read_at_once(tmp_path, monkeypatch):
    save_file({f"w{i}": torch.randn(64, 32) for i in range(6)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(hashing, "BLOCK", 1024)
    checkpoint = open_checkpoint(tmp_path)
    sizes, threads = [], set()
    read_rows = checkpoint.read_rows

    def watched(name, start, stop):
        rows = read_rows(name, start, stop)
        sizes.append(rows.nbytes)
        threads.add(threading.get_ident())
        return rows

    monkeypatch.setattr(checkpoint, "read_rows", watched)
    hash_tensors(checkpoint, threads=3)
    assert max(sizes) <= 1024 and sum(sizes) == 6 * 64 * 32 * 4
    assert threading.get_ident() not in threads


def test_progress_ends_at_the_total(save):
    told = []
    checkpoint = open_checkpoint(save("llama"))
    hash_tensors(checkpoint, threads=2, progress=lambda done, total, what: told.append((done, total, what)))
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert told[-1] == (total, total, "hashing out")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_only_the_tensors_asked_for_are_hashed(save, tools):
    folder = save("bert")
    wanted = sorted(tools.true_hashes(folder))[:2]
    assert list(hash_tensors(open_checkpoint(folder), wanted, threads=1)) == wanted
    with pytest.raises(CheckpointError, match="no such tensor"):
        hash_tensors(open_checkpoint(folder), ["nobody"], threads=1)


def test_the_digest_is_the_sha256_of_a_listing_and_knows_no_shards(save, tools):
    one, many = save("llama", "one"), save("llama", "many", sharded=True)
    listing = "".join(f"{name}  {value}\n" for name, value in sorted(tools.true_hashes(one).items()))
    assert tools.lock(one).sha256 == hashlib.sha256(listing.encode()).hexdigest() == tools.lock(many).sha256


def test_the_text_is_the_same_every_time_and_comes_back(save, tools):
    folder, parent = save("gpt2"), save("gpt2", "parent", seed=1)
    lock = tools.lock(folder, (parent,), recipe="models:\n- 'a [ 1, 2 ]'\n")
    text = (folder / "isomerge.lock.json").read_text()
    backwards = Lock(**{**vars(lock), "tensors": dict(reversed(lock.tensors.items()))})
    assert text == lock.to_json() == backwards.to_json()
    assert read_lock(folder) == lock
    record = json.loads(text)
    assert record["recipe"] == "models:\n- 'a [ 1, 2 ]'\n" and record["seed"] == 3
    assert record["output"]["sha256"] == lock.sha256
    entry = record["inputs"][0]
    assert entry["reference"] == str(parent) and entry["revision"] is None and entry["kind"] == "model"
    assert entry["config_sha256"] == hashlib.sha256((parent / "config.json").read_bytes()).hexdigest()
    assert entry["tensors"]["transformer.wte.weight"]["shape"] == [32, 16]
    assert record["versions"]["torch"] == torch.__version__
    assert '"shape": [32, 16]' in text, "a shape stays on one line"


def test_an_adapter_is_locked_with_its_own_config(tmp_path):
    from isomerge.checkpoint.lock import locked_input

    save_file({"lora_A.weight": torch.ones(2, 3)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    checkpoint = open_checkpoint(tmp_path)
    entry = locked_input("adapter", checkpoint, hash_tensors(checkpoint, threads=1))
    assert entry.kind == "adapter"
    assert entry.config_sha256 == hashlib.sha256(b'{"r": 2}').hexdigest()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "cut off or not JSON"),
        (lambda text: text.replace('"format": 2', '"format": 3'), r"format 3 .* up to 2\. Install a newer isomerge"),
        (lambda text: text.replace('"blake3"', '"crc32"'), r"not a lock file.*tensor_hash"),
        (lambda text: text.replace(' "recipe": "r",\n', ""), r"not a lock file.*'recipe' is missing"),
        (lambda text: text.replace('"seed"', '"sed": 1, "seed"'), r"unknown entry 'sed'. Did you mean 'seed'\?"),
        (lambda text: text.replace("ab" * 32, "cd" * 32, 1), "edited or damaged"),
        (lambda text: "[]", "not a lock file"),
    ],
)
def test_a_spoiled_lock_says_what_is_wrong(tmp_path, spoil, message):
    lock = Lock(recipe="r", inputs=(), tensors={"w": LockedTensor("ab" * 32, (2,), "float32")})
    (tmp_path / "isomerge.lock.json").write_text(spoil(lock.to_json()))
    with pytest.raises(CheckpointError, match=message):
        read_lock(tmp_path)


def test_a_missing_lock_says_how_to_get_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"no isomerge\.lock\.json.*lock=True"):
        read_lock(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_lock(tmp_path / "nowhere")


def test_the_digest_sorts_by_name():
    assert tensors_digest({"b": "1", "a": "2"}) == tensors_digest({"a": "2", "b": "1"}) != tensors_digest({"a": "1"})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record.update(seed={}),
        lambda record: record.update(seed=10**30),
        lambda record: record.update(versions=[]),
        lambda record: record.update(inputs={"a": 1}),
        lambda record: record.update(inputs=[[]]),
        lambda record: record.update(documents=None),
        lambda record: record.update(options={"torch_threads": 0}),
        lambda record: record.update(options={"data": [{"path": 3}]}),
        lambda record: record["output"].update(side_files=[1]),
        lambda record: record["output"]["tensors"].update(w=[]),
        lambda record: record["output"]["tensors"]["w"].update(shape=3),
        lambda record: record["output"]["tensors"]["w"].update(hash=["ab"]),
        lambda record: record["output"]["tensors"]["w"].update(more=1),
        lambda record: record.pop("output"),
    ],
)
def test_no_lock_file_breaks_the_reader(tmp_path, spoil):
    lock = Lock(recipe="r", inputs=(), tensors={"w": LockedTensor("ab" * 32, (2,), "float32")})
    record = json.loads(lock.to_json())
    spoil(record)
    (tmp_path / "isomerge.lock.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="not a lock file of isomerge"):
        read_lock(tmp_path)


def test_a_lock_file_of_brackets_is_refused(tmp_path):
    (tmp_path / "isomerge.lock.json").write_text('{"recipe":' * 100_000)
    with pytest.raises(CheckpointError, match=r"isomerge\.lock\.json: it is cut off or not JSON"):
        read_lock(tmp_path)
