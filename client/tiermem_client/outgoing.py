"""The queue of messages to the daemon, and the lock under which they are decided. What is decided in one critical
section, and what waits together, travels together: a message costs a tenth of a millisecond in Python's gRPC, whatever
is in it, and waking gRPC's thread costs whoever does it, so it is done when the lock is let go, and what does not press
waits a little for what comes after it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from tiermem.grants.messages import ClientBody
from tiermem.rpc import grants
from tiermem.rpc.v1 import tiermem_pb2 as pb

_ALONE = ("open", "close", "declare", "adopt", "trace")
"""The session's ends, and messages that are large by themselves."""

LINGER_S = 0.05
"""How long what does not press waits at most."""

_Item = ClientBody | pb.ClientMessage


class Outgoing:
    """Any thread puts; gRPC's own thread iterates, once, and encodes. `close` ends the iteration after what was put
    before. `sent`: messages handed to gRPC, a batch being one.
    """

    def __init__(self, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._lock = threading.Lock()  # owner: this queue; held for arithmetic
        self._waiting: deque[_Item] = deque()  # guarded by _lock
        self._told = False  # guarded by _lock; the iterating thread knows that something waits
        self._closed = False  # guarded by _lock
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether something is pressing
        self.sent = 0

    def put(self, *items: _Item, pressing: bool = True) -> None:
        """Messages of the grant protocol as values, which must not change any more, or any message as it travels. Those
        that do not press are sent with the next one that does, or after a while.
        """
        with self._lock:
            self._waiting.extend(items)
            signal, self._told = pressing or not self._told, True
        if signal:
            self._signals.put(pressing)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._signals.put(True)

    def __iter__(self) -> Iterator[pb.ClientMessage]:
        for message in self._messages():
            self.sent += 1
            yield message

    def _messages(self) -> Iterator[pb.ClientMessage]:
        waiting: deque[_Item] = deque()
        closed = False
        while not closed or waiting:
            if not waiting:
                self._wait()
            closed = self._gather(waiting)
            together: list[_Item] = []
            while waiting and len(together) < grants.MAX_BATCH and not _is_alone(waiting[0]):
                together.append(waiting.popleft())
            if together:
                yield grants.encode_together(together)
            elif waiting:
                alone = waiting.popleft()
                assert isinstance(alone, pb.ClientMessage)
                yield alone

    def _wait(self) -> None:
        """Until something presses, or has waited long enough."""
        pressing, until_s = self._signals.get(), time.monotonic() + self._linger_s
        with contextlib.suppress(queue.Empty):
            while not pressing:
                pressing = self._signals.get(timeout=max(0.0, until_s - time.monotonic()))

    def _gather(self, into: deque[_Item]) -> bool:
        """Everything that waits. True where nothing comes after it."""
        with self._lock:
            into.extend(self._waiting)
            self._waiting.clear()
            self._told = False
            return self._closed


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
