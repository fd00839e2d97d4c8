"""Hub ids: headers first, weights on the first read, the cache when there is no network."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # what the fake hub calls its only commit


def whole_downloads(hub) -> list[str]:
    """Files fetched in full, by name."""
    return [
        path.split("/")[-1]
        for method, path, piece in hub.requests
        if method == "GET" and "/resolve/" in path and not piece
    ]


def put_in_cache(folder, cache, *, leave_out=()):
    """The cache's layout by hand: blobs, a snapshot of links into them, and the ref that says what main is."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    for part in (snapshot, repo / "blobs", repo / "refs"):
        part.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file() and p.name not in leave_out)):
        shutil.copy(path, repo / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture
def offline(hub_cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return hub_cache


def test_opening_fetches_headers_and_no_weights(serve, model_folder, state):
    hub = serve(model_folder)
    checkpoint = open_checkpoint("org/name")
    assert list(checkpoint.tensors) == sorted(state)
    assert checkpoint.config["model_type"] == "toy"
    assert checkpoint.revision == COMMIT and checkpoint.name == "org/name"
    assert "model.safetensors" not in whole_downloads(hub)
    assert any(piece for _, path, piece in hub.requests if path.endswith("model.safetensors"))


def test_the_first_read_downloads_only_the_shard_it_needs(serve, sharded_folder, state):
    hub = serve(sharded_folder)
    checkpoint = open_checkpoint("org/name", revision="main")
    assert torch.equal(checkpoint.read("a.weight"), state["a.weight"])
    assert [name for name in whole_downloads(hub) if "safetensors" in name and "index" not in name] == [
        "model-00001-of-00002.safetensors"
    ]


def test_threads_share_one_download(serve, model_folder, state):
    hub = serve(model_folder)
    checkpoint = open_checkpoint("org/name")
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(checkpoint.read, sorted(state)))
    assert all(torch.equal(a, state[name]) for a, name in zip(got, sorted(state), strict=True))
    assert whole_downloads(hub).count("model.safetensors") == 1


def test_side_files_come_from_the_repository(serve, model_folder):
    serve(model_folder)
    checkpoint = open_checkpoint("org/name")
    local = open_checkpoint(model_folder)
    names = [p.relative_to(checkpoint.folder).as_posix() for p in checkpoint.side_files()]
    assert names == [p.relative_to(model_folder).as_posix() for p in local.side_files()]
    assert all(p.is_file() for p in checkpoint.side_files())


def test_what_was_read_online_opens_offline(serve, model_folder, state, monkeypatch):
    from huggingface_hub import constants

    hub = serve(model_folder)
    open_checkpoint("org/name").read("a.weight")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.revision == COMMIT and torch.equal(checkpoint.read("b.weight"), state["b.weight"])
    assert hub.requests == []


def test_offline_cache_made_of_links_opens(offline, sharded_folder, state):
    snapshot = put_in_cache(sharded_folder, offline)
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.folder == snapshot and checkpoint.revision == COMMIT
    assert all(torch.equal(checkpoint.read(name), state[name]) for name in state)


def test_an_unreachable_hub_falls_back_to_the_cache(hub_cache, model_folder, state):
    put_in_cache(model_folder, hub_cache)
    assert list(open_checkpoint("org/name").tensors) == sorted(state)


def test_a_half_cached_model_says_how_to_complete_it(offline, sharded_folder):
    put_in_cache(sharded_folder, offline, leave_out=("model-00002-of-00002.safetensors",))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.*hf download org/name"):
        open_checkpoint("org/name")


def test_offline_and_not_cached_says_how_to_fix_it(offline):
    with pytest.raises(
        CheckpointError, match=r"HF_HUB_OFFLINE.*not in the local cache.*hf download org/name --revision v2"
    ):
        open_checkpoint("org/name", revision="v2")


def test_an_unknown_repository_may_be_a_mistyped_path(serve, model_folder, monkeypatch):
    serve(model_folder)
    monkeypatch.chdir(model_folder.parent.parent)
    typo = f"{model_folder.parent.name}/model_a"
    with pytest.raises(CheckpointError, match=r"no such public model.*Did you mean 'model-a'\?"):
        open_checkpoint(typo)


def test_an_unknown_revision_says_so(serve, model_folder):
    serve(model_folder)
    with pytest.raises(CheckpointError, match="no such branch, tag or commit"):
        open_checkpoint("org/name", revision="v9")


def test_an_index_on_the_hub_cannot_leave_the_folder_either(serve, sharded_folder):
    (sharded_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    serve(sharded_folder)
    with pytest.raises(CheckpointError, match="points outside the folder"):
        open_checkpoint("org/name")


def test_missing_and_corrupt_remote_shards_are_listed_together(serve, sharded_folder):
    (sharded_folder / "model-00001-of-00002.safetensors").unlink()
    (sharded_folder / "model-00002-of-00002.safetensors").write_bytes((3).to_bytes(8, "little") + b"{{{")
    serve(sharded_folder)
    with pytest.raises(CheckpointError, match=r"2 problems.*00001.*not in the repository.*00002.*header is corrupt"):
        open_checkpoint("org/name")


def test_a_repository_of_pickles_is_downloaded_to_be_opened(serve, tmp_path, state):
    folder = tmp_path / "pickled"
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    serve(folder)
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.revision == COMMIT and torch.equal(checkpoint.read("b.weight"), state["b.weight"])


def test_a_repository_without_weights_says_so(serve, tmp_path):
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "README.md").write_text("soon")
    serve(folder)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_checkpoint("org/name")


def test_an_hf_address_streams_at_a_commit_and_downloads_nothing(serve, hub_cache, model_folder, state):
    hub = serve(model_folder)
    checkpoint = open_checkpoint("hf://org/name")
    assert checkpoint.name == "hf://org/name" and checkpoint.revision == COMMIT
    assert all(torch.equal(checkpoint.read(name), state[name]) for name in state)
    assert {path for _, path, _ in hub.requests if "/resolve/main/" in path} == set()  # a branch may move
    assert "model.safetensors" not in whole_downloads(hub) and not list(hub_cache.iterdir())
    local = open_checkpoint(model_folder)
    names = [p.relative_to(checkpoint.folder).as_posix() for p in checkpoint.side_files()]
    assert names == [p.relative_to(model_folder).as_posix() for p in local.side_files()]


@pytest.mark.parametrize("address", ["hf://org/name@v9", "hf://org/other"])
def test_an_hf_address_of_nothing_says_so(serve, model_folder, address):
    serve(model_folder)
    with pytest.raises(CheckpointError, match=f"opening checkpoint {address}.*no such"):
        open_checkpoint(address)
