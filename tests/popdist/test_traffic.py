"""What instances send is what is counted without them, and near the bound: also of more than a machine can run."""

import os
from itertools import accumulate
from pathlib import Path

import processes
import pytest
import torch

import popdist
from popengine.compile.partition import BUCKET
from popengine.run.instances.all_reduce import AllReduce
from popengine.run.instances.connections import Tag
from popengine.run.instances.process_group import group_of_size

MB = 1 << 20


class Traffic:
    """In place of `Connections`: counts the messages of an instance, on tensors without memory, and waits for none."""

    def __init__(self, place, size):
        self.rank, self.size, self.sent, self.received = place, size, [], []
        self.all_reduce = AllReduce(self, 0)

    def send(self, value, peer, tag):
        self.sent.append(value.nbytes)
        return None, peer

    def receive(self, value, peer, tag):
        self.received.append(value.nbytes)
        return None, peer

    def wait(self, messages, what):
        pass


def of_a_sum(elements, place, instances, replicas=1):
    """What a sum of float32 gradients, in buckets, costs the instance at `place`. `replicas`: of each instance."""
    found = Traffic(place, instances)
    for start in range(0, elements, BUCKET // 4):
        size = min(BUCKET // 4, elements - start)
        found.all_reduce.all_reduce([torch.empty(size, device="meta") for _ in range(replicas)])
    return found


def connections(place, instances):
    """TCP connections of an instance: to each other one for torch's own group and one for the sums, and to the store,
    which instance 0 keeps."""
    return 2 * (instances - 1) + 1 + (instances if place == 0 else 0)


def test_64_instances_send_the_gradients_nearly_twice_in_few_messages_over_few_connections():
    gradients = 25_557_032  # of ResNet-50, 102 MB
    bound = 2 * 63 / 64 * gradients * 4
    for place in (0, 31, 63):
        found = of_a_sum(gradients, place, 64, replicas=16)
        for messages in (found.sent, found.received):
            assert sum(messages) == pytest.approx(bound, rel=0.005)  # the last share is smaller
            assert len(messages) == 2 * 63 * 25  # pieces of 64 KB
    assert connections(0, 64) == 191  # 65 of them because it keeps the store
    assert connections(63, 64) == 127


def test_replicas_that_are_no_whole_node_of_the_tree_cost_a_message_more_each():
    assert sum(of_a_sum(MB, 0, 4, replicas=2).sent) == 2 * 3 * MB  # 2 (N - 1) / N of 4 MB
    odd = sum(of_a_sum(MB, 0, 4, replicas=3).sent)
    assert odd == (2 + 1) * 3 * MB  # replicas 0 to 2 are two nodes: 0 + 1, and 2


@pytest.mark.parametrize("instances", [2, 64])
def test_a_sharded_optimizer_state_sends_no_more_than_sums_do(instances):
    shares = [3 * 64 * instances] * instances
    found = Traffic(0, instances)
    found.all_reduce.reduce_scatter([torch.empty(sum(shares), device="meta")], [0, *accumulate(shares)])
    weights = [torch.empty(count, device="meta") for count in shares]
    found.all_reduce.broadcast_by_owners(weights, range(instances))
    sums = of_a_sum(sum(shares), 0, instances)
    assert (found.sent, found.received) == (sums.sent, sums.received)


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
        found = of_a_sum(elements, place, size)
        expected = (len(found.sent), sum(found.sent), connections(place, size))
        assert ended.value == expected
