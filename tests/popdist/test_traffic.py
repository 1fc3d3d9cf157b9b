"""What instances send is what is counted without them, and near the bound: also of more than a machine can run."""

import os
from pathlib import Path

import processes
import pytest
import torch
import traffic

import popdist
from popengine.run.instances.all_reduce import AllReduce
from popengine.run.instances.connections import Tag
from popengine.run.instances.process_group import group_of_size

MB = 1 << 20


def test_64_instances_send_the_gradients_nearly_twice_in_few_messages_over_few_connections():
    gradients = 25_557_032  # of ResNet-50, 102 MB
    bound = 2 * 63 / 64 * gradients * 4
    for place in (0, 31, 63):
        found = traffic.of_a_sum({torch.float32: gradients}, place, 64, replicas=16)
        for moved in (found.bytes_sent, found.bytes_received):
            assert moved == pytest.approx(bound, rel=0.005)  # the last share is smaller
        assert found.messages_sent == found.messages_received == 2 * 63 * 25  # pieces of 64 KB
    assert traffic.connections(0, 64) == 191  # 65 of them because it keeps the store
    assert traffic.connections(63, 64) == 127


def test_replicas_that_are_no_whole_node_of_the_tree_cost_a_message_more_each():
    even = traffic.of_a_sum({torch.float32: MB}, 0, 4, replicas=2)
    odd = traffic.of_a_sum({torch.float32: MB}, 0, 4, replicas=3)
    assert even.bytes_sent == 2 * 3 * MB  # 2 (N - 1) / N of 4 MB
    assert odd.bytes_sent == (2 + 1) * 3 * MB  # replicas 0 to 2 are two nodes: 0 + 1, and 2


def counted(elements):
    """The messages that a real group is given, and its connections."""
    popdist.init()
    here = group_of_size(popdist.getNumInstances())
    popdist.synchronize()
    sent = []
    send = here.send
    here.send = lambda value, other, tag: (sent.append(value.nbytes), send(value, other, tag))[1]
    flat = torch.ones(elements)
    AllReduce(here, Tag.SUMS).all_reduce([flat])
    assert flat.eq(here.size).all()
    found = len(sent), sum(sent), established()
    popdist.synchronize()  # nobody leaves before all have counted
    return found


def established():
    """The TCP connections of this process."""
    mine = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
    ]
    return sum(f"socket:[{words[9]}]" in mine for words in lines if words[3] == "01")


def test_real_instances_send_what_was_counted():
    elements, size = 300_001, 3
    for place, ended in enumerate(processes.run(counted, size, elements)):
        assert ended.error == ""
        found = traffic.of_a_sum({torch.float32: elements}, place, size)
        expected = (found.messages_sent, found.bytes_sent, traffic.connections(place, size))
        assert ended.value == expected
