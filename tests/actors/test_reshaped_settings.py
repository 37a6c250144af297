"""A worker that is killed, the smaller world after it and the larger one later cost no bit, whatever the
engine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic.report.story import Sentence
from storage.datasets import Coding, write_dataset
from storage.objects import ObjectStore
from tests.data.texts import numbered
from tests.support.chaos import Trial, assert_survived, validated
from tests.support.kills import LAYOUTS, SAMPLES, Script, one_after_another, perform, undisturbed

STEPS, LENGTH, END = 20, 16, 28
SUMS = {"dataset": "tests.support.toys:Sums", "args": {"samples": SAMPLES}}
RAGGED = {"dataset": "tests.support.toys:Ragged", "args": {"samples": SAMPLES}}
PACKED = {
    "dataset": "tests.support.toys:Packed",
    "args": {"samples": SAMPLES, "seq_len": LENGTH, "documents": True},
}
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
}
LIBRARYS = {
    "model": "elastic.models.transformers_lm:build",
    "model_args": {"config": {"model_type": "llama", "vocab_size": 29, "attention_dropout": 0.1, **LLAMA}},
}
HELD_OUT = {
    "every": 7,
    "samples": 21,
    "dataset": "tests.support.toys:Sums",
    "args": {"samples": 50, "seq_len": 16},
}
WIRE, BLOCKS_OF_TWO = {"wire": "bf16"}, {"reduction": {"block": 2}}
BUCKETS = 20_000
SEVEN = {"global_batch": 14}
"""Seven microbatches, which neither two workers share evenly, nor three."""


@dataclass(frozen=True)
class Case:
    """Settings that are killed together.

    ``counts`` are other values of them: with each the bits are others, which is the control.  ``same`` are
    other values that change no bit.  ``held`` are words of what the log of each worker says that it holds.
    """

    settings: Mapping[str, Any]
    counts: Sequence[Mapping[str, Any]] = (BLOCKS_OF_TWO,)
    same: Sequence[Mapping[str, Any]] = ()
    point: str = "backward"
    layout: str = "shard"
    workers: int = 3
    held: str = ""


CASES = {
    "int8": Case(
        {"activations": "int8", "recompute": "block", "reduction": WIRE, "parallel": {"zero": 1}, **SEVEN},
        counts=({"activations": "keep"}, {"recompute": "none"}, {"reduction": {}}),
        same=({"parallel": {}},),
        point="in_update",
        held="of computing copies",
    ),
    "fp8": Case(
        {"activations": "fp8", "data": RAGGED | {"group_by_length": True}, "parallel": {"zero": 3}},
        counts=({"activations": "keep"}, {"data": RAGGED}),
    ),
    "transformers": Case(
        {**LIBRARYS, "activations": "offload", "recompute": "attention", **SEVEN},
        same=({"activations": "keep"}, {"recompute": "none"}),
        point="forward",
        layout="2x2",
        workers=4,
    ),
    "sqrt": Case(
        {"recompute": "sqrt", "parallel": {"zero": 1, "bucket_elements": BUCKETS}, **SEVEN},
        same=({"recompute": "none", "parallel": {}},),
        point="before_commit",
        held="of computing copies",
    ),
    "offload": Case(
        {
            "offload": "weights",
            "recompute": "block",
            "activations": "offload",
            "parallel": {"zero": 2},
            "validation": HELD_OUT,
        },
        same=({"offload": "none", "recompute": "none", "activations": "keep", "validation": {}},),
        point="validation",
        held="of computing copies in host memory",
    ),
    "documents": Case(
        {"data": PACKED, "reduction": WIRE, "parallel": {"zero": 0, "bucket_elements": BUCKETS}},
        counts=({"reduction": {}},),
        layout="replicate",
        workers=2,
    ),
}


def settings_of(case: Case, folder: Path) -> dict[str, Any]:
    """Returns the settings of a case.  For those that need it there is a prepared dataset then, of documents
    of 0 to 16 words.
    """
    found = {"steps": STEPS, "data": SUMS, **case.settings}
    if found["data"] is not PACKED:
        return found
    left, rows = SAMPLES * LENGTH + 1, list[list[int]]()
    while left:
        words = min((5 * len(rows)) % 17, left - 1)
        rows.append([*((len(rows) + 3 * place) % END for place in range(words)), END])
        left -= words + 1
    write_dataset(ObjectStore.open(str(folder / "tokens")), numbered(*rows), Coding("words", 29, END))
    return found | {"data": {**PACKED, "args": {**PACKED["args"], "path": str(folder / "tokens")}}}


def disturbed(script: Script, folder: Path, name: str, settings: Mapping[str, Any]) -> Trial:
    """Performs ``script`` with these settings; those of the script itself are its gates and its layout."""
    gates, data = script.gates(folder, settings.get("global_batch", 16)), settings["data"]
    parallel = {**LAYOUTS[script.layout], **settings.get("parallel", {})}
    return perform(
        script,
        folder,
        name,
        **{**settings, "data": {**data, "args": {**data["args"], "gates": gates}}, "parallel": parallel},
    )


def assert_held(chaos: Trial, case: Case, least: int) -> None:
    """Checks what the log of each worker says that it holds, of ``least`` worlds and workers, and what is
    said of the sums of gradients.
    """
    logs = Path(chaos.job.bucket).glob(f"{chaos.job.name}/logs/*/w*.log")
    held = [line for log in logs for line in log.read_text().splitlines() if "it holds" in line]
    assert len(held) >= least and all(case.held in line for line in held), held
    told = [
        line.text
        for line in chaos.lines
        if isinstance(line, Sentence) and "gradients are summed in" in line.text
    ]
    assert bool(told) is ("bucket_elements" in case.settings.get("parallel", {}))


@pytest.mark.full  # test_kill_points has the documents by default
@pytest.mark.parametrize("name", CASES)
def test_a_smaller_and_a_larger_world_cost_no_bits(tmp_path: Path, name: str) -> None:
    """B15, C2, C7, E6, F1, F3, F5, F6, L1, R1, R4, R14: 3→2→3 (4→3→4, 2→1→2).  Undisturbed, one process
    computes all.
    """
    case = CASES[name]
    if name == "transformers":
        pytest.importorskip(name)
    settings = settings_of(case, tmp_path)
    expected = undisturbed(tmp_path / "alone", **settings)
    for number, other in enumerate(case.counts):
        assert undisturbed(tmp_path / f"other{number}", **settings | other).hash != expected.hash, other
    for number, other in enumerate(case.same):
        assert undisturbed(tmp_path / f"same{number}", **settings | other).hash == expected.hash, other
    script = one_after_another(case.layout, case.workers, [(case.point, "SIGKILL", 1)])
    assert script.worlds == [case.workers, case.workers - 1, case.workers]
    chaos = disturbed(script, tmp_path, "killed", settings)
    assert_survived(chaos, expected, worlds=script.worlds, tiers=script.tiers)
    assert validated(chaos.lines) == expected.validated and bool(expected.validated) is (
        "validation" in case.settings
    )
    assert_held(chaos, case, least=3 * case.workers - 1)
