"""A cluster says what memory its GPUs have, and no process keeps a GPU for it."""

from __future__ import annotations

import pytest
import ray
import torch

from actors import cluster
from elastic.config.sections import Workers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_smallest_gpu_is_the_drivers_own() -> None:
    """The judge is the driver's torch.  Afterwards the cluster has room for a worker again."""
    cluster.connect("local")
    try:
        assert cluster.smallest_gpu(Workers(gpus=1)) == torch.cuda.mem_get_info(0)[1]
        cluster.check_room(Workers(gpus=1))
    finally:
        ray.shutdown()
