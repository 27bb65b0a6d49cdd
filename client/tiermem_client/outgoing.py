"""The queue of messages to the daemon. What waits together travels together: a message costs a tenth of a millisecond
in Python's gRPC, whatever is in it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator

from tiermem.rpc.codec import MAX_BATCH
from tiermem.rpc.v1 import tiermem_pb2 as pb

_ALONE = ("open", "close", "declare", "adopt", "trace")
"""The session's ends, and messages that are large by themselves."""


class Outgoing:
    """Any thread puts; gRPC's own thread iterates, once. `close` ends the iteration after what was put before."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[pb.ClientMessage | None] = queue.SimpleQueue()

    def put(self, message: pb.ClientMessage) -> None:
        self._waiting.put(message)

    def close(self) -> None:
        self._waiting.put(None)

    def __iter__(self) -> Iterator[pb.ClientMessage]:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            while len(batch) < MAX_BATCH and batch[-1].WhichOneof("body") not in _ALONE:
                try:
                    after = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if after is None:
                    self._waiting.put(None)
                    break
                batch.append(after)
            last = batch.pop() if batch[-1].WhichOneof("body") in _ALONE else None
            if len(batch) == 1:
                yield batch[0]
            elif batch:
                yield pb.ClientMessage(batch=pb.ClientBatch(messages=batch))
            if last is not None:
                yield last
