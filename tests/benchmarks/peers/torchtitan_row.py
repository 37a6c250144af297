"""Runs TorchTitan 0.2.2 on models and batches of the sizes of ``plain_loop.py``, and prints the same line of
JSON.

    torchrun --nproc-per-node N -m tests.benchmarks.peers.torchtitan_row --size 1b-untied [--recompute]

TorchTitan's own trainer takes the steps, with its Llama 3, compiled blocks, a compiled loss and fused AdamW;
FSDP2 splits the state over all GPUs.  On one GPU TorchTitan does not use FSDP2 but autocast.  What is ours
are the sizes, the random tokens and the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from elastic.models import llama
from tests.benchmarks.models import SIZES, Size
from tests.benchmarks.plain_loop import SETTLED, common_options


class RandomTokens(BaseDataLoader):
    """Gives batches of one sample: inputs and targets, both [1, seq] on the CPU, without end."""

    def __init__(self, vocab: int, seq: int) -> None:
        self.vocab, self.seq = vocab, seq

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(0, self.vocab, (1, self.seq + 1))
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Timed(Trainer):
    """A trainer that measures each of its steps, in seconds, as the plain loop does."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.took: list[float] = []

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        torch.accelerator.synchronize()
        began = time.perf_counter()
        super().train_step(data_iterator)
        torch.accelerator.synchronize()
        self.took.append(time.perf_counter() - began)


def spec_of(size: Size, seq: int) -> TrainSpec:
    """Returns TorchTitan's Llama 3 in one size, with random tokens in place of a data set and a tokenizer."""
    args = TransformerModelArgs(
        dim=size.dim,
        n_layers=size.layers,
        n_heads=size.heads,
        n_kv_heads=size.kv_heads,
        vocab_size=size.vocab,
        rope_theta=500_000,
        multiple_of=64,
        # of two thirds of 4 × dim, rounded up to a multiple
        ffn_dim_multiplier=size.hidden / (8 * size.dim / 3),
    )
    return replace(
        get_train_spec(),
        model_args={"sized": args},
        build_dataloader_fn=lambda **_: RandomTokens(size.vocab, seq),
        build_tokenizer_fn=None,
        build_validator_fn=None,
        state_dict_adapter=None,
    )


def config_of(known: argparse.Namespace, world: int) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = mkdtemp()
    config.model.name, config.model.flavor = "ours", "sized"
    config.training.local_batch_size, config.training.global_batch_size = 1, world * known.microbatches
    config.training.seq_len, config.training.steps = known.seq, known.steps
    config.optimizer.lr, config.lr_scheduler.warmup_steps = 3e-4, 5
    config.activation_checkpoint.mode = "full" if known.recompute else "none"
    config.compile.enable = True
    return config


def main() -> None:
    parser = common_options()
    known = parser.parse_args()
    size = SIZES[known.size]
    if size.tied:
        parser.error(
            f"--size {known.size} ties the output to the embedding, which TorchTitan 0.2.2's Llama cannot: "
            "take an untied size"
        )
    init_logger()
    register_train_spec("ours", spec_of(size, known.seq))
    trainer = Timed(config_of(known, int(os.environ["WORLD_SIZE"])))
    found = sum(parameter.numel() for parameter in trainer.model_parts[0].parameters())
    with torch.device("meta"):
        ours = sum(parameter.numel() for parameter in llama.build(**size.arguments()).parameters())
    assert found == ours, f"TorchTitan made {found:,} parameters, {known.size} has {ours:,}"
    try:
        trainer.train()
    finally:
        trainer.close()
    seconds = statistics.median(trainer.took[SETTLED:])
    if torch.distributed.get_rank() == 0:
        row = {
            "step_s": seconds,
            "tokens_per_s": known.microbatches * known.seq / seconds,
            "peak_bytes": torch.accelerator.max_memory_allocated(),
        }
        print(json.dumps(row), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
