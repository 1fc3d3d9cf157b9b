"""The mailbox of a process: messages to and from the other processes of a replica, and their meetings."""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from ..ir import Plan
from ..settings import Place, Settings
from .devices import memory_and_layout
from .instances.all_reduce import AllReduce
from .instances.connections import Message, Tag, TorchThread
from .instances.process_group import ProcessGroup

MessageKey = tuple[str, int, int]  # the channel, the index (micro-batch) of the row that sends, the replica
_PURPOSE = "values of another ipu"  # the purpose of waits, for warnings
_FIRST_TAG = 1000  # above those of `Tag`


class Arrivals:
    """The messages of a step that have arrived, and the receives that wait for one."""

    def __init__(self) -> None:
        self._lock, self._failure = threading.Lock(), None
        self._messages: dict[MessageKey, list[Tensor]] = {}
        self._waiting: dict[MessageKey, Callable[[], None]] = {}

    def add(self, key: MessageKey, values: list[Tensor]) -> None:
        with self._lock:
            self._messages[key] = values
            wake = self._waiting.pop(key, None)
        if wake is not None:
            wake()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            waiting = [*self._waiting.values()]
            self._waiting.clear()
        for wake in waiting:
            wake()

    def has(self, key: MessageKey, wake: Callable[[], None]) -> bool:
        with self._lock:
            if key in self._messages or self._failure is not None:
                return True
            self._waiting[key] = wake
            return False

    def take(self, key: MessageKey) -> list[Tensor]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return self._messages.pop(key)


