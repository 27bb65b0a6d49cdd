"""Asking one trainer what it did lately. Lives on the event loop.

The trainer answers from the thread that reads its stream. One that is stopped does not: then the trace is without its
part, and says so.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from tiermem.errors import ProtocolError
from tiermem.rpc import codec
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.trace import ProcessTrace, Recording

MAX_UNANSWERED = 8
"""Questions that a trainer may owe an answer to; it is asked no more then."""

_ENDED = "the trainer's session has ended"
_LOST = "older spans of the time asked for have been overwritten"


def process_trace(name: str, pid: int, recording: Recording, *notes: str) -> ProcessTrace:
    """With a note where the recording is not complete."""
    return ProcessTrace(name, pid, recording.spans, (*notes, *(() if recording.complete else (_LOST,))))


class TraceRequests:
    """The questions that are open. `say` queues a message to the trainer."""

    def __init__(self, pid: int, say: Callable[[pb.DaemonMessage], None]) -> None:
        self._pid, self._say = pid, say
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[ProcessTrace] | None] = {}  # None: nobody waits for it any more
        self._asked_s: dict[int, float] = {}
        self._closed = False

    async def ask(self, seconds: float, timeout_s: float) -> ProcessTrace:
        """The trainer's spans of the last `seconds`; after `timeout_s` none, and a note."""
        if self._closed:
            return self._nothing(_ENDED)
        if len(self._open) == MAX_UNANSWERED:
            return self._nothing(f"the trainer owes the answers to {MAX_UNANSWERED} earlier questions; is it stopped?")
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._open[number], self._asked_s[number] = answer, time.monotonic()
        self._say(pb.DaemonMessage(ask_trace=pb.AskTrace(id=number, seconds=seconds)))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return self._nothing(f"the trainer has not answered within {timeout_s:.1f} s; is it stopped?")
        finally:
            if number in self._open:
                self._open[number] = None

    def told(self, message: pb.Trace) -> None:
        """An answer. Raises ProtocolError for what was not asked, or has been answered; and as codec.decode_trace."""
        number, now_s, recording = codec.decode_trace(message)
        if number not in self._open:
            raise ProtocolError(f"trace.id is {number}, which is no open question")
        answer, asked_s = self._open.pop(number), self._asked_s.pop(number)
        if answer is None or answer.done():
            return
        notes = []
        if not asked_s <= now_s <= time.monotonic():
            notes.append(f"its clock differs from the daemon's by {now_s - time.monotonic():.3f} s")
        answer.set_result(process_trace("trainer", self._pid, recording, *notes))

    def close(self) -> None:
        """The session ends: nobody waits for an answer any more."""
        self._closed = True
        for answer in self._open.values():
            if answer is not None and not answer.done():
                answer.set_result(self._nothing(_ENDED))

    def _nothing(self, note: str) -> ProcessTrace:
        return ProcessTrace("trainer", self._pid, (), (note,))
