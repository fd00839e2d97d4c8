"""Write an adapter folder that PEFT loads, complete or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from isomerge import system
from isomerge.adapters.adapter import CONFIG, PREFIX, WEIGHTS
from isomerge.checkpoint import Checkpoint, TensorInfo, Written
from isomerge.checkpoint.hashing import raw_bytes
from isomerge.checkpoint.header import build_header
from isomerge.checkpoint.permissions import closed_by
from isomerge.checkpoint.staging import Staging, check_space, disk_failure


def lora_config(ranks: Mapping[str, int], targets: list[str], about: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter_config.json in which every scale is one: α is the rank of each layer. `about` adds to it."""
    top = max(ranks.values(), default=1)
    # Anchored at the front: 'lm_head' must not also mean 'decoder.lm_head'.
    other = {"^" + re.escape(module): rank for module, rank in sorted(ranks.items()) if rank != top}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "revision": None,
        "inference_mode": True,
        "r": top,
        "lora_alpha": top,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": sorted(targets),
        "rank_pattern": other,
        "alpha_pattern": dict(other),
        **about,
    }


def write_adapter(
    out: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    force: bool = False,
    inputs: Iterable[Checkpoint] = (),
) -> Written:
    """Write the tensors (named without PEFT's prefix) and the config, which is renamed to its place last."""
    out = Path(out).expanduser()
    named = {PREFIX + name: tensor for name, tensor in sorted(tensors.items())}
    header, starts = build_header({name: TensorInfo.of(tensor) for name, tensor in named.items()})
    text = (json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    weight_bytes = len(header) + sum(TensorInfo.of(tensor).nbytes for tensor in named.values())
    check_space(out, weight_bytes + len(text))
    digest = hashlib.sha256()
    try:
        with Staging(out, force=force, closed=closed_by(inputs)) as staging:
            with staging.create(WEIGHTS[0]) as file:
                file.write(header)
                digest.update(header)
                for name in starts:
                    data = raw_bytes(named[name])
                    file.write(data)
                    digest.update(data)
                system.sync(file)
            with staging.create(CONFIG) as file:
                file.write(text)
                system.sync(file)
            staging.commit(last=CONFIG)
    except OSError as error:
        raise disk_failure(out, weight_bytes + len(text), error) from error
    return Written(out, (out / WEIGHTS[0], out / CONFIG), len(named), weight_bytes, digest.hexdigest())
