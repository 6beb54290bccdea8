"""Ranks meet at a store that may be older than they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from perception.distributed.environment import RankEnvironment
from perception.distributed.meeting import open_store
from perception.errors import UserError

SIZE = 3


@pytest.fixture
def agents_store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """What torchrun serves when it is given a port: one store for all attempts."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def attempt(store: TCPStore, ranks: range, timeout_seconds: float = 20) -> list[Store]:
    def join(rank: int) -> Store:
        return open_store(RankEnvironment(rank, SIZE, rank, SIZE), ("127.0.0.1", store.port), timeout_seconds)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(join, ranks))


def test_ranks_started_again_read_nothing_of_the_dead(agents_store: TCPStore) -> None:
    seen = set()
    for number in range(3):
        stores = attempt(agents_store, range(SIZE))
        for rank, store in enumerate(stores):
            assert not store.check(["address"]) or rank > 0
            store.set("address", f"{number}")
        assert {store.get("address").decode() for store in stores} == {f"{number}"}
        seen.add(stores[0].get("address"))
    assert len(seen) == 3


def test_an_attempt_of_which_a_rank_never_came_does_not_disturb_the_next(agents_store: TCPStore) -> None:
    with pytest.raises(UserError, match=r"rank 0 of 3 could not meet .*rank 2 did not come within 0.3 s"):
        attempt(agents_store, range(SIZE - 1), timeout_seconds=0.3)
    stores = attempt(agents_store, range(SIZE))
    stores[0].set("address", "new")
    assert [store.get("address") for store in stores] == [b"new"] * SIZE
