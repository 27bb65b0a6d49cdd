"""The gRPC service: decode, call, encode, map errors. Everything it decides, the store decided."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from tiermem import __version__
from tiermem.errors import AccessDenied, InvalidArgument, NotFound, ProtocolError, TiermemError
from tiermem.job_store import JobStore
from tiermem.rpc import codec
from tiermem.rpc.status import status_for
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc
from tiermem.stats import StoreStats
from tiermem.store import TensorStore
from tiermem.trace import ProcessTrace, Recording
from tiermem_daemon import sessions
from tiermem_daemon.file_receiver import FileReceiver
from tiermem_daemon.listener import Peer, ProcessWatch, SideSocket
from tiermem_daemon.trace_requests import process_trace

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger("tiermem.service")
_TRAINER_ANSWERS_S = 5.0


class TierMemService(pb_grpc.TierMemServicer):
    """Runs on the event loop. `embedded`: this daemon belongs to one trainer."""

    def __init__(self, store: TensorStore, side_socket: SideSocket, alive_interval_s: float, embedded: bool) -> None:
        self._store, self._side_socket = store, side_socket
        self._alive_interval_s, self._embedded = alive_interval_s, embedded
        self._sessions: set[sessions.Session] = set()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            version=__version__,
            protocol=codec.PROTOCOL,
            pid=os.getpid(),
            side_socket=str(self._side_socket.path),
            dram_capacity_bytes=self._store.dram_bytes,
            dram_free_bytes=self._store.free_dram_bytes,
            embedded=self._embedded,
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        stats = self._store.snapshot()
        if request.job and all(job.job != request.job for job in stats.jobs):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"NOT_FOUND: no job {request.job[:200]!r} is running here")
        return pb.GetStatusResponse(stats_json=_to_json(stats, request.job))

    async def GetTrace(self, request: pb.GetTraceRequest, context: Context) -> pb.GetTraceResponse:
        try:
            seconds = codec.trace_seconds(request.seconds, "seconds")
            session = self._session_of(request.job)
        except TiermemError as error:
            await context.abort(*status_for(error))
        processes = []
        if not request.daemon_only:
            left_s = context.time_remaining()  # a part of the caller's patience, so that it hears that there is none
            timeout_s = _TRAINER_ANSWERS_S if left_s is None else min(_TRAINER_ANSWERS_S, left_s / 2)
            processes.append(await session.traces.ask(seconds, timeout_s))
        now_s = time.monotonic()
        mine = session.job.trace.since(now_s - seconds)
        processes.append(process_trace("tiermemd", os.getpid(), mine))
        return await asyncio.to_thread(_trace_response, session.job.job, now_s, processes)

    def _session_of(self, job: str) -> sessions.Session:
        """Raises NotFound; InvalidArgument where no name is given and several jobs run."""
        found = [session for session in self._sessions if job in ("", session.job.job)]
        if not found:
            raise NotFound(f"no job {job[:200]!r} is running here" if job else "no job is running here")
        if len(found) > 1:
            names = ", ".join(sorted(session.job.job for session in found)[:10])
            raise InvalidArgument(f"{len(found)} jobs are running here; name one of them: {names}")
        return found[0]

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.ClientMessage],
        context: Context,
    ) -> AsyncIterator[pb.DaemonMessage]:
        try:
            session, peer, watch, files = await self._open(request_iterator)
        except TiermemError as error:
            self._store.count_error(error)
            _log.warning("session refused: %s", error)
            await context.abort(*status_for(error))
        self._sessions.add(session)
        failure: list[TiermemError] = []
        reader = asyncio.create_task(self._read(session, request_iterator, failure))
        reader.add_done_callback(lambda task: self._read_ended(task, session, failure))
        try:
            async for message in session.messages():
                yield message
            if failure:
                await context.abort(*status_for(failure[0]))
        finally:
            reader.cancel()
            watch.close()
            files.close()
            peer.close()
            await asyncio.shield(session.end("disconnected"))
            self._sessions.discard(session)

    async def _open(
        self, requests: AsyncIterator[pb.ClientMessage]
    ) -> tuple[sessions.Session, Peer, ProcessWatch, FileReceiver]:
        try:
            first = await anext(requests)
        except StopAsyncIteration:
            raise ProtocolError("the stream ended before Open") from None
        except DecodeError as error:
            raise ProtocolError(f"the first message cannot be decoded: {error}") from error
        if first.WhichOneof("body") != "open":
            raise ProtocolError(f"the first message of a session is Open, not {first.WhichOneof('body')!r}")
        ask = first.open
        if ask.protocol != codec.PROTOCOL:
            raise ProtocolError(
                f"the client speaks protocol {ask.protocol} (tiermem {ask.version[:50] or '?'}), "
                f"this daemon {codec.PROTOCOL} "
                f"(tiermem {__version__}); install the same version on both sides"
            )
        for field, value in (("dram_bytes", ask.dram_bytes), ("flash_bytes", ask.flash_bytes)):
            if not 0 <= value < 1 << 60:
                raise InvalidArgument(f"open.{field} is {value}, outside 0 .. 2^60")
        peer: Peer | None = self._side_socket.claim(ask.token)
        if peer is None:
            raise AccessDenied("the token was not issued to a live connection of the side socket; connect there first")
        try:
            job = await self._open_job(ask, peer)
            session = sessions.Session(self._store, job, self._alive_interval_s)
            try:
                await self._side_socket.send_descriptor(peer, job.arena_fd, {"session": job.session})
            except BaseException:  # a cancellation too: the client has left
                await asyncio.shield(session.end("disconnected"))
                raise
        except BaseException:
            peer.close()
            raise
        watch = ProcessWatch(peer.pidfd, lambda: _watched(session))
        files = FileReceiver(peer.connection, job.add_file)
        session.opened(__version__)
        return session, peer, watch, files

    async def _open_job(self, ask: pb.Open, peer: Peer) -> JobStore:
        """A thread cannot be cancelled: a job whose client left while it was made is closed as soon as it is there."""
        making = asyncio.create_task(
            asyncio.to_thread(self._store.open_job, ask.job, peer.pid, ask.dram_bytes, ask.flash_bytes)
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(TiermemError):  # it was refused: nobody is left to be told
                job = await making
                await asyncio.to_thread(self._store.close_job, job, "disconnected")
            raise

    async def _read(
        self, session: sessions.Session, requests: AsyncIterator[pb.ClientMessage], failure: list[TiermemError]
    ) -> None:
        try:
            async for message in requests:
                if not session.handle(message):
                    session.end("closed")
                    return
        except (ProtocolError, DecodeError) as cause:
            error = cause if isinstance(cause, ProtocolError) else ProtocolError(f"an undecodable message: {cause}")
            self._store.count_error(error)
            _log.warning("job %r: session closed: %s", session.job.job, error)
            failure.append(error)
            session.end("protocol")
        else:
            session.end("disconnected")

    def _read_ended(self, task: asyncio.Task[None], session: sessions.Session, failure: list[TiermemError]) -> None:
        """A bug must not leave a session that nobody reads: it is logged, reported to the client, and ends that session
        only.
        """
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("job %r: unexpected error", session.job.job, exc_info=error)
            failure.append(
                TiermemError(
                    f"unexpected error in the daemon: {type(error).__name__}: {error}; its log has the traceback"
                )
            )
            self._store.count_error(failure[-1])
            session.end("internal")

    async def close(self) -> None:
        """End every session: the daemon stops."""
        await asyncio.gather(*(session.end("shutdown") for session in self._sessions))


def _watched(session: sessions.Session) -> None:
    session.end("died")


def _trace_response(job: str, now_s: float, processes: list[ProcessTrace]) -> pb.GetTraceResponse:
    rows = [
        pb.TracedProcess(name=p.name, pid=p.pid, spans=codec.encode_spans(Recording(p.spans)), notes=p.notes)
        for p in processes
    ]
    return pb.GetTraceResponse(job=job, now_s=now_s, processes=rows)


def _to_json(stats: StoreStats, job: str) -> bytes:
    table = asdict(stats)
    if job:
        table["jobs"] = [row for row in table["jobs"] if row["job"] == job]
    return json.dumps(table).encode()
