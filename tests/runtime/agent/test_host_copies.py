"""Copies of K and V in host memory: only the very ones that are asked for come back, and none beyond the limit."""

from __future__ import annotations

from runtime.agent.sequences.host_copies import HostCopies
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence
from runtime.chains import Array
from runtime.control.agent_io import CopiedIn, CopiedOut, CopyIn, CopyOut, ShareHostMemory
from tests.runtime.virtual import request, spec

#: Bytes of a page; a page set has two of them, for four tokens.
PAGE = 8
TOKENS = 10


def opened(tables: SequencePageTables, epoch: int, tokens: int = TOKENS, seq: str = "s") -> AgentSequence:
    """Return a sequence with K and V of so many tokens."""
    made = AgentSequence(request(seq), epoch, (), ())
    key = made.keys[0] = tables.open(seq, 0, spec())
    made.stages[0] = "m[0:2]"
    if tokens:
        tables.grow(key, tokens)
        tables.fill(key, tokens)
    return made


def saved(tables: SequencePageTables, copies: HostCopies, nbytes: int = 6 * PAGE) -> list[object]:
    """Save a sequence of epoch 3; the copy that arrives has so many bytes."""
    commands = copies.save(opened(tables, 3), TOKENS)
    for command in commands:
        if isinstance(command, CopyOut):
            assert (command.tokens, len(command.pages)) == (TOKENS, 6)
            commands += copies.copied_out(CopiedOut(command.key, Array("uint8", (6, PAGE), bytes(nbytes)), 1))
    copies.check([])
    assert not copies.keys()
    return commands


def test_a_copy_comes_back_once_and_complete() -> None:
    tables = SequencePageTables(20)
    copies = HostCopies(tables, 1000, PAGE)
    assert [each for each in saved(tables, copies) if isinstance(each, ShareHostMemory)] == [ShareHostMemory(6 * PAGE)]
    assert tables.book.free == 20
    back = opened(tables, 4, 0)
    assert copies.claim(back, 3, TOKENS, 0)
    (command,) = copies.begin_due()
    assert isinstance(command, CopyIn) and command.key == back.keys[0] and len(command.pages) == 6
    assert copies.copied_in(CopiedIn(command.key, 1)) == [ShareHostMemory(-6 * PAGE)]
    assert tables.book.tokens_of(back.keys[0]) == TOKENS and not len(copies)
    assert not copies.claim(opened(tables, 5, 0), 3, TOKENS, 0)


def test_only_the_copy_that_is_meant_comes_back() -> None:
    for epoch, tokens in ((2, TOKENS), (4, TOKENS), (3, TOKENS - 1), (3, TOKENS + 1)):
        tables = SequencePageTables(20)
        copies = HostCopies(tables, 1000, PAGE)
        saved(tables, copies)
        assert not copies.claim(opened(tables, 5, 0), epoch, tokens, 0), (epoch, tokens)
    other = opened(tables, 5, 0)
    other.stages[0] = "m[0:1]"
    assert not copies.claim(other, 3, TOKENS, 0)


def test_a_copy_of_another_length_is_dropped() -> None:
    tables = SequencePageTables(20)
    copies = HostCopies(tables, 1000, PAGE)
    changes = [each.change for each in saved(tables, copies, 6 * PAGE - 1) if isinstance(each, ShareHostMemory)]
    assert changes == [6 * PAGE, -6 * PAGE] and not copies.nbytes
    assert not copies.claim(opened(tables, 4, 0), 3, TOKENS, 0)


def test_nothing_is_kept_beyond_the_limit() -> None:
    tables = SequencePageTables(20)
    copies = HostCopies(tables, 6 * PAGE, PAGE)
    saved(tables, copies)
    assert copies.save(opened(tables, 1, seq="t"), TOKENS) == [] and copies.nbytes == 6 * PAGE
    assert tables.book.free == 20


def test_a_later_epoch_keeps_its_copy() -> None:
    tables = SequencePageTables(20)
    copies = HostCopies(tables, 1000, PAGE)
    saved(tables, copies)
    assert copies.closed("s", 2) == [] and len(copies) == 1
    assert copies.closed("s", 3) == [ShareHostMemory(-6 * PAGE)] and not len(copies)


def test_a_sequence_waits_for_pages() -> None:
    tables = SequencePageTables(8)
    copies = HostCopies(tables, 1000, PAGE)
    saved(tables, copies)
    running = opened(tables, 1, 4, "t")
    back = opened(tables, 4, 0)
    assert copies.claim(back, 3, TOKENS, 7)
    assert len(copies.begin_due()) == 1  # six of eight pages are free
    copies.closed("s", 4)
    tables.release(back.keys[0])
    tables.settle([back.keys[0]])
    saved(tables, copies)
    tables.grow(running.keys[0], 4)
    back = opened(tables, 5, 0)
    assert copies.claim(back, 3, TOKENS, 7) and copies.begin_due() == []
    assert copies.overdue(7) == [] and copies.overdue(8) == [back]
    tables.release(running.keys[0])
    assert len(copies.begin_due()) == 1


def test_a_copy_that_is_lost_while_its_sequence_returns_is_counted_once() -> None:
    tables = SequencePageTables(20)
    copies = HostCopies(tables, 1000, PAGE)
    before = opened(tables, 3)
    (share, out) = copies.save(before, TOKENS)
    assert share == ShareHostMemory(6 * PAGE) and isinstance(out, CopyOut)
    back = opened(tables, 4, 0)
    assert copies.claim(back, 3, TOKENS, 0)
    assert copies.copied_out(CopiedOut(out.key, None, 1, "no memory")) == [ShareHostMemory(-6 * PAGE)]
    copies.check([back])
    assert copies.lost == [back] and copies.closed("s", 4) == [] and not copies.nbytes
