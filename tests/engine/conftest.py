"""A real Ray cluster: two worker processes on this machine, started once for all tests of the engine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import isomerge

TOKEN = uuid.uuid4().hex
ALONE = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,  # Ray would keep one in the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
os.environ |= ALONE  # now: Ray reads some of them when it is imported


@dataclass(frozen=True)
class Cluster:
    address: str

    def busy(self) -> list[int]:
        """The worker processes of this cluster that compute a unit now."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                ours = TOKEN.encode() in (folder / "environ").read_bytes()
                if ours and (folder / "cmdline").read_bytes().startswith(b"ray::isomerge"):
                    found.append(int(folder.name))
            except OSError:  # it ended meanwhile
                continue
        return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    ray = pytest.importorskip("ray")
    source = str(Path(isomerge.__file__).parents[1])
    before = dict(os.environ)
    os.environ |= {"ISOMERGE_TEST_CLUSTER": TOKEN, "PYTHONPATH": source}
    try:
        ray.init(
            address="local", num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR",
        )  # fmt: skip
        yield Cluster(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ |= before
