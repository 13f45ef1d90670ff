from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bngrad_server.runtime.long_readers import LongReaders


class Readers(LongReaders):
    """Ends of pipes that are readable, each with a name and an owner."""

    def __init__(self) -> None:
        super().__init__()
        self.pipes: dict[int, tuple[int, str]] = {}

    def open(self, name: str, owner: str) -> int:
        reader, writer = os.pipe()
        os.write(writer, b"x")
        self.pipes[reader] = writer, name
        self.add(reader, owner)
        return reader

    def names(self, count: int) -> list[str]:
        """The names of the next ones, none of which is read."""
        numbers = [self.next() for _ in range(count)]
        return [self.pipes[number][1] for number in numbers if number is not None]


@pytest.fixture
def readers() -> Iterator[Readers]:
    readers = Readers()
    yield readers
    readers.close()
    for reader, (writer, _) in readers.pipes.items():
        os.close(reader)
        os.close(writer)


def test_owners_take_turns_however_many_descriptors_they_have(readers: Readers) -> None:
    many = {readers.open(f"many {number}", "many") for number in range(100)}
    readers.open("one", "one")
    readers.open("another", "another")
    assert readers.count_ready() == 102
    turns = readers.names(300)
    assert turns[1::3] == 100 * ["one"]
    assert turns[2::3] == 100 * ["another"]
    assert len(set(turns[::3])) == 100
    for reader in many:
        readers.remove(reader)
    assert readers.names(2) == ["one", "another"]


def test_only_what_is_ready_has_its_turn(readers: Readers) -> None:
    assert readers.next() is None
    reader = readers.open("read", "a")
    readers.open("ready", "b")
    os.read(reader, 1)
    assert readers.names(3) == 3 * ["ready"]
    assert reader in readers


def test_an_owner_may_come_again(readers: Readers) -> None:
    reader = readers.open("first", "a")
    os.close(reader)  # as by a connection that is closed
    readers.remove(reader)
    assert reader not in readers
    writer, _ = readers.pipes.pop(reader)
    os.close(writer)
    readers.open("second", "a")
    assert readers.names(2) == 2 * ["second"]
