"""The loop that a good engineer writes by hand and without fault tolerance: FSDP2, compiled blocks, a
compiled loss, fused AdamW.

    torchrun --nproc-per-node N -m tests.benchmarks.plain_loop --size 1b [--attention sdpa|flex]
    [--deterministic] [--recompute]

Prints one line of JSON: the median seconds of a step, and tokens a second on one GPU.  ``throughput.py`` runs
it beside Elastic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.benchmarks.models import SIZES, Size

SETTLED = 6
"""Number of steps that are not counted: they compile, and fill torch's memory."""


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values, [batch, seq, dim] -> [batch, seq, dim]."""

    def __init__(self, size: Size, seq: int, attention: str) -> None:
        super().__init__()
        self.head = size.dim // size.heads
        self.q = nn.Linear(size.dim, size.dim, bias=False)
        self.k = nn.Linear(size.dim, size.kv_heads * self.head, bias=False)
        self.v = nn.Linear(size.dim, size.kv_heads * self.head, bias=False)
        self.o = nn.Linear(size.dim, size.dim, bias=False)
        self.mask = (
            create_block_mask(lambda b, h, q, k: q >= k, None, None, seq, seq, device="cuda")
            if attention == "flex"
            else None
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q, k = (
            each * cos + torch.cat((-each.chunk(2, -1)[1], each.chunk(2, -1)[0]), -1) * sin for each in (q, k)
        )
        if self.mask is not None:
            out = flex_attention(q, k, v, block_mask=self.mask, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One decoder block: [batch, seq, dim] -> the same shape."""

    def __init__(self, size: Size, seq: int, attention: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.dim, eps=1e-5), nn.RMSNorm(size.dim, eps=1e-5)
        self.attention = Attention(size, seq, attention)
        self.w1, self.w3 = (
            nn.Linear(size.dim, size.hidden, bias=False),
            nn.Linear(size.dim, size.hidden, bias=False),
        )
        self.w2 = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        normed = self.norm2(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Model(nn.Module):
    """The decoder: tokens [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, size: Size, seq: int, attention: str, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size, seq, attention) for _ in range(size.layers))
        self.norm, self.output = nn.RMSNorm(size.dim, eps=1e-5), nn.Linear(size.dim, size.vocab, bias=False)
        if size.tied:
            self.output.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.recompute else block(x, cos, sin)
        return self.output(self.norm(x))


def common_options() -> argparse.ArgumentParser:
    """Returns a parser of the options of every loop that is compared with ours."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument(
        "--microbatches", type=int, default=4, help="of one sample each, by each rank in each step"
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--recompute", action="store_true")
    return parser


def main() -> None:
    parser = common_options()
    parser.add_argument("--attention", choices=("sdpa", "flex"), default="sdpa")
    parser.add_argument("--deterministic", action="store_true")
    known = parser.parse_args()
    size, seq = SIZES[known.size], known.seq
    if known.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    with device:
        model = Model(size, seq, known.attention, known.recompute)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    loss_of = torch.compile(
        lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    )
    head = size.dim // size.heads
    angles = torch.outer(
        torch.arange(seq, device=device), 500_000 ** (-torch.arange(0, head, 2, device=device) / head)
    )
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    took, host = [], []
    for _ in range(known.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(known.microbatches):
            tokens = torch.randint(0, size.vocab, (1, seq + 1), device=device)
            launched = time.perf_counter()
            (loss_of(model(tokens[:, :-1], cos, sin), tokens[:, 1:]) / known.microbatches).backward()
            if number == 0:  # the first finds the device idle, so that the host waits for nothing
                host.append(time.perf_counter() - launched)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    seconds = statistics.median(took[SETTLED:])
    if dist.get_rank() == 0:
        found = {
            "step_s": seconds,
            "tokens_per_s": known.microbatches * seq / seconds,
            "host_microbatch_s": statistics.median(host[SETTLED:]),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
