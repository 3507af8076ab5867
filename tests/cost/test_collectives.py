"""Times by hand: links of 1 and 10 ms, of 100 and 10 MB/s."""

import pytest
from support.costs import machine

from trainer.cost.collectives import Group, add, of_ranks, time, two_levels
from trainer.cost.machine import Link
from trainer.cost.messages import Message

INSIDE, ACROSS = Link(0.001, 100e6, 1e-9), Link(0.01, 10e6, 2e-9)
OWN = machine(8, 4, ACROSS, inside=INSIDE)


def test_a_ring_takes_a_round_for_each_other_rank_twice() -> None:
    wire = time(Message("all_reduce", 8e6), Group(1, 4), OWN)
    assert wire.seconds == pytest.approx(6 * 0.001 + 1.5 * 8e6 / 100e6)
    assert wire.cpu_s == pytest.approx(2 * 1.5 * 8e6 * 1e-9)  # it receives as much


def test_a_flat_ring_has_the_bandwidth_of_all_ranks_of_a_node() -> None:
    wire = time(Message("all_reduce", 8e6), Group(2, 4), OWN)
    assert wire.seconds == pytest.approx(1.75 * (2 * 0.01 + 6 * 0.001) + 1.75 * 8e6 / 40e6)


def test_an_all_to_all_crosses_with_each_rank_s_own_share() -> None:
    wire = time(Message("all_to_all", 8e6), Group(2, 4), OWN)
    crossing = 8e6 * 4 / 8  # of a rank's rows, half go to the other node
    assert wire.seconds == pytest.approx(7 / 8 * (2 * 0.01 + 6 * 0.001) + crossing / 10e6)


def test_a_tree_takes_rounds_by_the_logarithm_of_nodes() -> None:
    wire = time(Message("all_reduce", 0.0001), Group(1024, 4), OWN, "tree")
    assert wire.seconds == pytest.approx(2 * (10 * 0.01 + 3 * 0.001), rel=1e-6)
    gathers = [time(Message("all_gather", 1.0), Group(1024, 4), OWN, name) for name in ("tree", "ring")]
    assert gathers[0] == gathers[1]  # NCCL gathers by rings alone


def test_two_levels_add_up() -> None:
    wire = two_levels(8e6, Group(2, 4), OWN, [Message("all_reduce", 2e6)])
    inside, across = 2 * (3 * 0.001 + 0.75 * 8e6 / 100e6), 2 * 0.01 + 2e6 / 10e6
    assert wire.seconds == pytest.approx(inside + across)


def test_the_algorithms_differ_in_rounds_alone_if_messages_are_large() -> None:
    """Of 32 nodes, a ring needs 254 rounds across, two levels 62; with a gigabyte neither counts."""
    group, size = Group(32, 4), 1e9
    ring, tree = (time(Message("all_reduce", size), group, OWN, name).seconds for name in ("ring", "tree"))
    assert ring == pytest.approx(tree, rel=0.06)


def test_the_library_s_own_collectives_have_shares_of_the_rate() -> None:
    own = machine(4, 1, Link(0.0, 10e6, 2e-9, all_gather=0.8, reduce_scatter=0.5))
    for name, share in (("all_gather", 0.8), ("reduce_scatter", 0.5), ("all_reduce", 1.0)):
        message = Message(name, 8e6)
        whole, found = (time(message, Group(4, 1), own, library=library) for library in (False, True))
        assert found.seconds == pytest.approx(whole.seconds / share) and found.cpu_s == whole.cpu_s


def test_a_wire_alone_takes_what_the_cores_of_the_rank_allow() -> None:
    wire = time(Message("all_gather", 8e6), Group(4, 1), machine(4, 1, Link(0.0, 10e6, 1e-7)))
    assert wire.alone_s(2.0) == wire.seconds == pytest.approx(0.6)
    assert wire.alone_s(0.5) == pytest.approx(2 * 6e6 * 1e-7 / 0.5)


def test_one_rank_and_no_bytes_take_no_time() -> None:
    assert time(Message("all_reduce", 8e6), Group(1, 1), OWN) == add([])
    assert time(Message("all_reduce", 0), Group(2, 4), OWN) == add([])


def test_neighbours_share_nodes() -> None:
    assert [of_ranks(ranks, OWN) for ranks in (2, 4, 8)] == [Group(1, 2), Group(1, 4), Group(2, 4)]
