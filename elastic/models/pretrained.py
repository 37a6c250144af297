"""Weights that somebody else has trained, from the ``*.safetensors`` of a folder, as the Hugging Face hub and
an export have them.

A model is built without memory, and ``init_weights()`` gives it values.  So that is where weights are read:
tensor by tensor, by each worker that initialises, and only when a run begins.  The folder must be there on
every node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

Rename = Callable[[str], str]
"""Returns the name in the files of a parameter or buffer of the model; "" if it is not in the files."""


def same(name: str) -> str:
    return name


@cache
def _files(folder: str) -> Mapping[str, Path]:
    """Maps each tensor of the folder to its file.  Raises ValueError if there is none."""
    found: dict[str, Path] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise ValueError(
            f"{folder!r} has no *.safetensors files, so there are no weights to read; download the "
            "model to every node (`hf download <repository> --local-dir <folder>`), and set path to "
            "its folder"
        )
    return found


def check_weights(model: nn.Module, folder: str, rename: Rename = same) -> None:
    """Raises ValueError, naming a tensor, unless the files have every parameter of the model in its shape.
    It reads headers only.
    """
    files = _files(folder)
    for name, parameter in model.named_parameters():
        if not (there := rename(name)):
            continue
        if there not in files:
            raise ValueError(
                f"the files in {folder!r} have no {there!r}, which the model needs; they have "
                f"{', '.join(sorted(files)[:4])}, …"
            )
        with safe_open(files[there], "pt") as file:
            shape = file.get_slice(there).get_shape()
        if shape != [*parameter.shape]:
            raise ValueError(
                f"{there!r} has the shape {shape} in {folder!r}, and {[*parameter.shape]} in the model; use "
                "the config of that folder"
            )


@torch.no_grad()
def load_weights(model: nn.Module, folder: str, rename: Rename = same) -> None:
    """Sets the parameters, and those buffers that are in the files, to what the files have.  The number
    format stays that of the model.
    """
    files = _files(folder)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if (there := rename(name)) in files:
            with safe_open(files[there], "pt") as file:
                tensor.copy_(file.get_tensor(there))
