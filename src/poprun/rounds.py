"""The rounds of an elastic run: when one ends, and with which nodes the next one begins.

A round is one start of all instances. The nodes (one poprun each) share the state of the newest round, and a record of
each node. `decide` is a pure function of these. Every node calls it, and no node leads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .command_line import CommandLine
from .topology import Node, instances_by_node

FIRST_ROUND_PATIENCE = 10.0  # seconds that the first round waits for expected nodes

# What a node writes about itself (`ElasticNode._write_record`):
#     id            random, new for each poprun
#     count         how often the record was written: a node whose count stands still is lost
#     command       a digest of the run's program, and of its numbers of replicas and ipus
#     rank, slots   its place among the nodes; the most instances that it runs
#     address       HOST:PORT of its store
#     round, state  its newest round; "stopped", "running" or "done" (all its instances have succeeded)
#     reached       ids of the nodes that it could reach last
#     unreached     why it could not reach a node for a while, by id
#     checkpoint    the number of calls before the newest checkpoint; -1: none
#     since         `checkpoint` when the node came, or last could not reach a node of the running round
Record = dict[str, Any]
Records = Mapping[str, Record]


@dataclass(frozen=True)
class Round:
    """The state of one start of all instances; `Round()` stands for the time before the first one.

    state:
        runs        nodes start and run their instances
        failed      nodes stop their instances, since an instance has failed
        stopped     nodes stop their instances, since a node is lost or can be added
        finished    all instances have succeeded
        given up    there is no next round
    """

    number: int = -1
    state: str = "stopped"
    why: str = ""  # of the state, as a message for the user
    command: str = ""  # a digest of the run's program, and of its numbers of replicas and ipus
    node: str = ""  # on which the first instance failed
    address: str = ""  # HOST:PORT on the first node: MASTER_ADDR and MASTER_PORT of the instances
    counts: dict[str, int] = field(default_factory=dict)  # instances by node, in the order of the instances
    ids: dict[str, str] = field(default_factory=dict)  # the random id of each node's poprun
    failures: int = 0  # rounds that ended with "failed" since checkpoint `newest_call`
    newest_call: int = -1  # the number of calls before the checkpoint that was newest at the last failure

    @property
    def instances(self) -> int:
        return sum(self.counts.values())

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "given up")

    def first_instance(self, node: str) -> int:
        """Return the index of a node's first instance."""
        names = list(self.counts)
        return sum(self.counts[name] for name in names[: names.index(node)])


@dataclass(frozen=True)
class Me:
    """The node that decides, and what its user has requested."""

    name: str
    request: CommandLine
    node: Node


def decide(newest: Round, records: Records, now: float, me: Me) -> Round:
    """Return `newest`, or the state that has to follow it.

    Args:
        newest:  the state of the newest round
        records: of all nodes that are alive, by name
        now:     seconds since the state was last changed
    """
    if newest.is_over or me.name not in records:
        return newest
    records = _in_order(newest, records)
    if newest.state != "runs":
        is_running = any(record["state"] != "stopped" for record in records.values())
        return newest if is_running else _begin_round(newest, records, now, me)
    is_alive = {name: records.get(name, {}).get("id") == id for name, id in newest.ids.items()}
    if any(is_alive.values()) and not is_alive.get(me.name):
        return newest  # its own nodes decide
    lost = [name for name in is_alive if not is_alive[name]]
    members = {name: records[name] for name in newest.counts if name in records}
    states = {name: record["state"] for name, record in members.items() if record["round"] == newest.number}
    unreached = records[me.name]["unreached"]
    late = [f"{name}{unreached[id]}" for name, id in newest.ids.items() if id in unreached]
    if lost:
        return replace(newest, state="stopped", why=_lost_message(lost))
    if list(states.values()) == ["done"] * len(newest.counts):
        return replace(newest, state="finished")
    if stopped := [name for name, state in states.items() if state == "stopped"]:
        return replace(newest, state="stopped", why=f"node {', '.join(stopped)} has stopped its instances")
    if late:
        return replace(newest, state="stopped", why=f"node {me.name} can't reach node {late[0]}")
    if "done" not in states.values() and _can_grow(newest, records, me):
        return replace(newest, state="stopped")
    return newest


