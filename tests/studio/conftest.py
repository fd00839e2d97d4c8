"""The page's addresses asked without a browser, in a folder with tiny models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from isomerge.studio.app import application
from isomerge.studio.jobs import Jobs
from models import model, noisy

TOKEN, PORT = "the-token", 8123


@dataclass
class Studio:
    client: TestClient
    folder: Path
    jobs: Jobs

    def get(self, action: str) -> dict[str, Any]:
        return self.client.get(f"/{TOKEN}/api/{action}").json()

    def post(self, action: str, **given: Any) -> dict[str, Any]:
        answer = self.client.post(f"/{TOKEN}/api/{action}", json=given)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, action: str, **given: Any) -> str:
        answer = self.client.post(f"/{TOKEN}/api/{action}", json=given)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    """A page over `work`, which has the models `a`, `b` and `deep/c`; `secret.yml` lies beside it."""
    folder = tmp_path / "work"
    first = model("llama", 0, torch.float32)
    shutil.copytree(first, folder / "a")
    shutil.copytree(noisy(first, 0.05), folder / "b")
    shutil.copytree(model("bert", 0, torch.float32), folder / "deep" / "c")
    (tmp_path / "secret.yml").write_text("merge_method: linear\n")
    monkeypatch.chdir(folder)
    jobs = Jobs(folder)
    client = TestClient(application(folder, TOKEN, PORT, jobs), base_url=f"http://127.0.0.1:{PORT}")
    yield Studio(client, folder, jobs)
    jobs.close()
