"""The mailboxes of a process's devices: copies between their memories, sums over replicas, and meetings of threads."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..settings import Place
from ..torch_private import ALIGNMENT
from . import devices
from .call import Commit
from .devices import Transfer
from .instances.all_reduce import TreeNode, sum_siblings, tree_sum
from .instances.connections import PeerFailed
from .mailbox import Arrivals, Mailbox, MessageKey


class Meetings:
    """The mailboxes of all devices, and their meetings."""

    def __init__(self) -> None:
        self.mail: list[DeviceMailbox] = []
        self._changed = threading.Condition()
        self.begin_call()

    def begin_call(self) -> None:
        """Forget a call that failed."""
        self._open, self._failure = dict[tuple[DeviceMailbox, ...], _Meeting](), ""
        for mail in self.mail:
            mail.arrivals = Arrivals()

    def meet(
        self,
        mail: "DeviceMailbox",
        part: Any,
        among: tuple["DeviceMailbox", ...],
        then: Callable[[dict["DeviceMailbox", Any]], Any] = dict,
    ) -> Any:
        """Wait until all mailboxes `among` have called this, each as `mail` and with its `part`; return `then` of the
        parts, which is called once. Raises PeerFailed after `abort`, unless the meeting was over before."""
        with self._changed:
            meeting = self._open.setdefault(among, _Meeting())
            meeting.parts[mail] = part
            if len(meeting.parts) == len(among) and not self._failure:
                meeting.result, meeting.is_over = then(meeting.parts), True
                del self._open[among]
                self._changed.notify_all()
            self._changed.wait_for(lambda: meeting.is_over or self._failure)
            if not meeting.is_over:
                raise PeerFailed(self._failure)
        return meeting.result

    def abort(self, why: str, commits: Sequence[Commit] = ()) -> None:
        """End the waits of all devices, which raise PeerFailed. Stop calls: in a meeting all commit, or none."""
        with self._changed:
            for commit in commits:
                commit.is_stopping = True
            self._failure = self._failure or why
            self._changed.notify_all()
        for mail in self.mail:
            mail.arrivals.fail(PeerFailed(self._failure))


@dataclass
class _Meeting:
    parts: dict["DeviceMailbox", Any] = field(default_factory=dict)
    result: Any = None
    is_over: bool = False


class DeviceMailbox(Mailbox):
    """The mailbox of a device that runs these replicas at a place, for messages of other devices of this process."""

    def __init__(
        self, meetings: Meetings, place: Place, replicas: Sequence[int], device: torch.device
    ) -> None:
        self._meetings, self.place, self.replicas, self.device = meetings, place, replicas, device
        self.arrivals = Arrivals()

    @cached_property
    def _row(self) -> tuple["DeviceMailbox", ...]:
        """The mailboxes of the same replicas, of all places."""
        return tuple(mail for mail in self._meetings.mail if mail.replicas == self.replicas)

    @cached_property
    def _column(self) -> tuple["DeviceMailbox", ...]:
        """The mailboxes of the same place, of all replicas."""
        return tuple(mail for mail in self._meetings.mail if mail.place == self.place)

    def begin_step(self) -> None:
        """Do nothing: messages of a step may be here before it begins, and none is left of the previous one."""

    def send(self, place: Place, key: MessageKey, values: Sequence[Tensor]) -> None:
        """Send values to a place without waiting."""
        other = next(mail for mail in self._row if mail.place == place)
        other.arrivals.add(key, [Transfer(value, other.device) for value in values])

    def take(self, key: MessageKey) -> Sequence[Tensor]:
        """Start to copy the values of a message, and return the copies; raise the error if a device has failed."""
        return [transfer.finish() for transfer in self.arrivals.take(key)]

    def sum(self, values: Tensor) -> None:
        """Sum values over all places, in place."""
        total = values.to(self.device, non_blocking=True, copy=True)
        sent = [total.clone()]
        for other, *_ in self._exchange(
            {mail: sent for mail in self._row if mail is not self}, self._row
        ).values():
            total.add_(other)
        values.copy_(total)

    def all_reduce(self, flats: Sequence[Tensor]) -> None:
        """Sum the values of all replicas into `flats[0]`, as `AllReduce.all_reduce`: each device sums a share of the
        elements. What is sent is a copy, because the caller changes `flats` while it is on its way."""
        share = -(-len(flats[0]) // (len(self._column) * ALIGNMENT)) * ALIGNMENT
        cuts = {mail: slice(n * share, (n + 1) * share) for n, mail in enumerate(self._column)}
        own, others = cuts[self], [mail for mail in self._column if mail is not self]
        numbers = zip(self.replicas, flats, strict=True)
        nodes = sum_siblings(TreeNode(0, replica, [flat]) for replica, flat in numbers)
        terms = {mail: [node.values[0][cuts[mail]].clone() for node in nodes] for mail in others}
        whole = [TreeNode(*node[:2], [node.values[0][own]]) for node in nodes]
        for mail, values in self._exchange(terms, self._column).items():
            positions = sum_siblings(TreeNode(0, replica, []) for replica in mail.replicas)
            whole += [TreeNode(*node[:2], [v]) for node, v in zip(positions, values, strict=True)]
        (total,) = tree_sum(sorted(whole, key=lambda node: node.index << node.level))
        flats[0][own].copy_(total)
        sent = [total.clone()]
        for mail, (value,) in self._exchange({mail: sent for mail in others}, self._column).items():
            flats[0][cuts[mail]].copy_(value)

    def share(self, tensors: Sequence[Tensor], owners: Sequence[tuple[Place, int]]) -> None:
        """Overwrite the tensors of the first device by those of their owners: a call returns its results."""
        first, everyone = self._meetings.mail[0], tuple(self._meetings.mail)
        own = [tensors[number].contiguous() for number in self._owned(owners) if self is not first]
        for mail, values in self._exchange({first: own} if own else {}, everyone).items():
            for number, value in zip(mail._owned(owners), values, strict=True):
                tensors[number].copy_(value)

    def _owned(self, owners: Sequence[tuple[Place, int]]) -> list[int]:
        return [
            i for i, (place, replica) in enumerate(owners) if place == self.place and replica in self.replicas
        ]

    def _exchange(
        self,
        values: "Mapping[DeviceMailbox, Sequence[Tensor]]",
        among: tuple["DeviceMailbox", ...],
    ) -> "dict[DeviceMailbox, list[Tensor]]":
        """Send values to other devices, and return those that they send to this one. All `among` must call it."""
        sent = {mail: [Transfer(value, mail.device) for value in own] for mail, own in values.items()}
        parts = self._meetings.meet(self, sent, among)
        return {mail: [each.finish() for each in own[self]] for mail, own in parts.items() if self in own}

    def commit_together(self, commit: Callable[[], None]) -> None:
        """Wait for all devices, and commit at all or, after an interrupt, at none. The work that this device starts
        from now on waits for the others' work so far: they may still copy weights that updates will overwrite."""
        event = devices.event_of(self.device) if devices.has_queue(self.device) else None
        parts = self._meetings.meet(self, (commit, event), tuple(self._meetings.mail), _commit_all)
        for mail, (_, other) in parts.items():
            if event is not None and other is not None and mail is not self:
                devices.wait_for(other, self.device)

    def run_once(self, part: Any, function: Callable[[Sequence[Any]], None]) -> None:
        """Its work on a device follows what the device's own thread has started: both use the default stream."""
        self._meetings.meet(self, part, tuple(self._meetings.mail), lambda parts: function([*parts.values()]))

    def abort(self, why: str) -> None:
        """End the waits of all devices."""
        self._meetings.abort(why)


def _commit_all(parts: "dict[DeviceMailbox, Any]") -> "dict[DeviceMailbox, Any]":
    for commit, _ in parts.values():
        commit()
    return parts
