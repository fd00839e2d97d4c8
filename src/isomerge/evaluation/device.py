"""Is the device there?"""

from __future__ import annotations

import torch

from isomerge.errors import RequestError


def require_device(device: str) -> None:
    """Raise, before any work, when this machine has no such device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        if device.partition(":")[0] not in ("cpu", "cuda", "mps", "xpu"):
            cause = "devices are cpu, cuda (NVIDIA, AMD), mps (Apple) and xpu (Intel)"
        raise RequestError(f"Working on device '{device}': {cause}. Use cpu, or a device this machine has.") from error