class ProcessMailbox:
    """The mailbox of a process whose replica spans several processes: each message is a header of a fixed size, then
    the memory of each value as it lies. A thread for each peer receives the messages of a step."""

    def __init__(self, group: ProcessGroup, plan: Plan, settings: Settings) -> None:
        self._group, self._ranks = group, settings.counts.processes_of_replica()
        self._norms = AllReduce(group, Tag.NORMS)
        self._results = AllReduce(group, Tag.RESULTS, self._ranks)
        # By peer, the number of messages that it sends to this place in a step, and that come at any time. The others
        # stay in the peer's memory until a row of an earlier micro-batch has ended. By channel: (peer, first tag).
        self._expected: dict[int, int] = defaultdict(int)
        self._awaited: dict[str, tuple[int, int]] = {}
        names = 0
        for row, task in enumerate(plan.tasks):
            if task.kind == "receive":
                message = task.instructions[0]
                names = max(names, len(message.names))
                peer = self._ranks[plan.places[message.peer].process]
                if any(edge.behind for edge in task.after):
                    self._awaited[message.channel] = peer, _FIRST_TAG + row * plan.micro_batches
                elif not plan.is_elsewhere(row, Place(settings.counts.part)):
                    self._expected[peer] += plan.micro_batches if task.index == "micro_batch" else 1
        self._header_size = 256 + 384 * names  # bytes
        self._lock = threading.Lock()  # keeps the parts of a message together
        # Messages of this step, each with the memory that is sent; None ends the thread that frees it.
        self._sending: SimpleQueue[tuple[Message, Tensor] | None] = SimpleQueue()
        self._failures: list[BaseException] = []  # of these messages
        self._sender = TorchThread(self._await_sends, self._sending, self._failures)
        self.arrivals = Arrivals()

    def begin_step(self) -> None:
        """Start to receive the messages of a step, and to wait for those that are sent."""
        self._sending.put(None)  # ends the thread of a step that failed
        self.arrivals, self._sending, self._failures = Arrivals(), SimpleQueue(), []
        self._sender = TorchThread(self._await_sends, self._sending, self._failures)
        self._sender.start()
        for peer, count in self._expected.items():
            TorchThread(self._receive_messages, self.arrivals, peer, Tag.PLACES, count).start()

    def send(self, place: Place, key: MessageKey, values: Sequence[Tensor]) -> None:
        """Start to send a header, and the memory of each value. The receiver gets equal strides, and the same offset
        from a multiple of 64 bytes, because kernels choose by both. The values must not change before the next
        `commit_together`."""
        forms, memories = [], list[Tensor]()
        for memory, layout in map(memory_and_layout, values):
            forms.append([str(memory.dtype).partition(".")[2], *layout, len(memory)])
            memories += [memory.view(torch.uint8)] if len(memory) else []
        text = json.dumps([key, forms]).encode().ljust(self._header_size)
        assert len(text) == self._header_size
        header, peer = torch.frombuffer(bytearray(text), dtype=torch.uint8), self._ranks[place.process]
        tag = self._tag_of(key)
        with self._lock:
            for memory in (header, *memories):
                self._sending.put((self._group.send(memory, peer, tag), memory))

    def _tag_of(self, key: MessageKey) -> int:
        """Return the tag of a message: one of its own, if its receiver chooses the time."""
        channel, index, _ = key
        return self._awaited[channel][1] + index if channel in self._awaited else Tag.PLACES

    def _await_sends(
        self, sending: SimpleQueue[tuple[Message, Tensor] | None], failures: list[BaseException]
    ) -> None:
        """Free the memory of each message once it is sent: the function of a thread. Gloo has no test for that."""
        try:
            while (sent := sending.get()) is not None:
                self._group.wait(sent[:1], _PURPOSE)
                del sent
        except BaseException as error:  # whatever it is, `_finish_sends` raises it
            failures.append(error)

    def _receive_messages(self, arrivals: Arrivals, peer: int, tag: int, count: int) -> None:
        """Receive `count` messages with the tag `tag` from a peer. It is the function of a thread."""
        try:
            for _ in range(count):
                # Without variables for a message: this thread must not hold it while it waits for the next one.
                arrivals.add(*self._receive_message(peer, tag))
        except BaseException as error:  # whatever it is, the receives raise it
            arrivals.fail(error)

    def _receive_message(self, peer: int, tag: int) -> tuple[MessageKey, list[Tensor]]:
        header = torch.empty(self._header_size, dtype=torch.uint8)
        self._group.wait([self._group.receive(header, peer, tag)], _PURPOSE)
        key, forms = json.loads(header.numpy().tobytes())
        values, begun = list[Tensor](), list[Message]()
        for dtype, shape, stride, start, size in forms:
            memory = torch.empty(start + size, dtype=getattr(torch, dtype))
            values.append(memory.as_strided(shape, stride, start))
            if size:
                begun.append(self._group.receive(memory[start:].view(torch.uint8), peer, tag))
        self._group.wait(begun, _PURPOSE)
        return tuple(key), values

    def begin_receive(self, key: MessageKey, wake: Callable[[], None]) -> bool:
        """Start to receive a message, if its sender waits for that. Return whether `take` can return the message now;
        if not, another thread calls `wake` once when it can. After a failure `take` raises the error at once. To be
        called once for each message."""
        if key[0] in self._awaited:
            peer, _ = self._awaited[key[0]]
            TorchThread(self._receive_messages, self.arrivals, peer, self._tag_of(key), 1).start()
        return self.arrivals.has(key, wake)

    def take(self, key: MessageKey) -> Sequence[Tensor]:
        """Return the values of a message, and forget it; raise the error if a peer has failed."""
        return self.arrivals.take(key)

    def sum(self, values: Tensor) -> None:
        """Sum values over all processes, in place. All must call it."""
        self._norms.all_reduce([values])

    def share(self, tensors: Sequence[Tensor], owners: Sequence[tuple[Place, int]]) -> None:
        """Send this process's tensors to the others of the replica, and receive theirs. It has one local replica."""
        pairs = [
            (t.view(-1).view(torch.uint8), place.process)
            for t, (place, _) in zip(tensors, owners, strict=True)
        ]
        kept = [(memory, owner) for memory, owner in pairs if memory.numel()]
        self._finish_sends()
        self._results.broadcast_by_owners([memory for memory, _ in kept], [owner for _, owner in kept])

    def commit_together(self, commit: Callable[[], None]) -> None:
        """Wait until all messages of this process are sent; then commit with all processes: an error in one is an error
        in all."""
        self._finish_sends()
        self._group.commit_together(commit)

    def _finish_sends(self) -> None:
        """Wait until all messages of this process are sent."""
        self._sending.put(None)
        self._sender.join()
        for failure in self._failures:
            raise failure

    def abort(self, why: str) -> None:
        """Close the connections of all processes."""
        self._sending.put(None)
        self._group.abort(why)
