"""Measures fused operations beside the plain ones that they replace, forward and backward, and says on which
device.

    python -m tests.benchmarks.fused                     # on a GPU
    python -m tests.benchmarks.fused --size tiny         # a rehearsal, on a CPU if there is no GPU

The loss is fused by ``elastic/kernels/cross_entropy.py``.  RMSNorm, SwiGLU and a whole block are fused by
torch's compiler; ``compile = false`` has the plain ones.  Each pair runs by turns, so that a change of the
clock meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic.kernels.cross_entropy import cross_entropy
from elastic.models.llama import Llama, rotary

SIZES = {
    "large": {"tokens": 8192, "dim": 4096, "hidden": 14_336, "vocab": 128_256, "heads": 32},
    "tiny": {"tokens": 64, "dim": 32, "hidden": 96, "vocab": 101, "heads": 2},
}
WARM, RUNS = 3, 20
Function = Callable[..., Tensor]


@dataclass
class Pair:
    """One operation in two forms.  Both take ``inputs``, whose gradients are part of the work, then ``rest``."""

    fused: Function
    plain: Function
    inputs: list[Tensor]
    rest: tuple[Tensor, ...] = ()
    weights: Sequence[Tensor] = ()
    """Tensors besides ``inputs`` whose gradients are part of the work."""

    def results(self, function: Function) -> list[Tensor]:
        """Returns the output and the gradients of the inputs and weights."""
        out = function(*self.inputs, *self.rest)
        return [out.detach(), *torch.autograd.grad(out, [*self.inputs, *self.weights], torch.ones_like(out))]


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=-1, reduction="sum")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def pairs(size: str, device: str, dtype: torch.dtype) -> dict[str, Pair]:
    """Returns the operations by name, with random inputs."""
    shape = SIZES[size]
    tokens, dim, hidden, vocab = (shape[name] for name in ("tokens", "dim", "hidden", "vocab"))
    draw = torch.Generator(device).manual_seed(0)

    def random(*dims: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*dims, generator=draw, device=device) * scale).to(dtype).requires_grad_()

    model = Llama(vocab=vocab, dim=dim, layers=1, heads=shape["heads"], hidden=hidden)
    model.init_weights()
    block = model.to(device, dtype).layers[0]
    rope = rotary(tokens, model.head_dim, model.rope_base, torch.device(device))
    targets = torch.randint(-vocab // 8, vocab, (tokens,), generator=draw, device=device).clamp_min(-1)
    weights = list(block.parameters())  # a compiled block computes their gradients in any case
    return {
        "loss": Pair(
            cross_entropy, plain_loss, [random(tokens, dim), random(vocab, dim, scale=dim**-0.5)], (targets,)
        ),
        "RMSNorm": Pair(torch.compile(rms_norm), rms_norm, [random(tokens, dim), random(dim)]),
        "SwiGLU": Pair(torch.compile(swiglu), swiglu, [random(tokens, hidden), random(tokens, hidden)]),
        "block": Pair(
            torch.compile(block, fullgraph=True), block, [random(1, tokens, dim)], (rope,), weights
        ),
    }


def timer(pair: Pair, function: Function, device: str) -> Callable[[], float]:
    """Returns a function that runs one forward and backward and returns its milliseconds.

    On a GPU it is a graph of kernels, so that the time is that of the device, without the host's.
    """
    if device == "cpu":

        def run() -> float:
            began = time.perf_counter()
            pair.results(function)
            return 1000 * (time.perf_counter() - began)

        return run
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as torch asks for before a capture
        for _ in range(WARM):
            pair.results(function)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        pair.results(function)

    def replay() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    return replay


def measured(pair: Pair, device: str, runs: int = RUNS) -> tuple[float, float]:
    """Returns the median times of the fused and the plain form."""
    fused, plain = timer(pair, pair.fused, device), timer(pair, pair.plain, device)
    times = [(fused(), plain()) for _ in range(WARM + runs)]
    one, other = (statistics.median(each) for each in zip(*times[WARM:], strict=True))
    return one, other


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    about = (
        f"{torch.cuda.get_device_name(0) if device == 'cuda' else 'CPU'}, torch {torch.__version__}, "
        f"{options.size}, {dtype}"
    )
    print(about, flush=True)
    rows = []
    for name, pair in pairs(options.size, device, dtype).items():
        fused, plain = measured(pair, device)
        rows.append({"operation": name, "fused_ms": fused, "plain_ms": plain, "speed_up": plain / fused})
        print(
            f"{name:<8} fused {fused:9.3f} ms   plain {plain:9.3f} ms   {plain / fused:5.2f} times as fast",
            flush=True,
        )
    (options.out / f"fused-{options.size}.json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
