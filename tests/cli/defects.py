"""What can be wrong with a model, or with what lies beside it: each spoils the folder of a model that was sound."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models import model


# --- what can be wrong with the second model --------------------------------------------------------------------------
def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_with_nan(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": float("nan")}))


def config_not_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "x", oops}')


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def only(name: str) -> Callable[[Path], None]:
    def leave(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"GGUF" + bytes(64))

    return leave


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": RunsCode()}, folder / "pytorch_model.bin")


def quantised(method: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "bits": 4}
        (folder / "config.json").write_text(json.dumps(config))
        state = load_file(folder / "model.safetensors")
        dtype = torch.uint8 if method == "bitsandbytes" else torch.int32
        state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(7, 12, dtype=dtype)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return change


def another_family(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(model("bert", 0, torch.float32), folder)


def adapter(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "a", "r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["q_proj"]}))
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    state = {stem + "A.weight": torch.ones(2, 12), stem + "B.weight": torch.ones(16, 2)}
    save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})


def adapter_and_text(folder: Path) -> None:
    adapter(folder)
    Path("x.txt").write_text("some words")


def body(folder: Path) -> None:
    """As the class without a head saves it."""
    from transformers import LlamaModel

    LlamaModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)


def wider(folder: Path) -> None:
    """Twice as wide, as far as one norm tells."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * config["hidden_size"]}))
    with_tensor("model.norm.weight", torch.ones(2 * config["hidden_size"]))(folder)


# --- what can be wrong with the rest ----------------------------------------------------------------------------------
def recipe(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        Path("recipe.yml").write_text(text)

    return write


def written(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        Path(name).write_bytes(content)

    return write


def image_model(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(model("vit", 0, torch.float32), folder)
    Path("rows.csv").write_text("text,label\nthe cat sat,good\n")


def pictures(folder: Path) -> None:
    from PIL import Image

    Path("images/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save("images/cat/1.png")


def classes(folder: Path) -> None:
    from PIL import Image

    image_model(folder)
    for name in ("cat", "dog"):
        Path("images/test", name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(f"images/test/{name}/1.png")


def alone(folder: Path) -> None:
    from PIL import Image

    image_model(folder)
    Path("alone").mkdir()
    Image.new("RGB", (8, 8)).save("alone/1.png")


def link_to(target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.symlink_to(target)

    return link


def with_tensor(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    """One more, or with None one less."""

    def change(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        state.pop(name, None)
        save_file(state | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})
        Path("x.txt").write_text("some words")

    return change


def weights_gone(folder: Path) -> None:
    """As a hub's cache whose files were cleaned away."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/1234")


def occupied(folder: Path) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
