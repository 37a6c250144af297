"""Trains a job with a learning rate that falls from layer to layer, from the head down, as is usual when a trained model learns a new task
(Howard and Ruder 2018, "Universal Language Model Fine-tuning for Text Classification", section 3.1).

    python examples/layer_decay.py job.toml 12 0.8

With 12 layers and 0.8 the head has the learning rate of the job, the last layer 0.8 of it, the one before 0.64, and the embeddings least.
"""

from __future__ import annotations

import sys
from typing import Any

from elastic import Job, launch


def groups(layers: int, rate: float) -> list[dict[str, Any]]:
    """Returns the groups of parameters of a model whose embeddings and layers have the names of those of ``elastic.models.llama``."""
    names = ["embedding.*", *(f"layers.{number}.*" for number in range(layers))]
    return [{"names": [name], "lr_scale": rate ** (layers + 1 - number)} for number, name in enumerate(names)]


def main(file: str, layers: str, rate: str, *options: str) -> None:
    launch(Job.load(file, {"optim.groups": groups(int(layers), float(rate))}), local="--local" in options)


if __name__ == "__main__":
    main(*sys.argv[1:])
