"""Measures the loss on samples that are held out, between two steps, and changes no bit of the training.

The members share the samples, in microbatches of the size that they train with, so that compiled code fits.
The result is added in the order of the microbatches, so it has the same bits in every layout; the *best*
checkpoint depends on it.  The last microbatch may have fewer samples: it is not filled up, since a loss may
compare the samples of a microbatch.  With fewer samples its code runs uncompiled.

The validation of the state after step s is part of the commit of step s + 1, so it is reported exactly once,
together with that commit.  If the world breaks before the commit, the next world begins at step s and
validates again.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch

from elastic.data.loader import Ids
from elastic.engine.world import LEAD, TO_HOST, all_gather
from elastic.errors import LossError
from elastic.plan.placement import reporters
from elastic.protocol.commit_record import Validated, is_count
from elastic.train.apply_fence import ApplyFence
from elastic.train.checks.contract import without_compiling
from elastic.train.model import State
from elastic.train.step import Session, loss_of
from elastic.train.terms import wrong_count

SLOTS = LEAD + 1
"""Number of batches whose copies to the device may be in flight: the device is at most ``LEAD`` microbatches
behind.
"""


@dataclass(frozen=True)
class Blocks:
    """The microbatches of a validation."""

    samples: int
    microbatch: int

    def __len__(self) -> int:
        return -(-self.samples // self.microbatch)

    def ids(self, number: int) -> Ids:
        """Returns the samples of a microbatch."""
        return tuple(range(number * self.microbatch, min((number + 1) * self.microbatch, self.samples)))


def validate(session: Session, state: State, fence: ApplyFence, step: int) -> Validated:
    """Returns what the state after ``step`` loses on the held-out samples.  Every member of the world must
    call it.

    Raises :class:`FencedOff` if the generation is fenced, :class:`LossError` if a count is no number of
    terms, and the errors of a step.
    """
    assert session.held_out is not None
    loader, world, began = session.held_out, state.world, session.meter.now()
    blocks = Blocks(session.job.validation.samples or len(loader.dataset), session.job.microbatch_size)
    ranks, rank = len(reporters(world.layout)), world.data_rank
    rounds = -(-len(blocks) // ranks)
    mine = [blocks.ids(min(number * ranks + rank, len(blocks) - 1)) for number in range(rounds)]
    world.reserve(TO_HOST, torch.empty(world.size * rounds * 2, dtype=torch.float64))
    session.counters["collective"] = 0
    session.counters.at("reads data")
    batches = loader.each(mine)
    first = next(batches)
    for slot in range(SLOTS):
        for name, value in first.items():
            world.reserve(f"{name} held out {slot}", value)
        world.reserve(f"{name} held out at last", value[: len(blocks.ids(len(blocks) - 1))])
    state.model.eval()
    sums = list[torch.Tensor]()
    state.parameters.begin_round(0, last=True)
    state.guard.begin()
    with torch.no_grad():
        for number, batch in enumerate(chain([first], batches)):
            with fence as member:
                member.go_on("validated")
            session.counters.at("validates")
            session.computing = f"the validation after step {step}, samples {list(mine[number])}"
            session.faults.strike("validation", step + 1, world)
            state.seeds.begin(0, number * ranks + rank)
            short = len(mine[number]) < blocks.microbatch
            place = "at last" if short else number % SLOTS
            there = {
                name: world.to_device(f"{name} held out {place}", value) for name, value in batch.items()
            }
            with without_compiling() if short else nullcontext():  # a short batch would be compiled, too
                loss, count = loss_of(session, state.model, there)
            state.parameters.end_forward()
            sums.append(
                torch.stack(
                    [torch.as_tensor(each, device=world.device).double() for each in (loss.detach(), count)]
                )
            )
            world.keep_up()
            session.counters["collective"] += 1
            session.counters.at("reads data")
        session.computing = ""
        state.guard.check()
        session.counters.at("validates")
        told = torch.cat(sums)
        gathered = told.new_empty(world.size * told.numel())
        all_gather(gathered, told)
    rows = world.to_host(gathered, given_up=lambda: fence.member.barred).view(world.size, rounds, 2)
    with fence as member:
        member.go_on("validated")
    found = rows[list(reporters(world.layout))].transpose(0, 1).reshape(-1, 2)[: len(blocks)]
    session.counters["collective"] = 0
    session.meter.leave_out(session.meter.now() - began)
    losses, counts = found.T.tolist()
    if (
        wrong := next((number for number, count in enumerate(counts) if not is_count(count)), None)
    ) is not None:
        where = f"the validation after step {step}, samples {list(blocks.ids(wrong))}"
        raise LossError(wrong_count(f"loss = {session.job.loss!r}", counts[wrong], where))
    return Validated(sum(losses), int(sum(counts)))
