"""R4, N13: kernels that a process on one node has compiled for its GPU are found by a process on another
node, which compiles none.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from elastic.engine.world import World
from elastic.ids import NodeId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.state.keeper_store import KeeperStore
from elastic.train.gauges.counters import Counters
from elastic.train.machine.compilers import place
from elastic.train.model import build_model, tensors_of
from elastic.train.session import build_of, kind_of, make_session
from elastic.train.warmup import warm_up
from tests.support.ranks import SECRET, Ranks
from tests.support.toys import toy_job

DEVICE = "cuda"
KERNELS = ("*.cubin", "*.so")
"""Files that only a compiler makes: Triton's, and that of C++."""

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")


def start(world: World, job: Job, root: str, peers: tuple[str, ...]) -> tuple[int, int, frozenset[str]]:
    """Starts as a worker does on a node whose folder for compiled code is ``root``.

    Returns how many graphs it compiled, how many it found, and the kernels that were there before it
    compiled.
    """
    world.abort()
    world.close()
    session = make_session(job, Counters(Path(root).with_suffix(".counters"), create=True))
    compiled = place(job, build_of(session).code, kind_of(world.device), Path(root))
    assert compiled is not None
    with compiled.kept(peers, SECRET):
        before = kernels(compiled.folder)
        warm_up(session, tensors_of(build_model(job, session.builder), session.rule), world.device)
    session.close()
    counts = torch._dynamo.utils.counters["inductor"]
    return counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"], before


def kernels(folder: Path) -> frozenset[str]:
    return frozenset(path.name for pattern in KERNELS for path in folder.rglob(pattern))


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["flex", "sdpa"])
def test_a_new_node_compiles_no_kernel(tmp_path: Path, dropout: float) -> None:
    """The control is the first process: it finds nothing and compiles.  The second one makes no kernel beside
    those that came.
    """
    job = toy_job(
        tmp_path,
        compile=True,
        precision="bf16",
        model_args={"vocab": 29, "dim": 64, "layers": 2, "heads": 2, "dropout": dropout},
        workers={"max": 2, "gpus": int(DEVICE == "cuda")},
    )
    one, other, found = tmp_path / "one", tmp_path / "other", []
    with closing(KeeperStore(NodeId("one"), "127.0.0.1", SECRET, compiled_at=one)) as store:
        for root, peers in ((one, ()), (other, (store.address,))):
            pool = Ranks(1, DEVICE)
            try:
                found += pool.run(Layout(1, 1), start, job, str(root), peers)
            finally:
                pool.close()
    (compiled, hits, before), (again, found_there, came) = found
    assert compiled > 0 and not before
    assert again == 0 and found_there == compiled + hits and came
    assert kernels(other) == came == kernels(one)
