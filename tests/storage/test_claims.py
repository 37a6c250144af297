"""The claims on a run: each incarnation is claimed once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from storage.errors import Exists
from storage.journal import claim_owner, latest_claim, newest_owner, owner_of, owners
from storage.objects import ObjectStore
from tests.support.stores import Stale

pytestmark = pytest.mark.fast


@pytest.fixture
def store(request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore.open(f"memory://{request.node.name}")


def test_incarnations_are_claimed_once(store: ObjectStore) -> None:
    assert owners(store, "run") == {}
    assert [claim_owner(store, "run", {"address": name}) for name in "abc"] == [1, 2, 3]
    assert {number: claim["address"] for number, claim in owners(store, "run").items()} == {
        1: "a",
        2: "b",
        3: "c",
    }
    assert claim_owner(store, "other", {}) == 1


def test_of_many_claimants_each_gets_a_number_of_its_own(tmp_path: Path) -> None:
    store, numbers = ObjectStore.open(str(tmp_path)), list[int]()
    threads = [
        threading.Thread(target=lambda: numbers.append(claim_owner(store, "run", {}))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


def test_a_damaged_claim_says_nothing_and_stays_claimed(store: ObjectStore) -> None:
    claim_owner(store, "run", {"address": "a"})
    key = "run/owner/000001.json"
    store.put(key, store.get(key).replace(b'"a"', b'"b"'))
    assert (
        owners(store, "run") == {} and owner_of(store, "run", 1) is None and latest_claim(store, "run") == 1
    )
    assert claim_owner(store, "run", {}) == 2
    with pytest.raises(Exists):
        store.put_if_absent(key, b"")


def test_claims_that_a_bucket_does_not_list_yet_count(store: ObjectStore) -> None:
    """The control is what the listing shows."""
    for name in "ab":
        claim_owner(store, "run", {"address": name})
        stale = Stale(store)
        assert (
            claim_owner(store, "run", {"address": f"{name} again"})
            == claim_owner(stale, "run", {"address": "after"}) - 1
        )
        assert newest_owner(stale, "run") == newest_owner(store, "run") and owners(stale, "run") == owners(
            store, "run"
        )
        assert len(stale.list("run/owner/")) == len(owners(stale, "run")) - 2
