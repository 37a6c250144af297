"""H3: whatever is wrong with whichever object, it is noticed, and named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from storage.checkpoints import Checkpoints
from storage.documents import digest_of, seal, unseal
from storage.errors import Damaged
from storage.objects import ObjectStore
from storage.slices import Version
from tests.storage.states import TENSORS, save, state_of

pytestmark = pytest.mark.fast
V = Version(3, 1)
STATE = state_of(TENSORS, seed=7)
OBJECTS = (
    "MANIFEST.json",
    "index.jsonl",
    "shard-00000-of-00002.safetensors",
    "shard-00001-of-00002.safetensors",
)
_numbers = itertools.count()


@pytest.fixture
def checkpoints() -> Checkpoints:
    found = Checkpoints(ObjectStore.open(f"memory://damage-{next(_numbers)}"), "run")
    save(found, Version(2, 1), STATE, 2)
    save(found, V, STATE, 2)
    return found


def whole(checkpoints: Checkpoints) -> dict[object, bytearray]:
    return dict(checkpoints.open(V).read([tensor.whole() for tensor in TENSORS]))


def noticed(checkpoints: Checkpoints, name: str) -> None:
    """``verify`` and whoever reads the whole state judge alike: both name the object."""
    problems = checkpoints.verify(V).problems
    assert problems
    assert all(isinstance(problem, Damaged) and name in problem.object for problem in problems)
    assert name in str(checkpoints.verify(V))
    with pytest.raises(Damaged) as caught:
        whole(checkpoints)
    assert name in caught.value.object


def test_undamaged(checkpoints: Checkpoints) -> None:
    """The negative control of all below."""
    assert checkpoints.verify(V).good
    assert "every digest as written" in str(checkpoints.verify(V))
    assert whole(checkpoints) == {tensor.whole(): data for tensor, data in STATE.items()}
    with pytest.raises(AssertionError):
        noticed(checkpoints, OBJECTS[0])


@pytest.mark.parametrize("index", range(len(TENSORS)))
def test_a_flipped_bit_in_a_header_is_noticed_by_whoever_reads_from_that_file(
    checkpoints: Checkpoints, index: int
) -> None:
    """The damage is noticed even if the slice read does not follow the header; a file that is not read is not
    judged.
    """
    wanted, file = TENSORS[index].whole(), OBJECTS[2]
    key = f"{checkpoints.folder(V)}/{file}"
    bad = bytearray(checkpoints.store.get(key))
    bad[40] ^= 4
    checkpoints.store.put(key, bad)
    reader = checkpoints.open(V)
    if any(each == file for each, _, _ in reader.index.covering(wanted)):
        with pytest.raises(Damaged, match=file):
            list(reader.read([wanted]))
    else:
        assert dict(reader.read([wanted])) == {wanted: STATE[TENSORS[index]]}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_flipped_bit_anywhere(checkpoints: Checkpoints, name: str) -> None:
    key = f"{checkpoints.folder(V)}/{name}"
    good = checkpoints.store.get(key)
    for position in range(0, len(good), 3):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        checkpoints.store.put(key, bad)
        noticed(checkpoints, name)


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("keep", [0, 1, 7, 100, -1])
def test_a_truncated_object(checkpoints: Checkpoints, name: str, keep: int) -> None:
    key = f"{checkpoints.folder(V)}/{name}"
    checkpoints.store.put(key, checkpoints.store.get(key)[:keep])
    noticed(checkpoints, name)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_with_something_added(checkpoints: Checkpoints, name: str) -> None:
    key = f"{checkpoints.folder(V)}/{name}"
    checkpoints.store.put(key, checkpoints.store.get(key) + b" ")
    noticed(checkpoints, name)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_missing_object(checkpoints: Checkpoints, name: str) -> None:
    """A manifest that lacks one of its files is damaged too."""
    checkpoints.store.delete(f"{checkpoints.folder(V)}/{name}")
    noticed(checkpoints, name)


@pytest.mark.parametrize("name", OBJECTS)
def test_the_object_of_another_checkpoint(checkpoints: Checkpoints, name: str) -> None:
    """The object is intact, but not the one that was written here."""
    other = Version(5, 1)
    save(checkpoints, other, state_of(TENSORS, seed=8), 2)
    checkpoints.store.put(
        f"{checkpoints.folder(V)}/{name}", checkpoints.store.get(f"{checkpoints.folder(other)}/{name}")
    )
    noticed(checkpoints, name)


def test_a_damaged_manifest_is_never_latest(checkpoints: Checkpoints) -> None:
    key = f"{checkpoints.folder(V)}/MANIFEST.json"
    checkpoints.store.put(key, checkpoints.store.get(key)[:-1])
    assert checkpoints.latest_good() == Version(2, 1)
    assert "MANIFEST.json is damaged" in checkpoints.versions()[-1].damaged


def test_a_quarantine_note_counts_even_when_it_is_damaged(checkpoints: Checkpoints) -> None:
    checkpoints.store.put(f"{checkpoints.folder(V)}/DAMAGED.json", b"")
    assert checkpoints.latest_good() == Version(2, 1)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda known: [known],
    "without a format": lambda known: {**known, "format": None},
    "without a step": lambda known: {key: each for key, each in known.items() if key != "step"},
    "a step in words": lambda known: {**known, "step": "three"},
    "no files": lambda known: {**known, "files": []},
    "files by name": lambda known: {**known, "files": [file["name"] for file in known["files"]]},
    "a size in words": lambda known: {
        **known,
        "files": [{**file, "size": "many"} for file in known["files"]],
    },
    "a layout in words": lambda known: {**known, "layout": "2x1"},
    "a line of numbers": lambda known: {**known, "lineage": [1, 2]},
    "a time in words": lambda known: {**known, "written_at": "today"},
    **{
        f"a file {name!r}": lambda known, name=name: {
            **known,
            "files": [{**known["files"][0], "name": name}, *known["files"][1:]],
        }
        for name in (
            "../g2/shard.safetensors",
            "/etc/passwd",
            "a/../../b",
            ".",
            "",
            "a//b",
            "a\0b",
            ".partial-x",
            None,
            7,
        )
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_of_a_wrong_shape_is_damaged_although_its_digest_is_right(
    checkpoints: Checkpoints, what: str
) -> None:
    key = f"{checkpoints.folder(V)}/MANIFEST.json"
    known, wrong = unseal(checkpoints.store.get(key), key, 2), WRONG[what]
    checkpoints.store.put(key, seal(known))
    assert checkpoints.verify(V).good, "the control: the same content is no damage"
    changed = wrong(known)
    checkpoints.store.put(key, seal(changed) if isinstance(changed, dict) else json.dumps(changed).encode())
    noticed(checkpoints, "MANIFEST.json")
    assert (
        checkpoints.latest_good() == Version(2, 1)
        and "MANIFEST.json is damaged" in checkpoints.versions()[-1].damaged
    )


@pytest.mark.parametrize(
    "lines",
    [
        ["[]"],
        ['{"files": 3}'],
        ['{"files": [["../x.safetensors", 8, "00"]]}'],
        ["HEAD", "[]"],
        ["HEAD", '{"shape": "ab", "tensors": [["w", "parameter", "F32"]], "boxes": [[0, [0], [4]]]}'],
        ["HEAD", '{"shape": [4], "tensors": [["w", "parameter", "F32"]], "boxes": [[9, [0], [4]]]}'],
        ["HEAD", '{"shape": [4], "tensors": [["w", "parameter", "F32"]], "boxes": [[0, "a", [4]]]}'],
    ],
)
def test_an_index_of_a_wrong_shape_is_damaged_although_its_digest_is_right(
    checkpoints: Checkpoints, lines: list[str]
) -> None:
    folder = checkpoints.folder(V)
    head = checkpoints.store.get(f"{folder}/index.jsonl").splitlines()[0].decode()
    raw = "\n".join([head if line == "HEAD" else line for line in lines]).encode()
    known = unseal(checkpoints.store.get(f"{folder}/MANIFEST.json"), "", 2)
    (old,) = (file for file in known["files"] if file["name"] == "index.jsonl")
    old |= {"size": len(raw), "blake3": digest_of(raw)}
    checkpoints.store.put(f"{folder}/index.jsonl", raw)
    checkpoints.store.put(f"{folder}/MANIFEST.json", seal(known))
    noticed(checkpoints, ".safetensors" if "../x" in lines[0] else "index.jsonl")
    assert "is damaged" in checkpoints.damage(V) and not checkpoints.damage(Version(2, 1))
