"""The queue of messages to the daemon, and the lock under which they are decided. What is decided in one critical
section, and what waits together, travels together: a message costs a tenth of a millisecond in Python's gRPC, whatever
is in it, and waking gRPC's thread costs whoever does it, so it is done when the lock is let go.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from tiermem.grants.messages import ClientBody
from tiermem.rpc import codec
from tiermem.rpc.v1 import tiermem_pb2 as pb

_ALONE = ("open", "close", "declare", "adopt", "trace")
"""The session's ends, and messages that are large by themselves."""

_Item = ClientBody | pb.ClientMessage


class Outgoing:
    """Any thread puts; gRPC's own thread iterates, once, and encodes. `close` ends the iteration after what was put
    before. `sent`: messages handed to gRPC, a batch being one.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Sequence[_Item] | None] = queue.SimpleQueue()
        self.sent = 0

    def put(self, *items: _Item) -> None:
        """Messages of the grant protocol as values, which must not change any more, or any message as it travels."""
        self._waiting.put(items)

    def close(self) -> None:
        self._waiting.put(None)

    def __iter__(self) -> Iterator[pb.ClientMessage]:
        for message in self._messages():
            self.sent += 1
            yield message

    def _messages(self) -> Iterator[pb.ClientMessage]:
        waiting: deque[_Item] = deque()
        closed = False
        while not closed or waiting:
            closed = closed or self._gather(waiting, block=not waiting)
            together: list[_Item] = []
            while waiting and len(together) < codec.MAX_BATCH and not _is_alone(waiting[0]):
                together.append(waiting.popleft())
            if together:
                yield codec.encode_together(together)
            elif waiting:
                alone = waiting.popleft()
                assert isinstance(alone, pb.ClientMessage)
                yield alone

    def _gather(self, into: deque[_Item], block: bool) -> bool:
        """Everything that waits; at least something if `block`. True where it was the last."""
        try:
            while (items := self._waiting.get(block)) is not None:
                into.extend(items)
                block = False
        except queue.Empty:
            return False
        return True


def _is_alone(item: _Item) -> bool:
    return isinstance(item, pb.ClientMessage) and item.WhichOneof("body") in _ALONE


class ClientLock(threading.Condition):
    """A reentrant lock in a condition, which calls `on_release` as the last thing under the lock before it is let go:
    at the end of the outermost critical section, and before a wait.
    """

    def __init__(self, on_release: Callable[[], None]) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        self._on_release = on_release
        self._depth = 0  # guarded by itself
        self._acquire, self._release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        self._acquire()
        self._depth += 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._depth == 1:
                self._on_release()
        finally:
            self._depth -= 1
            self._release()

    def wait(self, timeout: float | None = None) -> bool:
        self._on_release()
        depth, self._depth = self._depth, 0
        try:
            return super().wait(timeout)
        finally:
            self._depth = depth
