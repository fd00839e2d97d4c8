"""Join a Ray cluster, or start one of this machine's processors for as long as this process runs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

from isomerge.errors import RequestError
from isomerge.packages import why_not_imported
from isomerge.threads import thread_count

WAIT = 10.0
"""Seconds after which an address counts as unreachable."""
OBJECTS = 2**30
"""Bytes of shared memory of a local cluster. It holds plans, not weights; Ray writes what is more to the disk."""
_joined: set[str] = set()
"""How the cluster was called when this process joined it: Ray knows it by the number of its network card."""


def connect(address: str | None) -> Any:
    """The module `ray`, connected. A connection stays until the process ends, and one that is there is used."""
    # Nothing about a run leaves the machine; and a task that asks for no GPU may see all, as threads do.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise RequestError(
            f"Computing on Ray: {why_not_imported('ray', error)}.", keys=("engine",), module="ray"
        ) from error
    address = address or os.environ.get("RAY_ADDRESS")
    if not ray.is_initialized():
        _join(ray, address)
    elif address not in (None, "auto", "local", *_joined, here := ray.get_runtime_context().gcs_address):
        raise RequestError(
            f"Computing on Ray: this process is connected to {here}, and address is {address}. Use one cluster in one "
            "process.",
            keys=("address",),
        )
    return ray


def _join(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None or address == "local":
        ray.init(
            address="local", num_cpus=thread_count(None), object_store_memory=OBJECTS, include_dashboard=False, **quiet
        )
        return
    if address != "auto":
        _require_reachable(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        cause = " ".join(line.strip() for line in told[:4])
        raise RequestError(
            f"Joining the Ray cluster at {address}: {cause}. Start it with 'ray start', with the same Ray, "
            "Python and RAY_AUTH_TOKEN everywhere, and run this on one of its machines.",
            keys=("address",),
        ) from error
    _joined.clear()
    _joined.add(address)


def _require_reachable(address: str) -> None:
    """Ray itself waits for minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise RequestError(
            f"address cannot be '{address}'. Name the head node as HOST:PORT (as printed by 'ray start'), and "
            "run isomerge on a machine of the cluster.",
            keys=("address",),
        )
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT)):
            pass
    except OSError as error:
        raise RequestError(
            f"Joining the Ray cluster at {address}: nothing answers there ({error}). Check that the head node runs "
            "('ray status' on it) and that its port is open.",
            keys=("address",),
        ) from error
