"""R1, R20: a device that this process has lost is told apart from a peer's death and from the user's error,
whatever is raised.
"""

from __future__ import annotations

import datetime
import re
import threading

import pytest
import torch
import torch.distributed as dist

from elastic.errors import AbortStuck, FencedOff, StateDamaged, WorldBroken
from elastic.state.snapshot import NoMemory
from elastic.train.blame import classify, in_its_words, plainly, tell_where_all_stand, touch
from storage.errors import Damaged, Unavailable

ASSERTED = (
    "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in the manual.\nIt may come late."
)
NCCL = (
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error. Last error:\nCuda failure 710 'device-side "
    "assert triggered'"
)
RAISED = [
    torch.AcceleratorError(ASSERTED),  # from our own polling, or any other call
    RuntimeError(ASSERTED),
    dist.DistBackendError(NCCL),  # from a collective, with all peers alive
    WorldBroken("a collective of generation 1 did not end"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ValueError("the user's, about values that a dead device returned"),
]


def fine() -> None:
    pass


def lost() -> None:
    raise torch.AcceleratorError(ASSERTED)


def raised(error: Exception) -> Exception:
    """Returns ``error`` with a traceback that ends here, in what counts as the user's code."""
    try:
        raise error
    except Exception as found:
        return found


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_lost_device_makes_of_it(error: Exception) -> None:
    assert classify(raised(error), lost) == ("device", "CUDA error: device-side assert triggered")


def test_the_same_errors_while_the_device_answers() -> None:
    """The control.  A lack of memory is the job's error, whichever allocator reports it; a peer's death may
    look like a device's error.
    """
    assert [classify(raised(error), fine)[0] for error in RAISED] == [
        "job",
        "job",
        "peer",
        "peer",
        "job",
        "job",
    ]
    _, signature = classify(raised(torch.AcceleratorError("CUDA error: out of memory")), fine)
    assert signature.startswith("AcceleratorError at ") and signature.endswith(" in raised")


def test_memory_that_is_lacking_before_a_step_begins() -> None:
    """A new process may get the memory; if not, the equal signature shows it.  The control: any other error
    is the job's.
    """
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
        "{} GiB is free."
    )
    errors = [torch.OutOfMemoryError(message.format(free)) for free in (1.25, 1.5)]
    first, second = (classify(raised(error), fine, forming=True) for error in errors)
    assert first == second and first[0] == "device" and first[1].startswith("OutOfMemoryError at ")
    assert classify(raised(NoMemory("no slot")), fine, forming=True)[0] == "device", (
        "slots that earlier worlds have left full"
    )
    assert (
        classify(raised(ValueError("the model's")), fine, forming=True)[0]
        == classify(raised(NoMemory("")), fine)[0]
        == "job"
    )


def test_an_abort_that_is_stuck() -> None:
    """Even if the device answers, this process can be in no other world.  The signature does not say where
    the error was raised, and the error of a lost device comes first.  The control: any other broken world is
    blamed on a peer."""
    stuck = "the abort of the world before has not ended within 15 s"
    assert classify(AbortStuck(stuck), fine) == classify(raised(AbortStuck(stuck)), fine) == ("device", stuck)
    assert classify(raised(AbortStuck(stuck)), fine, forming=True) == ("device", stuck)
    assert classify(raised(AbortStuck(stuck)), lost, forming=True) == (
        "device",
        "CUDA error: device-side assert triggered",
    )
    assert classify(raised(WorldBroken(stuck)), fine, forming=True) == ("peer", "")


def test_what_is_told_apart_besides() -> None:
    assert classify(raised(Damaged("shard-0", "blake3 a", "blake3 b")), fine) == ("damaged", "")
    assert classify(raised(Unavailable("read", "no answer")), fine) == ("peer", "")
    assert classify(raised(FencedOff("no coordinator", lease=True)), lost) == ("lease", ""), (
        "it leaves anyway"
    )


def of_a_real_store() -> Exception:
    """Returns what torch raises when a member that is waited for does not come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(dist.DistError) as found:
        store.wait(["never"], datetime.timedelta(milliseconds=1))
    return found.value


GLOO = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:24116"
)


@pytest.mark.parametrize(
    "error", [GLOO, dist.DistBackendError(NCCL), of_a_real_store()], ids=lambda error: type(error).__name__
)
def test_the_words_of_a_library_are_told_plainly(error: Exception) -> None:
    """The controls are an error of ours and one of the bucket, which are in plain words already; the log has
    both in full.
    """
    said = plainly(error)
    assert "another member" in said and "log" in said
    assert not re.search(r"[\d:/]|NCCL", said) and re.search(r"[\d:/]|NCCL", str(error)), (
        "no addresses, no files of another project"
    )
    for ours in (WorldBroken("generation 3 is aborted"), Unavailable("read", "no answer")):
        assert plainly(ours) == str(ours)


DUPLICATE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"""
UNFOUND = "ifa != nullptr. Unable to find address for: eth77"
NOWHERE = f"[enforce fail at /__w/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] {UNFOUND}"


@pytest.mark.parametrize(
    "error", [dist.DistBackendError(DUPLICATE), dist.DistBackendError(NOWHERE)], ids=["NCCL", "gloo"]
)
def test_a_library_that_refuses_to_form_a_world_blames_no_peer(error: Exception) -> None:
    """The controls: a peer's death while a world forms, and the same words after a world had formed."""
    cause, signature = classify(raised(error), fine, forming=True)
    assert cause == "setup" and signature and not re.search(r"\d", signature), (
        "the same again, whatever rank says it"
    )
    assert in_its_words(error) in (DUPLICATE.splitlines()[-1], UNFOUND)
    assert classify(raised(error), fine) == ("peer", "")
    assert classify(raised(dist.DistBackendError(NCCL)), fine, forming=True) == (
        "peer",
        NCCL.splitlines()[-1],
    )
    assert (
        in_its_words(
            dist.DistBackendError(
                "NCCL error\nncclSystemError: A call failed.\nLast error:\n\nException raised from f\nframe #0: x"
            )
        )
        == "ncclSystemError: A call failed."
    )


def test_the_words_of_a_library_are_told_of_a_world_that_forms() -> None:
    """They say what happened, and not where in its source.  The control: of a world that steps they are in
    the log.
    """
    assert plainly(GLOO, words=in_its_words(GLOO)).endswith(
        "; the library says: Connection closed by peer [127.0.0.1]:24116"
    )
    assert "Connection closed" not in plainly(GLOO)
    assert classify(raised(WorldBroken("generation 3 is aborted")), fine, forming=True) == ("peer", "")


def test_a_cpu_is_never_lost() -> None:
    touch(torch.device("cpu"))


def test_where_all_threads_stand_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    held, entered = threading.Event(), threading.Event()

    def stands_here() -> None:
        entered.set()
        held.wait()

    thread = threading.Thread(target=stands_here, name="stuck one", daemon=True)
    thread.start()
    entered.wait()
    tell_where_all_stand()
    held.set()
    thread.join()
    told = capfd.readouterr().out
    assert (
        "thread stuck one stands at" in told
        and "in stands_here" in told
        and "in tell_where_all_stand" in told
    )


def test_state_in_files_that_is_not_what_was_written_ends_the_process() -> None:
    """Another process has other files.  The control: an error of the disk that says so itself may be the
    user's.
    """
    wrong = "state in files of /disk on host: the bytes that were read differ from those that were written"
    assert classify(raised(StateDamaged(wrong)), fine) == ("device", wrong)
    assert classify(raised(OSError(5, "Input/output error")), fine)[0] == "job"
