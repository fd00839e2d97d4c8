"""Is the device there?"""

from __future__ import annotations

import torch

from isomerge.errors import RequestError


def require_device(device: str) -> None:
    """Raise, before any work, when this machine has no such device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0]
        raise RequestError(f"Working on device '{device}': {cause}. Use cpu, or a device this machine has.") from error
