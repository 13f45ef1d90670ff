"""Who gives up a place, who gets a thread, and who waits for one."""

from __future__ import annotations

from bngrad_server.rpc.http2.limits.places import Places, ThreadShares


def test_the_client_with_most_places_gives_up_its_first() -> None:
    places: Places[int] = Places(5)
    for member, client in enumerate(("good", "bad", "bad", "good", "bad")):
        places.take(member, client)
    assert places.is_full
    assert places.most_dispensable([0, 3, 4, 2]) == 4
    assert places.most_dispensable([3, 0]) == 3
    assert places.most_dispensable([]) is None
    assert places.most_dispensable([77]) is None
    places.leave(4)
    places.leave(4)
    assert len(places) == 4


def test_a_busy_member_gives_up_its_place_only_for_a_client_with_fewer() -> None:
    places: Places[int] = Places(5)
    for member, client in enumerate(("good", "bad", "bad", "bad", "other")):
        places.take(member, client)
    assert places.to_give_up("good", [0, 4], [2, 3]) == 2
    assert places.to_give_up("good", [0, 3, 4], [2, 1]) == 3
    assert places.to_give_up("bad", [0, 4], [1, 2]) is None
    assert places.to_give_up("bad", [0, 4, 2], [1]) == 2
    assert places.to_give_up("new", [0, 4], []) == 0


def test_a_client_leaves_threads_to_others_and_the_one_with_fewest_is_served_first() -> None:
    shares: ThreadShares[int] = ThreadShares(6)
    assert [shares.take(member, "bad") for member in range(6)] == [True] * 4 + [False] * 2
    assert shares.take(6, "good")
    assert not shares.take(7, "good")
    assert list(shares.waiting) == [4, 5, 7]
    assert shares.serve_next() is None
    shares.leave(0, "bad")
    assert shares.serve_next() == 7
    assert shares.serve_next() is None
    for member in (1, 2, 3):
        shares.leave(member, "bad")
    assert shares.serve_next() == 4
    shares.leave(5, "bad")
    assert shares.serve_next() is None
    assert not list(shares.waiting)
    shares.leave(5, "bad")
    shares.leave(77, "unknown")


def test_those_that_wait_are_served_before_later_ones_of_their_client() -> None:
    shares: ThreadShares[int] = ThreadShares(1)
    assert shares.take(0, "one")
    assert not shares.take(1, "one")
    shares.leave(0, "one")
    assert not shares.take(2, "one")
    assert shares.serve_next() == 1
