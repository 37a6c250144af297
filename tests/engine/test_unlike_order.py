"""Members that run blocks in different orders, or different numbers of them, with stage 3: the run ends with
a sentence that says so.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.parameters.order import difference
from elastic.engine.world import World
from elastic.errors import ModelError, WorldBroken
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import member, train_each, train_here
from tests.support.toys import small_job

PAIR, SPLIT = Layout(1, 2), {"dp_shard": 2, "zero": 3}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Ways(nn.Module):
    """The first token chooses what happens to two blocks: they change places (``swapped``, ``branches``), or
    a pass without gradients runs one more (``teacher``), or one that is frozen is left out (``frozen``).
    ``same`` chooses nothing, nor do the first ``passes``.
    """

    def __init__(self, kind: str, passes: int = 0) -> None:
        super().__init__()
        self.kind, self.passes, self.embedding = kind, passes, nn.Embedding(29, 16)
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(16, 29)
        self.layers[2].requires_grad_(kind != "frozen")

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (first, second, third) = self.embedding(tokens), self.layers
        other, self.passes = int(tokens[0, 0]) % 2 == 1 and self.passes <= 0, self.passes - 1
        if other and self.kind == "teacher":
            with torch.no_grad():
                third(x)
        if self.kind == "branches":
            found = [block(x) for block in ((second, first) if other else (first, second))]
            x = sum(found[::-1] if other else found)
        else:
            x = first(second(x)) if other and self.kind == "swapped" else second(first(x))
        return self.head(x if other and self.kind == "frozen" else third(x))


def job(bucket: Path, kind: str, passes: int = 0, **changes: Any) -> Job:
    return small_job(
        bucket,
        model=f"{__name__}:Ways",
        model_args={"kind": kind, "passes": passes},
        global_batch=16,
        **changes,
    )


def said(world: World, job: Job) -> tuple[str, int]:
    """Returns the sentence with which a member's step fails, and the number of updates that it made; "" if
    none fails.
    """
    with member(world, job, Version(0, 0)) as me:
        try:
            for _ in range(3):
                me.step()
            return "", len(me.rates)
        except ModelError as error:
            return str(error), len(me.rates)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("swapped", {}),
        ("swapped", {"passes": 4}),
        pytest.param("swapped", {"reproducible": False}, marks=pytest.mark.full),
        pytest.param("swapped", {"recompute": "block"}, marks=pytest.mark.full),
        ("branches", {}),
    ],
)
def test_blocks_in_another_order_end_a_step_before_it_is_applied(
    ranks: Ranks, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """C4: all members say what each did; before, weights were made of halves of two blocks.  The next test is
    the control.
    """
    found = ranks.run(PAIR, said, job(tmp_path / "3", kind, parallel=SPLIT, **changes))
    (sentence, updates), other = found
    assert other == (sentence, updates) and updates == (1 if "passes" in changes else 0), (
        "four passes are a step"
    )
    places = [f"on world rank {rank} layers.{block} was gathered" for rank in (0, 1) for block in (0, 1)]
    assert sum(place in sentence for place in places) == 2, sentence
    assert "set parallel.zero = 2" in sentence and "after" in sentence


def test_stage_2_and_blocks_in_one_order_have_the_bits_of_one_worker(ranks: Ranks, tmp_path: Path) -> None:
    """C4: the control of what ends with an error in this file."""
    stages = {"swapped": 2, "branches": 2, "teacher": 2, "frozen": 2, "same": 3}
    worlds = [
        job(tmp_path / f"{each}-2", each, parallel=SPLIT | {"zero": zero}) for each, zero in stages.items()
    ]
    alone = [train_here(job(tmp_path / f"{each}-1", each), 2).hash for each in stages]
    assert [each.hash for each in train_each(ranks, worlds, PAIR, 2)] == alone


def standing(world: World, job: Job) -> tuple[list[str], int]:
    """Returns what is told of a world whose first member ends it then, as the coordinator does, and the
    number of updates.
    """
    told = list[str]()

    def tell(sentence: str) -> None:
        told.append(sentence)
        world.abort()

    with member(world, job, Version(0, 0)) as me:
        order = me.state.parameters.order
        assert order is not None
        with order.watched(0.05, tell), suppress(RuntimeError, WorldBroken):
            for _ in range(2):
                me.step()
        return told, len(me.rates)


@pytest.mark.parametrize("kind", ["teacher", pytest.param("frozen", marks=pytest.mark.full)])
def test_members_that_wait_for_each_other_in_unlike_blocks_are_told_apart(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """C4: world rank 0 says what each did, while both wait.  The control: nothing is told of members that are
    merely slow.
    """
    slow = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.15}}
    # in the second step, after notes of the first one are told
    for passes, changes in ((0, {}), (4, {"data": slow})):
        (told, updates), (other, _) = ranks.run(
            PAIR, standing, job(tmp_path / f"3-{passes}", kind, passes, parallel=SPLIT, **changes)
        )
        assert (len(told), other, updates) == (1, [], passes // 4)
        assert (
            "layers.2 was gathered" in told[0]
            and "on world rank 0" in told[0]
            and "on world rank 1" in told[0]
        )
    assert ranks.run(PAIR, standing, job(tmp_path / "slow", "same", parallel=SPLIT, data=slow)) == [
        ([], 2),
        ([], 2),
    ]


WORDS = [
    "a microbatch began",
    "the commit came",
    "a was gathered",
    "a was summed",
    "b was gathered",
    "b was summed",
]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("notes", "found"),
    [
        ({0: [0, 2, 4], 1: [0, 2, 4]}, ""),
        ({0: [0, 2, 4], 1: [0], 2: []}, ""),
        (
            {2: [0], 0: [0, 2, 0, 2, 4], 1: [0, 2, 0, 2], 3: [0, 2, 0, 2, 5]},
            "in microbatch 2 of each member since the last commit, after a was gathered, on world rank 0 b "
            "was gathered and on world rank 3 b was summed",
        ),
        (
            {rank: [0, 2 if rank else 1] for rank in range(11)},
            "in microbatch 1 of each member since the last commit, on world rank 0 the commit came and on "
            "world ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more a was gathered",
        ),
        (
            {0: [2], 1: [4]},
            (
                "before the first microbatch of a step, on world rank 0 a was gathered and on world rank 1 "
                "b was gathered"
            ),
        ),
    ],
)
def test_who_has_come_less_far_differs_from_nobody(notes: dict[int, list[int]], found: str) -> None:
    assert difference(notes, WORDS) == found
