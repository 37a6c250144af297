"""Elastic: train large models on machines that come and go, and get the weights of a cluster that never
failed.

Names are resolved on first use (PEP 562), so ``import elastic.control`` loads neither torch nor Ray nor
pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.launch import launch
    from elastic.errors import ElasticError, JobError
    from elastic.job import Job

__version__ = "0.1.0"
__all__ = ["ElasticError", "Job", "JobError", "__version__", "launch"]

_HOMES = {
    "ElasticError": "elastic.errors",
    "Job": "elastic.job",
    "JobError": "elastic.errors",
    "launch": "actors.launch",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
