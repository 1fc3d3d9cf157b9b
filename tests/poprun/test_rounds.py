"""Rounds of an elastic run: which state follows, as a table; and which nodes count as present."""

import json
import time
from dataclasses import replace

import pytest

from poprun.command_line import CommandLine
from poprun.nodes import ElasticNode
from poprun.presence import STANDSTILL, Presence
from poprun.rounds import FIRST_ROUND_PATIENCE, Me, Round, decide, missing_text
from poprun.shared_folder import SharedFolder
from poprun.topology import Node

REQUEST = CommandLine(("train",), replicas=4, instances=4, fewest_instances=2, max_restarts=1)
NAMES = "abc"
DONE, STOPPED, SAVED = {"state": "done"}, {"state": "stopped"}, {"checkpoint": 6}


def me(name="a", **node):
    return Me(name, REQUEST, Node(**node))


def nodes(names="ab", **more):
    """Records of nodes that wait for a round, each with room for two instances; `more`: by name, what differs."""
    return {
        name: {
            "id": f"id-{name}",
            "count": 1,
            "command": "digest",
            "rank": 0,
            "slots": 2,
            "address": f"{name}:1",
            "round": -1,
            "state": "stopped",
            "reached": [f"id-{other}" for other in NAMES if other != name],
            "unreached": {},
            "checkpoint": 4,
            "since": 4,
            "waits": {},
            **more.get(name, {}),
        }
        for name in names
    }


def runs(names="ab", number=3, **more):
    """A running round of these nodes, two instances each."""
    counts, ids = dict.fromkeys(names, 2), {name: f"id-{name}" for name in names}
    return Round(number, "runs", command="digest", counts=counts, ids=ids, newest_call=2, **more)


def running(names="ab", **more):
    given = {name: {"round": 3, "state": "running", **more.get(name, {})} for name in names}
    return nodes(names, **given)


def lost(names):
    several = "s" if "," in names else ""
    return f"node{several} {names} lost: poprun has ended there, it is stopped, or the host does not answer"


def stopped(why="", names="ab"):
    return replace(runs(names), state="stopped", why=why)


def case(newest, records, expected=None, now=1, who=me()):  # noqa: B008  a constant
    """The newest state, the records of nodes, what follows (None: the same), seconds since the change, who decides."""
    return newest, records, now, who, expected or newest


SMALL, NO_ROOM = nodes("a", a={"slots": 1}), "there is room for 1 instances, and 2 are the fewest"
TABLE = {
    "nothing": case(runs(), running(), now=99),
    "all are done": case(runs(), running(a=DONE, b=DONE), replace(runs(), state="finished"), who=me("b")),
    "one is done": case(runs(), running(a=DONE)),
    "a node was done in an earlier round": case(runs(), running(a=DONE, b={**DONE, "round": 2})),
    "a record is missing": case(runs(), running("a"), stopped(lost("b"))),
    "another poprun has the name": case(runs(), running(b={"id": "new"}), stopped(lost("b"))),
    "two of three are lost": case(runs("abc"), running("b"), stopped(lost("a, c"), "abc"), who=me("b")),
    "a node has stopped": case(runs(), running(b=STOPPED), stopped("node b has stopped its instances")),
    "a node has not begun yet": case(runs(), running(b={**STOPPED, "round": 2})),
    "a node can't be reached": case(
        runs(), running(a={"unreached": {"id-b": " at b:2"}}), stopped("node a can't reach node b at b:2")
    ),
    "another one can't reach a node": case(runs(), running(b={"unreached": {"id-a": " at"}})),
    "a node outside can't reach one": case(
        runs(), {**running(), **nodes("c", c={"unreached": {"id-a": " at"}})}, who=me("c")
    ),
    "a node outside sees a lost one": case(runs(), running("bc"), who=me("c")),
    "a node outside is the last one": case(runs(), nodes("c"), stopped(lost("a, b")), who=me("c")),
    "a record of this node is missing": case(runs(), running("b")),
    "a node has come": case(runs("a"), {**running("a"), **nodes("b")}),
    "a node has come, then a checkpoint": case(
        runs("a"), {**running("a", a=SAVED), **nodes("b")}, stopped(names="a")
    ),
    "only the first node adds others": case(runs(), {**running(b=SAVED), **nodes("c")}, who=me("b")),
    "no node is added at the end": case(
        runs("a"),
        {**running("a", a=SAVED | DONE), **nodes("b", b={"since": 9})},
        replace(runs("a"), state="finished"),
    ),
    "a node has come that has no room": case(runs(), {**running(a=SAVED), **nodes("c", c={"slots": 0})}),
    "a node has come that can't be reached": case(
        runs("a"), {**running("a", a={**SAVED, "reached": []}), **nodes("b")}
    ),
    "a node still runs": case(replace(runs(), state="failed"), running(a=STOPPED)),
    "all have finished": case(replace(runs(), state="finished"), nodes()),
    "the run was given up": case(replace(runs(), state="given up"), nodes()),
    "expected nodes may come": case(Round(), nodes("a"), now=FIRST_ROUND_PATIENCE - 1, who=me(count=2)),
    "too little room": case(Round(), SMALL, now=599),
    "too little room for too long": case(Round(), SMALL, Round(state="given up", why=NO_ROOM), now=600),
}


