"""Measures forward and backward of causal attention, [1, heads, seq, dim] with shared keys and values, for
each backend of this machine.

    python -m tests.benchmarks.attention [--sizes 1b 8b] [--seq 8192] [--dtype float32] [NAME ...]

Each backend runs in a process of its own, so that a kernel that breaks its device spoils one row.  Prints a
line of JSON for each row and a table: milliseconds, TFLOP/s (of the causal half), whether five passes had the
same bits, and the largest difference from plain math in float32, as a share of the largest value of the
output and of each gradient.  A backend that is not there has the reason in its row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.benchmark import Timer

from elastic.kernels.attention import causal_attention, causal_mask
from tests.benchmarks.models import SIZES

PASSES = 5
"""Number of times that the same input is computed, to see whether the bits are the same."""
LIMIT_S = 240.0
"""Seconds that a backend may take to import, to compile and to be measured: flash-4 compiles each kernel at
its first call.
"""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attends causally: q [1, heads, seq, dim], k and v [1, fewer heads, seq, dim] -> as q."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Numbers of heads and the dimensions of each, for one sample of ``seq`` tokens."""

    heads: int
    kv_heads: int
    dim: int
    seq: int

    @property
    def flops(self) -> float:
        """Operations of the forward pass in the half that the mask leaves; the backward pass has 2.5 times as
        many.
        """
        return 2 * self.heads * self.seq**2 * self.dim

    def inputs(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Returns q, k, v and a gradient of the output, with the strides that they have in a model."""
        torch.manual_seed(0)
        made = (
            torch.randn(1, self.seq, heads, self.dim, device=device, dtype=dtype)
            for heads in (self.heads, *[self.kv_heads] * 2, self.heads)
        )
        q, k, v, gradient = (each.transpose(1, 2) for each in made)
        return [each.requires_grad_() for each in (q, k, v)] + [gradient]


def sdpa(backend: SDPBackend | None) -> Attend:
    """Returns torch's attention by one of its kernels, or by those that it chooses."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def ours() -> Attend:
    """Returns FlexAttention as our models call it."""
    compiled = torch.compile(causal_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, causal_mask(q.shape[2], q.device), 0.0)


def flex(options: dict[str, Any] | None) -> Attend:
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(
        q, k, v, block_mask=causal_mask(q.shape[2], q.device), enable_gqa=True, kernel_options=options
    )


def flash(implementation: str) -> Attend:
    """Returns torch's flash attention with the kernels of another package in place of its own."""
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(implementation)
    return sdpa(SDPBackend.FLASH_ATTENTION)


def flash4(deterministic: bool) -> Attend:
    """Returns flash-attention 4 without torch's registration, which fits only some of its versions."""
    from flash_attn.cute import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(
            *(each.transpose(1, 2) for each in (q, k, v)), causal=True, deterministic=deterministic
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return attend


BACKENDS: dict[str, tuple[Callable[[], Attend], bool]] = {
    "torch's choice": (partial(sdpa, None), False),
    "cuDNN": (partial(sdpa, SDPBackend.CUDNN_ATTENTION), False),
    "cuDNN, deterministic": (partial(sdpa, SDPBackend.CUDNN_ATTENTION), True),
    "flash-2": (partial(sdpa, SDPBackend.FLASH_ATTENTION), False),
    "flash-2, deterministic": (partial(sdpa, SDPBackend.FLASH_ATTENTION), True),
    "efficient": (partial(sdpa, SDPBackend.EFFICIENT_ATTENTION), False),
    "efficient, deterministic": (partial(sdpa, SDPBackend.EFFICIENT_ATTENTION), True),
    "math, deterministic": (partial(sdpa, SDPBackend.MATH), True),
    "FlexAttention, our tiles": (ours, True),
    "FlexAttention, torch's tiles": (partial(flex, None), True),
    "FlexAttention over flash-4": (partial(flex, {"BACKEND": "FLASH"}), False),
    "FlexAttention over flash-4, deterministic": (partial(flex, {"BACKEND": "FLASH"}), True),
    "flash-4": (partial(flash4, False), False),
    "flash-4, deterministic": (partial(flash4, True), True),
    "flash-4 in torch, deterministic": (partial(flash, "FA4"), True),
    "flash-3 in torch": (partial(flash, "FA3"), False),
    "flash-3 in torch, deterministic": (partial(flash, "FA3"), True),
}
"""The maker of each backend, and whether torch is asked for deterministic kernels."""


def exact(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v, float32 or wider, by the formula; one group of
    heads after the other.
    """
    parts = []
    seq, share = q.shape[2], q.shape[1] // k.shape[1]
    future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
    for head in range(k.shape[1]):
        group = slice(head * share, (head + 1) * share)
        wide = torch.promote_types(q.dtype, torch.float32)
        some = [
            each.detach().to(wide).requires_grad_()
            for each in (q[:, group], k[:, head : head + 1], v[:, head : head + 1])
        ]
        scores = (some[0] @ some[1].mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        out = scores.softmax(-1) @ some[2]
        parts.append([out.detach(), *torch.autograd.grad(out, some, gradient[:, group].to(wide))])
    return [torch.cat(each, 1) for each in zip(*parts, strict=True)]


def both(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v."""
    out = attend(*inputs[:3])
    return [out.detach(), *torch.autograd.grad(out, inputs[:3], inputs[3])]


def difference(found: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


def measured(attend: Attend, shape: Shape, device: str, dtype: torch.dtype, least_s: float = 0.5) -> Row:
    """Returns the row of one backend.  Each time is the median of runs that take ``least_s`` seconds
    together; that of the backward pass is what it adds to the forward pass.
    """
    inputs = shape.inputs(device, dtype)
    first = both(attend, inputs)
    same = all(all(map(torch.equal, first, both(attend, inputs))) for _ in range(PASSES - 1))
    known = {"attend": attend, "both": both, "inputs": inputs}
    forward, total = (
        Timer(run, globals=known).blocked_autorange(min_run_time=least_s).median
        for run in ("attend(*inputs[:3])", "both(attend, inputs)")
    )
    backward = total - forward
    return {
        "forward_ms": forward * 1e3,
        "backward_ms": backward * 1e3,
        "forward_tflops": shape.flops / forward / 1e12,
        "backward_tflops": 2.5 * shape.flops / backward / 1e12,
        "same_bits": same,
        "difference": difference(first, exact(*inputs)),
    }


def reason(error: Exception) -> str:
    """Returns an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def rows_of(name: str, options: argparse.Namespace) -> dict[str, Row]:
    """Measures one backend in this process, at each size.  Whatever it raises is a row, since a backend may
    lack anything.
    """
    make, deterministic = BACKENDS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rows: dict[str, Row] = {}
    for size in options.sizes:
        known = SIZES[size]
        shape = Shape(known.heads, known.kv_heads, known.dim // known.heads, options.seq)
        try:
            rows[size] = measured(make(), shape, device, dtype)
        except Exception as error:
            rows[size] = {"failed": reason(error)}
    return rows


def apart(name: str, options: argparse.Namespace) -> dict[str, Row]:
    """Measures one backend in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.attention",
        "--here",
        "--seq",
        str(options.seq),
        "--sizes",
        *options.sizes,
        *(("--dtype", options.dtype) if options.dtype else ()),
        "--",
        name,
    ]
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {size: {"failed": f"not done after {LIMIT_S:g} s"} for size in options.sizes}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {size: {"failed": f"ended with {done.returncode}: {said[:160]}"} for size in options.sizes}
    found: dict[str, Row] = json.loads(lines[-1])
    return found


def table(found: dict[str, dict[str, Row]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| size | backend | forward | TFLOP/s | backward | TFLOP/s | same bits | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in next(iter(found.values())):
        for name, rows in found.items():
            row = rows[size]
            if "failed" in row:
                lines.append(f"| {size} | {name} | {row['failed'].replace('|', '/')} | | | | | |")
                continue
            passes = " | ".join(
                f"{row[f'{each}_ms']:.2f} ms | {row[f'{each}_tflops']:.0f}"
                for each in ("forward", "backward")
            )
            lines.append(
                f"| {size} | {name} | {passes} | {'yes' if row['same_bits'] else 'no'} | "
                f"{row['difference']:.1e} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {'; '.join(BACKENDS)}")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1b", "8b"])
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="bfloat16 on a GPU, float32 on a CPU if it is left out",
    )
    parser.add_argument("--here", action="store_true", help="one backend, in this process")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BACKENDS]
    if unknown:
        parser.error(f"unknown backend {unknown[0]!r}: take one of {'; '.join(BACKENDS)}")
    if options.here:
        print(json.dumps(rows_of(options.names[0], options)), flush=True)
        return
    found = {}
    for name in options.names or BACKENDS:
        found[name] = apart(name, options)
        print(json.dumps({"name": name, **found[name]}), flush=True)
        (options.out / "attention.json").write_text(json.dumps(found, indent=1) + "\n")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, float32"
    print(
        f"{card}, torch {torch.__version__}, sequence {options.seq}, causal, one sample\n{table(found)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
