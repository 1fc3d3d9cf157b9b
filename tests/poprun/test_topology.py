"""Who runs what: tables and nodes, as values."""

import pytest

from poprun.command_line import CommandLine
from poprun.topology import (
    Node,
    instance_launch,
    instances_by_node,
    local_instance_count,
    node_from_variables,
    share_text,
    topology_table,
)

FOUR = CommandLine(("python3",), replicas=8, instances=4, ipus_per_replica=2)
SPANNED = CommandLine(("python3",), replicas=2, instances=4, ipus_per_replica=6)


@pytest.mark.parametrize(
    "request_, shares",
    [
        (FOUR, [f"replicas {i} to {i + 1}, ipus 0 to 1" for i in (0, 2, 4, 6)]),
        (SPANNED, [f"replica {r}, ipus {i} to {i + 2}" for r in (0, 1) for i in (0, 3)]),
    ],
)
def test_an_instance_has_some_replicas_or_some_ipus_of_one(request_, shares):
    launches = [instance_launch(request_, 4, instance) for instance in range(4)]
    assert [share_text(launch) for launch in launches] == shares


def test_the_table_shows_what_each_instance_runs_and_where():
    assert topology_table(SPANNED, ["a", "b"]).splitlines() == [
        "instance  host  runs",
        "0         a     replica 0, ipus 0 to 2",
        "1         a     replica 0, ipus 3 to 5",
        "2         b     replica 1, ipus 0 to 2",
        "3         b     replica 1, ipus 3 to 5",
    ]
    request = CommandLine(("python3",), replicas=32, instances=2)
    assert topology_table(request, ["localhost"]).splitlines()[1:] == [
        "0         localhost  replicas 0 to 15, ipu 0",
        "1         localhost  replicas 16 to 31, ipu 0",
    ]


@pytest.mark.parametrize(
    "fewest, most, slots, counts",
    [
        (2, 8, [8], [8]),
        (2, 8, [4, 4], [4, 4]),
        (2, 8, [8, 8], [4, 4]),
        (2, 8, [3], [2]),
        (2, 8, [3, 3], [2, 2]),
        (1, 8, [1, 1, 1], [1, 1, 0]),
        (2, 8, [1, 5], [1, 3]),
        (3, 8, [3], [0]),
        (4, 8, [1, 1], [0, 0]),
    ],
)
def test_as_many_instances_as_divide_eight_replicas_are_dealt_out_evenly(fewest, most, slots, counts):
    request = CommandLine(("python3",), replicas=8, instances=most, fewest_instances=fewest)
    expected = {str(node): count for node, count in enumerate(counts) if count}
    assert instances_by_node(request, {str(node): slot for node, slot in enumerate(slots)}) == expected


@pytest.mark.parametrize(
    "slots, counts",
    [
        ([8], [8]),  # each has an ipu of the four of a replica
        ([4, 3], [2, 2]),
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([1, 1, 1], [1, 1, 0]),
        ([1], [0]),
    ],
)
def test_the_ipus_of_two_replicas_are_dealt_out_evenly(slots, counts):
    request = CommandLine(("python3",), replicas=2, instances=8, fewest_instances=2, ipus_per_replica=4)
    expected = {str(node): count for node, count in enumerate(counts) if count}
    assert instances_by_node(request, {str(node): slot for node, slot in enumerate(slots)}) == expected


def test_instances_that_nodes_can_not_share_are_refused():
    with pytest.raises(ValueError, match="4 instances can't be shared out over 3 nodes"):
        local_instance_count(FOUR, 3)


def test_a_node_comes_from_the_environment():
    assert node_from_variables({}) == Node(0, 1, "127.0.0.1", 0)
    variables = {"POPRUN_NUM_NODES": "4", "POPRUN_NODE_RANK": "3", "MASTER_ADDR": "a"}
    assert node_from_variables(variables) == Node(3, 4, "a", 29500)
    assert node_from_variables({**variables, "MASTER_PORT": "5"}).port == 5


@pytest.mark.parametrize(
    "variables, complaint",
    [
        ({"POPRUN_NUM_NODES": "two"}, "POPRUN_NUM_NODES is 'two', and must be a number"),
        ({"POPRUN_NUM_NODES": "2"}, "POPRUN_NODE_RANK is '', and must be a number"),
        ({"POPRUN_NUM_NODES": "2", "POPRUN_NODE_RANK": "2"}, "the nodes are 0 to 1"),
        (
            {"POPRUN_NUM_NODES": "2", "POPRUN_NODE_RANK": "1"},
            "MASTER_ADDR, the address of node 0, is missing",
        ),
    ],
)
def test_a_faulty_environment_is_named(variables, complaint):
    with pytest.raises(ValueError, match=complaint):
        node_from_variables(variables)