@pytest.mark.parametrize("what", TABLE)
def test_a_state_follows_from_the_state_before_and_from_the_records(what):
    newest, records, now, who, expected = TABLE[what]
    assert decide(newest, records, now, who) == expected


def begun(newest, records, now=1.0, **node):
    """The parts of the next round that its beginning decides."""
    found = decide(newest, records, now, me(**node))
    assert found.state == "runs" and found.command == "digest"
    first = next(iter(found.counts))
    assert found.address == f"{first}:1"
    assert found.ids == {name: f"id-{name}" for name in found.counts}
    return found


def test_the_first_round_begins_with_all_nodes_that_have_come():
    assert begun(Round(), nodes(b={"rank": 0}, a={"rank": 1}), count=2).counts == {"b": 2, "a": 2}
    assert begun(Round(), nodes("a"), FIRST_ROUND_PATIENCE + 1, count=2).counts == {"a": 2}


def test_nodes_keep_their_places():
    before = stopped(names="ba")
    assert list(begun(before, nodes("abc", c={"rank": -1})).counts) == ["b", "a", "c"]
    assert begun(before, nodes("ac")).counts == {"a": 2, "c": 2}


def test_the_number_of_a_round_is_higher_than_all_that_a_node_has_seen():
    """A damaged state does not say which rounds there were."""
    assert begun(stopped(), nodes()).number == 4
    assert begun(Round(), nodes(b={"round": 8})).number == 9


def test_of_nodes_that_do_not_reach_each_other_the_group_with_the_most_room_runs():
    split = {"c": {"reached": [], "slots": 1}, "a": {"reached": ["id-b"]}, "b": {"reached": ["id-a"]}}
    assert begun(Round(), nodes("abc", **split)).counts == {"a": 2, "b": 2}
    one_way = nodes(b={"reached": []})
    assert begun(Round(), one_way).counts == {"a": 2}


def test_failures_without_a_new_checkpoint_are_counted_and_limited():
    failed = replace(runs(), state="failed", node="b")
    first = begun(failed, nodes())
    assert (first.failures, first.newest_call) == (1, 4)
    second = decide(replace(first, state="failed", node="b"), nodes(a={"round": 4}), 1, me())
    assert second.state == "given up"
    assert second.why == "instances have failed 2 times without a new checkpoint (--max-restarts)"
    later = begun(replace(first, state="failed"), nodes(b={"checkpoint": 6}))
    assert (later.failures, later.newest_call) == (1, 6)


def test_a_failure_after_which_a_node_is_lost_does_not_count():
    """The instances of the others have lost their peers, and fail first."""
    after = begun(replace(runs(), state="failed"), nodes("a"))
    assert (after.failures, after.why) == (0, lost("b"))


def test_what_is_missing_is_said_until_a_round_can_begin():
    assert missing_text(nodes("a", a={"slots": 1}), me()) == (
        "there is room for 1 instances, and 2 are the fewest"
    )
    assert missing_text(nodes(), me()) == ""


# ---- presence ------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


def record(count, id="one"):
    return json.dumps({"id": id, "count": count})


def test_a_node_is_lost_when_its_record_stands_still_and_present_when_it_changes(clock):
    presence = Presence()
    for second in range(40):
        clock.now += 1
        presence.update({"still": record(1), "alive": record(second), "new": record(1, id=str(second))})
        expected = {"alive", "new"} | ({"still"} if second < STANDSTILL - 1 else set())
        assert presence.alive().keys() == expected
    presence.update({"still": record(2)})
    assert presence.alive().keys() == {"still"}


def test_the_record_of_a_killed_poprun_is_removed_and_the_own_one_never(tmp_path):
    mine, other = (SharedFolder(str(tmp_path), f"/tmp/poprun-{name}") for name in ("mine", "other"))
    mine.write_record(record(1)), other.write_record(record(1))
    mine.remove_records([mine.name, other.name, "gone"])
    assert mine.read_records().keys() == {mine.name}
    other.write_record(record(2))  # it was only stopped
    assert mine.read_records().keys() == {mine.name, other.name}


def test_an_unusable_folder_is_a_warning_each_minute(clock, tmp_path, capfd):
    node = ElasticNode(replace(REQUEST, checkpoint_dir=str(tmp_path)), Node(), f"{tmp_path}/poprun-x")
    (tmp_path / ".poprun").rmdir()
    (tmp_path / ".poprun").touch()  # a file in place of the folder
    for _ in range(150):
        node.round_state(is_done=False)
        clock.now += 1
    assert capfd.readouterr().err.count("this node tries again") == 3


def test_while_this_process_is_stopped_no_node_is_lost(clock):
    presence = Presence()
    presence.update({"other": record(1)})
    clock.now += 3600
    presence.update({"other": record(1)})
    assert presence.alive().keys() == {"other"}


@pytest.mark.parametrize("text", ["", "{", "7", "[]", "null", "[" * 100_000, '{"id": 1}', '{"count": 1}'])
def test_a_record_that_is_damaged_counts_as_unchanged(clock, text):
    presence = Presence()
    presence.update({"other": record(1), "new": text})
    presence.update({"other": text, "new": text})
    assert presence.alive() == {"other": {"id": "one", "count": 1}}
