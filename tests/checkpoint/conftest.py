"""Tiny models and folders, and a fake of the hub's HTTP interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "b.weight": torch.randn(4, 3),
        "a.weight": torch.randn(2, 5).to(torch.bfloat16),
        "a.scale": torch.randn(()),
        "b.mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def model_folder(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    """One shard, a config and side files, with things beside them that must not be copied."""
    folder = tmp_path / "model-a"
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"zeta": 1, "model_type": "toy", "torch_dtype": "float32"}')
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md", "LICENSE"):
        (folder / name).write_text(name)
    for name in ("1_Pooling/config.json", "onnx/model.onnx", "onnx/config.json", ".cache/huggingface/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "tf_model.h5").write_bytes(b"h5")
    return folder


@pytest.fixture
def sharded_folder(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = sorted(state)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


class FakeHub:
    """Serves one folder as org/name; `requests` records (method, path, range)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        wanted = request.headers.get("Range")
        self.requests.append((request.command, request.path, wanted))
        path = request.path.split("?")[0]
        if path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            return self.send(request, 200, json.dumps(self.tree()).encode(), {"Content-Type": "application/json"}, body)
        if path.startswith("/api/models/org/name"):
            revision = path.removeprefix("/api/models/org/name").removeprefix("/revision/")
            if revision not in ("", "main", COMMIT):
                return self.fail(request, "RevisionNotFound")
            files = sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())
            listing = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self.send(request, 200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, body)
        parts = path.split("/", 5)
        if path.startswith("/org/name/resolve/") and (self.folder / parts[5]).is_file():
            data = (self.folder / parts[5]).read_bytes()
            headers = {"ETag": f'"{abs(hash(data)):x}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if not wanted:
                return self.send(request, 200, data, headers, body)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            piece = data[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}"
            return self.send(request, 206, piece, headers, body)
        self.fail(request, "EntryNotFound" if path.startswith("/org/name") else "RepoNotFound")

    def tree(self) -> list[dict[str, Any]]:
        """Every file and folder, as the hub lists them."""
        listed: list[dict[str, Any]] = []
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            size = path.stat().st_size if path.is_file() else 0
            kind = "file" if path.is_file() else "directory"
            listed.append({"type": kind, "path": name, "size": size, "oid": f"{abs(hash(name)):040x}"[:40]})
        return listed

    def fail(self, request: BaseHTTPRequestHandler, code: str) -> None:
        self.send(request, 404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, body=False)

    @staticmethod
    def send(request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(data)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, and no way to the real hub."""
    from huggingface_hub import constants

    cache = tmp_path / "hub-cache"
    cache.mkdir()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return cache


@pytest.fixture
def serve(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], FakeHub]]:
    from huggingface_hub import constants

    hubs: list[FakeHub] = []

    def start(folder: Path) -> FakeHub:
        hub = FakeHub(folder)
        hubs.append(hub)
        threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return hub

    yield start
    for hub in hubs:
        hub.server.shutdown()
        hub.server.server_close()
