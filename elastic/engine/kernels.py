"""Chooses the kernels by which a model attends and computes its loss."""

from __future__ import annotations

import torch
from torch import nn

from elastic.code.imports import failure
from elastic.engine.loss_scale import is_scaled
from elastic.errors import JobError
from elastic.job import Job
from elastic.kernels.attention import PACKAGE, Kernel, open_flash_4


def apply_kernels(model: nn.Module, device: torch.device, job: Job) -> None:
    """Sets how ``model`` attends and computes its loss, if it lets the engine choose (as
    :class:`elastic.models.llama.Llama` does).
    """
    flex = Kernel.FLEX if job.compile and device.type == "cuda" and not has_dropout(model) else Kernel.TORCH
    plain = flex if job.reproducible else Kernel.TORCH
    if job.attention == "flash-4" and device.type == "cuda":
        plain = Kernel.FLASH_4
    fuses = not is_scaled(job.precision)  # the fused loss computes its gradient before it knows the scale
    for name, value in {"fuses_loss": fuses, "attends": plain, "attends_in_documents": flex}.items():
        if hasattr(model, name):
            setattr(model, name, value)


def has_dropout(model: nn.Module) -> bool:
    """Returns whether any layer of the model drops values."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def open_kernels(model: nn.Module) -> None:
    """Imports the package of the kernel by which ``model`` attends, if there is one.  Raises
    :class:`JobError` if that fails.
    """
    if getattr(model, "attends", None) is not Kernel.FLASH_4:
        return
    try:
        open_flash_4()
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise JobError(
            f"attention = 'flash-4': {failure(error)}; install {PACKAGE} on every node, with GPUs of "
            "compute capability 9.0 or 10.0, or set attention to 'auto'"
        ) from error
