"""Real servers on loopback: an S3 store, and a web server that answers range requests as well or as badly as asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from isomerge.checkpoint import remote_store


class RangeServer:
    """Serves the files of one folder. `asked` records (path, range, bytes sent); `faults` maps a file name to a list of
    what its next answers shall be: a status, 'cut', 'reset', 'slow', 'whole' or 'flood'; 'always …' stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str | None, int]] = []
        self.faults: dict[str, list[Any]] = {}
        self.redirects: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        served = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                served.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.lstrip("/")
        wanted = request.headers.get("Range")
        fault = self._fault(name)
        if name in self.redirects:
            return self._send(request, 302, b"", {"Location": self.redirects[name]})
        if isinstance(fault, int):
            return self._send(request, fault, b"no", {})
        path = self.folder / name
        if not path.is_file():
            return self._send(request, 404, b"no", {})
        data = path.read_bytes()
        tag = {"ETag": self.tags.get(name, f'"{path.stat().st_mtime_ns}-{len(data)}"')}
        if fault == "whole" or wanted is None:
            return self._send(request, 200, data, tag)
        first, last = (int(one) for one in wanted.removeprefix("bytes=").split("-"))
        piece = data[first : last + 1]
        if not piece:
            return self._send(request, 416, b"", {"Content-Range": f"bytes */{len(data)}", **tag})
        span = {"Content-Range": f"bytes {first}-{first + len(piece) - 1}/{len(data)}", **tag}
        self.asked.append((name, wanted, len(piece)))
        self._send(request, 206, piece, span, fault)

    def _fault(self, name: str) -> Any:
        waiting = self.faults.get(name) or [None]
        fault = waiting[0]
        if isinstance(fault, str) and fault.startswith("always "):
            return fault.removeprefix("always ")
        return waiting.pop(0)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], fault: Any = None
    ) -> None:
        request.send_response(status)
        if fault == "flood":
            data = data + b"x" * (1 << 20)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(key, value)
        request.end_headers()
        if fault in ("cut", "reset", "slow"):
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            time.sleep(0.1 if fault == "slow" else 0)
            request.close_connection = True
            request.connection.close()
            return
        request.wfile.write(data)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are made again at once, and nothing goes through a proxy."""
    monkeypatch.setattr(remote_store, "PAUSES", (0.01, 0.01, 0.01))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def web() -> Iterator[Callable[[Path], RangeServer]]:
    servers: list[RangeServer] = []

    def start(folder: Path) -> RangeServer:
        servers.append(RangeServer(folder))
        return servers[-1]

    yield start
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


class Bucket:
    """An S3 bucket, looked into with boto3: another client than the one under test."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name, self.url = client, name, f"s3://{name}"

    def put(self, folder: Path, prefix: str) -> str:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.upload_file(str(path), self.name, f"{prefix}/{path.relative_to(folder).as_posix()}")
        return f"{self.url}/{prefix}"

    def files(self, prefix: str) -> dict[str, bytes]:
        listed = self.client.list_objects_v2(Bucket=self.name, Prefix=f"{prefix}/").get("Contents", [])
        keys = [one["Key"] for one in listed]
        return {
            key.removeprefix(f"{prefix}/"): self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
            for key in keys
        }


@pytest.fixture
def bucket(moto_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bucket:
    import boto3
    import s3fs

    settings = {
        "AWS_ENDPOINT_URL": moto_url,
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()  # one that was made before has other settings
    client = boto3.client("s3")
    name = f"bucket-{abs(hash(request.node.nodeid)):x}"
    client.create_bucket(Bucket=name)
    return Bucket(client, name)
