"""One client's session: its job, its ordered queue of messages, and its end. Lives on the event loop; only `wake` is
called from the mover's threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from tiermem.bundle import BundleSpec
from tiermem.errors import InvalidArgument, ProtocolError, ResourceExhausted, TiermemError
from tiermem.grants.messages import ClientBody
from tiermem.job_store import JobStore
from tiermem.rpc import codec, grants
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.store import TensorStore
from tiermem_daemon.trace_requests import TraceRequests

_log = logging.getLogger("tiermem.sessions")


class Session:
    """Decodes what the client sends, acts on the job's store, and yields what the daemon has to say, in the order it
    was decided.
    """

    def __init__(self, store: TensorStore, job: JobStore, alive_interval_s: float) -> None:
        self.job = job
        self._store = store
        self._alive_interval_s = alive_interval_s
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._ready = asyncio.Event()
        self._waking = False  # it is on its way to the loop that there is something to send
        self._direct: list[pb.DaemonMessage] = []
        self._ending: asyncio.Task[None] | None = None
        self.traces = TraceRequests(job.pid, self._say)
        job.wake = self._wake_from_any_thread

    def opened(self, version: str) -> None:
        """Queue the first message."""
        layout = self.job.layout
        self._say(
            pb.DaemonMessage(
                opened=pb.Opened(
                    session=self.job.session,
                    job=self.job.job,
                    arena_bytes=layout.arena_bytes,
                    frame_bytes=layout.frame_bytes,
                    bundle_cap_bytes=layout.bundle_cap_bytes,
                    flash_quota_bytes=self.job.flash_quota_bytes,
                    version=version,
                )
            )
        )

    def handle(self, message: pb.ClientMessage) -> bool:
        """Act on one message; False when it was Close. Raises ProtocolError: the session then ends."""
        match message.WhichOneof("body"):
            case "declare":
                specs: list[BundleSpec] = codec.decode_specs(message.declare, self.job.layout.bundle_cap_bytes)
                self.job.declare(specs)
            case "admit":
                self._admit(message.admit)
            case "adopt":
                self._adopt(message.adopt)
            case "notice":
                self._note(message.notice)
            case "device_report":
                self.job.report_device(codec.decode_device_report(message.device_report))
            case "trace":
                self.traces.told(message.trace)
            case "batch":
                self._handle_batch(grants.messages_of(message.batch))
            case "close":
                return False
            case "open" | None:
                raise ProtocolError(f"message {message.WhichOneof('body')!r} is not expected inside a session")
            case _:
                self.job.receive(grants.decode_client(message))
        return True

    def _handle_batch(self, messages: Sequence[pb.ClientMessage]) -> None:
        """Neighbours of the grant protocol are acted on together, which serves who waits once."""
        together: list[ClientBody] = []
        for message in messages:
            if message.WhichOneof("body") in grants.BODIES:
                together.append(grants.decode_client(message))
                continue
            if together:
                self.job.receive(*together)
                together = []
            self.handle(message)
        if together:
            self.job.receive(*together)

    def _admit(self, admit: pb.Admit) -> None:
        name, floor_specs = codec.decode_admit(admit)
        try:
            lane = self.job.admit(name, floor_specs)
        except ResourceExhausted as error:
            self._store.count_error(error)
            self._say(pb.DaemonMessage(admitted=pb.Admitted(lane=name, code=error.code, message=str(error))))
        else:
            self._say(pb.DaemonMessage(admitted=pb.Admitted(lane=lane.name, budget_frames=lane.budget_frames)))

    def _adopt(self, adopt: pb.Adopt) -> None:
        adoption = codec.decode_adopt(adopt)
        try:
            bundle = self.job.adopt(adoption)
        except InvalidArgument as error:
            self._store.count_error(error)
            self._say(
                pb.DaemonMessage(adopted=pb.Adopted(spec_id=adoption.spec_id, code=error.code, message=str(error)))
            )
        else:
            self._say(pb.DaemonMessage(adopted=pb.Adopted(spec_id=adoption.spec_id, bundle=bundle)))

    def _note(self, message: pb.Notice) -> None:
        notice = codec.decode_notice(message)
        self.job.note(notice)
        _log.warning("job %r: %s (%d): %r", self.job.job, notice.kind, notice.count, notice.text)

    async def messages(self) -> AsyncIterator[pb.DaemonMessage]:
        """Everything to send, until the session has ended; a sign of life where there is nothing else for a while."""
        clock, interval_s = self._loop.time, self._alive_interval_s
        said_s = clock()
        beat = self._loop.call_later(interval_s, self._beat)
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                while batch := self._waiting():
                    said_s = clock()
                    yield batch[0] if len(batch) == 1 else pb.DaemonMessage(batch=pb.DaemonBatch(messages=batch))
                if self._ending is not None and self._ending.done() and not self._direct and not self.job.outbox:
                    return
                if beat.when() <= clock():
                    if said_s + interval_s <= clock():
                        said_s = clock()
                        yield pb.DaemonMessage(alive=pb.Alive())
                    beat = self._loop.call_at(said_s + interval_s, self._beat)
        finally:
            beat.cancel()

    def _beat(self) -> None:
        """It may be time for a sign of life. One timer for many messages: one for each would cost more than they do."""
        self._ready.set()

    def _waiting(self) -> list[pb.DaemonMessage]:
        """What is to be sent now, in order."""
        batch: list[pb.DaemonMessage] = []
        while self._direct and len(batch) < grants.MAX_BATCH:
            batch.append(self._direct.pop(0))
        outbox = self.job.outbox
        batch += grants.encode_decided([outbox.popleft() for _ in range(min(len(outbox), grants.MAX_BATCH))])
        return batch

    def end(self, reason: str) -> asyncio.Task[None]:
        """Start freeing what the session had, once; the first reason counts."""
        if self._ending is None:
            self.traces.close()
            self._ending = asyncio.create_task(self._end(reason))
        return self._ending

    async def _end(self, reason: str) -> None:
        try:
            await asyncio.to_thread(self._store.close_job, self.job, reason)
        except TiermemError as error:
            self._store.count_error(error)
            _log.error("job %r did not end cleanly: %s", self.job.job, error)
        if reason == "closed":
            self._say(pb.DaemonMessage(closed=pb.Closed()))
        self._loop.call_soon(self._ready.set)

    def _say(self, message: pb.DaemonMessage) -> None:
        self._direct.append(message)
        self._ready.set()

    def _wake_from_any_thread(self) -> None:
        if not self.job.outbox:
            return
        if threading.get_ident() == self._thread:
            self._ready.set()
        elif not self._waking:
            self._waking = True
            _call_soon(self._loop, self._awake)

    def _awake(self) -> None:
        self._waking = False  # first: what is decided from now on may be missed by who is woken now
        self._ready.set()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop has closed: the daemon is past serving anybody
        _log.debug("a message was decided after the event loop had closed")