def new_nodes(newest: Round, records: Records, me: Me) -> list[str]:
    """Return the names of nodes that the next round would add to the running round `newest`, for more instances or
    another distribution of them."""
    if records.keys() <= newest.counts.keys():
        return []
    group = _best_group(_in_order(newest, records), me)
    counts = _counts(group, records, me)
    is_same = sorted(counts.values()) == sorted(newest.counts.values())
    is_worth_it = not is_same and sum(counts.values()) >= newest.instances
    return [name for name in group if name not in newest.counts] if is_worth_it else []


def missing_text(records: Records, me: Me) -> str:
    """Return a message that the nodes which are there have too little room for a round; "" if a round can begin."""
    group = _best_group(records, me)
    if _counts(group, records, me):
        return ""
    room = sum(records[name]["slots"] for name in group)
    return f"there is room for {room} instances, and {me.request.fewest_instances} are the fewest"


def _can_grow(newest: Round, records: Records, me: Me) -> bool:
    """Return whether new nodes can be added: a checkpoint has been written since the first of them came. The round's
    first node decides."""
    if me.name != next(iter(newest.counts)):
        return False
    came = [records[name]["since"] for name in new_nodes(newest, records, me)]
    return bool(came) and records[me.name]["checkpoint"] > min(came)


def _begin_round(newest: Round, records: Records, now: float, me: Me) -> Round:
    """Return the round that follows the ended round `newest`; `newest`, if no round can begin (yet)."""
    group = _best_group(records, me)
    counts = _counts(group, records, me)
    if not counts:
        why = missing_text(records, me)
        is_late = now >= me.node.patience
        return replace(newest, state="given up", why=why) if is_late else newest
    is_first = not newest.counts
    if is_first and now < FIRST_ROUND_PATIENCE and len(group) < me.node.count:
        return newest
    lost = [name for name, id in newest.ids.items() if records.get(name, {}).get("id") != id]
    failures, call, why = newest.failures, newest.newest_call, ""
    if newest.state == "failed" and lost:  # the failure of instances that have lost their peers
        why = _lost_message(lost)
    elif newest.state == "failed":
        call = max(record["checkpoint"] for record in records.values())
        failures = failures + 1 if call == newest.newest_call else 1
        if failures > me.request.max_restarts:
            why = f"instances have failed {failures} times without a new checkpoint (--max-restarts)"
            return replace(newest, state="given up", why=why)
    return Round(
        number=max(newest.number, *(record["round"] for record in records.values())) + 1,
        state="runs",
        why=why,
        command=records[me.name]["command"],
        address=records[next(iter(counts))]["address"],
        counts=counts,
        ids={name: records[name]["id"] for name in counts},
        failures=failures,
        newest_call=call,
    )


def _in_order(newest: Round, records: Records) -> Records:
    """Return the records in the order in which their nodes get instances: nodes keep their places."""
    order = list(newest.counts)
    place = {name: order.index(name) if name in order else len(order) for name in records}
    return dict(sorted(records.items(), key=lambda item: (place[item[0]], item[1]["rank"], item[0])))


def _best_group(records: Records, me: Me) -> list[str]:
    """Return the names of nodes that all reach each other and have room for the most instances."""

    def reaches(source: str, target: str) -> bool:
        return records[target]["id"] in records[source]["reached"]

    groups: list[list[str]] = []
    for start in records:
        group = [start]
        for name in records:
            if name != start and all(reaches(name, one) and reaches(one, name) for one in group):
                group.append(name)
        groups.append([name for name in records if name in group])
    return max(groups, key=lambda group: sum(_counts(group, records, me).values()))


def _counts(group: Iterable[str], records: Records, me: Me) -> dict[str, int]:
    """Return the number of instances by node, if these nodes run a round."""
    return instances_by_node(me.request, {name: records[name]["slots"] for name in group})


def _lost_message(names: list[str]) -> str:
    several = "s" if len(names) > 1 else ""
    return f"node{several} {', '.join(names)} lost: poprun has ended there, it is stopped, or the host does not answer"
