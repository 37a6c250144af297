"""N7 over NCCL: GPUs of one machine, of which some are said to be on other nodes, give the same bits with
blocks of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.engine.world import World
from elastic.plan.layout import Layout
from tests.engine.test_ordered import assert_equal, dumb, gradients, reduced
from tests.gpu.test_nccl import MODEL
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import toy_job

GPUS = torch.cuda.device_count()
PLACES = [
    (layout, nodes)
    for layout, nodes in [
        (Layout(1, 1), "a"),
        (Layout(1, 2), "ab"),
        (Layout(2, 1), "aa"),
        (Layout(1, 3), "abb"),
        (Layout(2, 2), "aabb"),
        (Layout(1, 4), "abab"),
        (Layout(4, 1), "abbb"),
    ]
    if layout.world <= GPUS
]

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks(GPUS, "cuda")
    yield pool
    pool.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_give_the_same_bits_on_any_nodes(gpus: Ranks, tmp_path: Path, precision: str) -> None:
    """Blocks of 3 of 8 microbatches.  In float32 blocks of 1 are the negative control; so few bf16 values add
    up exactly in any order.
    """
    changes = {"precision": precision, "model_args": MODEL}
    hashes = {
        train(
            gpus,
            toy_job(tmp_path / f"{layout} {nodes}", reduction={"block": 3}, **changes),
            layout,
            4,
            nodes=nodes,
        ).hash
        for layout, nodes in PLACES
    }
    assert len(hashes) == 1
    control = train(gpus, toy_job(tmp_path / "one", **changes), Layout(1, 1), 4).hash
    assert (control in hashes) is (precision == "bf16")


def on_gpu(world: World, block: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return reduced(world, block, elements, 1, 7, dtype).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_is_that_of_a_loop(gpus: Ranks, dtype: torch.dtype) -> None:
    """Gradients in both dtypes over NCCL, in which members without anything for each other exchange no
    message.
    """
    for layout, nodes in PLACES:
        for block in (1, 2, 3):
            elements = layout.dp_shard * 1003
            found = gpus.run(layout, on_gpu, block, elements, dtype, nodes=nodes)
            assert_equal(found, layout, dumb(gradients(1, elements, 7, dtype), block))
