"""One session with the daemon: the ordered queues, the grant table, the arena's address space, and who waits for what.

`lock` is the client lock (a reentrant lock in a condition). It guards the grant table, the address space and everything
in `tiermem_client.residency`; waiting releases it. What was decided under it is handed to gRPC when it is let go. A
reader thread takes messages off the stream and wakes the waiters.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import grpc

from tiermem import __version__
from tiermem.bundle import BundleSpec, Mode
from tiermem.errors import DaemonTimeout, DaemonUnavailable, TiermemError, Unsupported, error_for
from tiermem.file_pieces import Adoption
from tiermem.grants.messages import Accessed, Surrender
from tiermem.grants.table import GrantTable, Lease, Waiter
from tiermem.notices import Notice
from tiermem.plan import Access
from tiermem.rpc import codec, grants
from tiermem.rpc.status import error_from_rpc
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.stats import DeviceReport
from tiermem.trace import WAITS, ProcessTrace, Span, TraceRing
from tiermem_client.address_space import AddressSpace
from tiermem_client.channel import Connection
from tiermem_client.outgoing import ClientLock, Outgoing
from tiermem_client.side_channel import SideChannel

_log = logging.getLogger("tiermem.session")
MAIN = "main"
_WAIT_SLICE_S = 0.25
_PARTS_KEPT_QUIET = 16
"""The end of leases of so small a part of the arena can wait to be told: the daemon looks for what to do with room when
more of it has come together (`grants.serving.WINDOW_PARTS`).
"""


class Session:
    """Opened by the constructor; `close` ends it, idempotent. Raises DaemonUnavailable, DaemonTimeout,
    ResourceExhausted, InvalidArgument.

    `timeout_s`: how long the daemon may be silent (it gives a sign of life every second) before who waits gets
    DaemonTimeout.
    """

    def __init__(
        self,
        connection: Connection,
        job: str,
        dram_bytes: int,
        flash_bytes: int,
        timeout_s: float,
        new_space: Callable[[int, int, int], AddressSpace] = AddressSpace,
    ) -> None:
        self.connection, self.timeout_s = connection, timeout_s
        self.lock = ClientLock(self._hand_over)
        self.table = GrantTable([MAIN])  # guarded by lock
        self.stall_s = 0.0  # guarded by lock
        self.trace = TraceRing()
        self._error: TiermemError | None = None  # guarded by lock
        self._closing = False  # guarded by lock
        self._closed = False  # guarded by lock; there is no address space any more
        self._admitted: pb.Admitted | None = None  # guarded by lock
        self._adopted: dict[int, pb.Adopted] = {}  # guarded by lock; by spec
        self._heard_at = time.monotonic()  # guarded by lock
        self._heard = 0  # guarded by lock; messages
        self._pid = os.getpid()
        _sessions.add(self)
        self._outgoing = Outgoing()
        self._side = SideChannel()
        token = self._side.connect(Path(connection.info.side_socket), timeout_s)
        self._outgoing.put(
            pb.ClientMessage(
                open=pb.Open(
                    token=token,
                    protocol=codec.PROTOCOL,
                    job=job,
                    dram_bytes=dram_bytes,
                    flash_bytes=flash_bytes,
                    version=__version__,
                )
            )
        )
        self._stream = connection.stub.Session(iter(self._outgoing))
        try:
            self.opened = self._first_message()
            fd, _ = self._side.receive_descriptor(timeout_s)
        except BaseException:
            self._stream.cancel()
            self._side.close()
            raise
        self.frames = self.opened.arena_bytes // self.opened.frame_bytes
        self.address_space = new_space(fd, self.opened.arena_bytes, self.opened.frame_bytes)  # guarded by lock
        self._reader = threading.Thread(target=self._read, name="tiermem-session", daemon=True)
        self._reader.start()

    def _first_message(self) -> pb.Opened:
        # The arena is prefaulted before this message, so it may take longer than a round trip; a dead daemon ends the
        # stream.
        timer = threading.Timer(self.timeout_s + 60, self._stream.cancel)
        timer.daemon = True
        timer.start()
        try:
            first: pb.DaemonMessage = next(self._stream)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        except StopIteration:
            raise DaemonUnavailable("the daemon ended the session while opening it") from None
        finally:
            timer.cancel()
            timer.join()
        if first.WhichOneof("body") != "opened":
            raise DaemonUnavailable(f"the daemon began the session with {first.WhichOneof('body')!r}")
        return first.opened

    # -- requests; the caller holds the lock

    def declare(self, specs: Sequence[BundleSpec]) -> None:
        """Register forms of bundles; in batches below the message limit."""
        self._check()
        batch: list[BundleSpec] = []
        tensors = 0
        for spec in specs:
            batch.append(spec)
            tensors += 1 + len(spec.tensors)
            if tensors > 4000:
                self._put(codec.encode_specs(batch))
                batch, tensors = [], 0
        if batch:
            self._put(codec.encode_specs(batch))

    def admit(self, lane: str, floor_specs: Sequence[int]) -> int:
        """Own a budget (frames) that covers the set. Raises ResourceExhausted naming the bundles."""
        with self.lock:
            self._check()
            self._admitted = None
            self._put(pb.ClientMessage(admit=pb.Admit(lane=lane, floor_specs=floor_specs)))
            self._wait(lambda: self._admitted is not None, "an admission")
            answer = self._admitted
            assert answer is not None
            if answer.code:
                raise error_for(answer.code, answer.message)
            return answer.budget_frames

    def send_file(self, number: int, fd: int) -> None:
        """Pass a file in, for `adopt` to name. The attaching thread's alone. Raises as SideChannel.send_file."""
        self._check()
        self._side.send_file(number, fd, self.timeout_s)

    def adopt(self, adoptions: Sequence[Adoption]) -> list[int]:
        """New bundles, version 1, whose bytes are in files; their ids, in order. Raises InvalidArgument where a file is
        too short by now.
        """
        with self.lock:
            self._check()
            for adoption in adoptions:
                self._put(codec.encode_adopt(adoption))
            self._wait(lambda: all(a.spec_id in self._adopted for a in adoptions), "an adoption")
            answers = [self._adopted.pop(adoption.spec_id) for adoption in adoptions]
            for answer in answers:
                if answer.code:
                    raise error_for(answer.code, answer.message)
                self.table.adopted(answer.bundle)
        return [answer.bundle for answer in answers]

    def accessed(self, access: Access) -> None:
        """Say what comes next. Nothing depends on it but what the daemon foresees."""
        with self.lock:
            if self.alive:
                self.table.accessed(MAIN, access)

    def take(self, targets: Sequence[int], mode: Mode) -> list[Lease | None]:
        """Leases by grants that have come ahead of their use, without a wait; None where there is none."""
        with self.lock:
            self._check()
            return self.table.take(MAIN, targets, mode)

    def demand(self, target: int, mode: Mode, what: object) -> Lease:
        """Ask for a lease and wait for it (the lock is released meanwhile). Raises the daemon's typed refusal, or
        DaemonUnavailable.
        """
        with self.lock:
            self._check()
            waiter: Waiter = self.table.demand(MAIN, target, mode)
            asked_at = time.monotonic()
            try:
                self._wait(lambda: not waiter.open, f"{mode.name.lower()} of {what}")
            finally:
                now_s = time.monotonic()
                self.stall_s += now_s - asked_at
                name, epoch = f"{mode.name.lower()} {what}", waiter.demand.epoch
                self.trace.add(Span(WAITS, name, asked_at, now_s, bundle=_granted(waiter), epoch=epoch))
            if waiter.error is not None:
                raise waiter.error
            assert waiter.lease is not None
            return waiter.lease

    def commit(self, updated: Sequence[tuple[int, int]], consumed: Sequence[int] = ()) -> None:
        """One transaction; see GrantTable.commit."""
        with self.lock:
            self._check()
            self.table.commit(updated, consumed)

    def done(self, serials: Iterable[int]) -> None:
        """Leases end, after what was written under them was committed."""
        with self.lock:
            self.table.done(*serials)

    def discard(self, bundles: Sequence[int]) -> None:
        with self.lock:
            self.table.discard(bundles)

    def supersede(self, pairs: Sequence[tuple[int, int]]) -> None:
        """One transaction; see GrantTable.supersede."""
        with self.lock:
            self._check()
            self.table.supersede(pairs)

    def notice(self, notice: Notice) -> None:
        """Tell the daemon, which counts and logs it. At most MAX_NOTICES in a session."""
        with self.lock:
            self._check()
            self._put(codec.encode_notice(notice))

    def report_device(self, report: DeviceReport) -> None:
        """Tell the daemon, for its statistics."""
        with self.lock:
            self._check()
            self._outgoing.put(codec.encode_device_report(report))

    def status(self) -> bytes:
        """This job's part of the daemon's snapshot, as JSON."""
        self.check_usable()
        with self.lock:
            self._hand_over(all_of_it=True)
        try:
            answer: pb.GetStatusResponse = self.connection.stub.GetStatus(
                pb.GetStatusRequest(job=self.opened.job), timeout=self.timeout_s
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return answer.stats_json

    def daemon_trace(self, start_s: float, patience_s: float) -> list[ProcessTrace]:
        """What the daemon has done for this job since `start_s` (time.monotonic()), and a little more. Not to be called
        under the lock. Raises as `status` (the daemon may take `patience_s`), ProtocolError.
        """
        self._check()
        asked_s = time.monotonic()
        seconds = asked_s - start_s + 1.0  # that the question takes time loses nothing
        request = pb.GetTraceRequest(job=self.opened.job, seconds=min(seconds, 86400.0), daemon_only=True)
        try:
            answer: pb.GetTraceResponse = self.connection.stub.GetTrace(request, timeout=patience_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        away_s = answer.now_s - time.monotonic()
        differs = (f"its clock differs by {away_s:.3f} s",) if not asked_s - time.monotonic() <= away_s <= 0 else ()
        return [
            ProcessTrace(p.name, p.pid, codec.decode_spans(p.spans).spans, (*p.notes, *differs))
            for p in answer.processes
        ]

    # -- the machinery

    def _put(self, message: pb.ClientMessage) -> None:
        """A message that is no value of the grant protocol; after what was decided before."""
        self._hand_over(all_of_it=True)
        self._outgoing.put(message)

    def _hand_over(self, all_of_it: bool = False) -> None:
        """What the table has decided goes to gRPC's thread, which is woken where something presses. An access waits for
        what is used in it: nothing depends on it.
        """
        table, outbox = self.table, self.table.outbox
        if not outbox:
            return
        pressing = all_of_it or table.presses(MAIN, self.frames // _PARTS_KEPT_QUIET)
        if pressing or len(outbox) > 1 or type(outbox[0]) is not Accessed:
            if pressing:
                table.told()
            self._outgoing.put(*outbox, pressing=pressing)
            outbox.clear()

    def renew_lock(self) -> None:
        """In a forked child: the lock may have been held at the fork by a thread that is not here."""
        self.lock = ClientLock(self._hand_over)

    def check_usable(self) -> None:
        """Raise Unsupported in a forked child, which has neither the arena's memory nor a connection of its own, and
        DaemonUnavailable where the session was closed.
        """
        if os.getpid() != self._pid:
            raise Unsupported(
                f"this tiermem session belongs to process {self._pid}; a forked child cannot use managed "
                "tensors (copy what it "
                "needs before forking, for example with model.state_dict())"
            )

        if self._closed:
            raise DaemonUnavailable(
                f"session {self.opened.session} of job {self.opened.job!r} was closed, and its tensors with it; "
                "detach() brings them back before"
            )

    def _check(self) -> None:
        self.check_usable()
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error

    def _wait(self, ready: object, what: str) -> None:
        assert callable(ready)
        while not ready():
            self.lock.wait(_WAIT_SLICE_S)
            if ready():
                return
            self._check()
            silent_s = time.monotonic() - self._heard_at
            if silent_s > self.timeout_s:
                error = DaemonTimeout(
                    f"the daemon (pid {self.connection.info.pid}) has been silent for {silent_s:.1f} s while "
                    f"{what} was "
                    f"waited for{_process_hint(self.connection.info.pid)}; raise TIERMEM_TIMEOUT_S if it is only slow"
                )
                self._fail(error)
                raise error

    def _fail(self, error: TiermemError) -> None:
        with self.lock:
            if self._error is None:
                self._error = error
            self.table.fail(error)
            self.lock.notify_all()

    def _messages(self) -> Iterator[pb.DaemonMessage]:
        try:
            yield from self._stream
        except grpc.RpcError as error:
            if not self._closing:
                self._fail(error_from_rpc(error))

    def _read(self) -> None:
        for message in self._messages():
            for single in message.batch.messages or (message,):
                if single.WhichOneof("body") == "ask_trace":
                    self._tell_trace(single.ask_trace)  # without the lock: it may be many
            with self.lock:
                self._heard_at = time.monotonic()
                self._heard += 1
                try:
                    if not self._take(message):
                        break
                except TiermemError as error:
                    _log.error("session %s: %s", self.opened.session, error)
                    self._fail(error)
                    self._stream.cancel()
                    break
                self.lock.notify_all()
        self._fail(
            DaemonUnavailable(
                f"the session with the daemon (pid {self.connection.info.pid}) has ended"
                + _process_hint(self.connection.info.pid)
            )
        )

    def _take(self, message: pb.DaemonMessage) -> bool:
        """Act on a message; False when it was the last. All of a batch is taken before any waiting thread goes on."""
        match message.WhichOneof("body"):
            case "batch":
                for inner in message.batch.messages:
                    if not self._take(inner):
                        return False
            case "grant":
                self.table.receive(grants.decode_grant(message.grant, self.frames))
            case "grants":
                for grant in grants.decode_grants(message.grants, self.frames):
                    self.table.receive(grant)
            case "refuse":
                self.table.receive(grants.decode_refuse(message.refuse))
            case "surrender":
                self.table.receive(Surrender(message.surrender.lane))
            case "admitted":
                self._admitted = message.admitted
            case "adopted":
                self._adopted[message.adopted.spec_id] = message.adopted
            case "closed":
                return False
        return True

    def _tell_trace(self, ask: pb.AskTrace) -> None:
        now_s = time.monotonic()
        spans = codec.encode_spans(self.trace.since(now_s - ask.seconds))
        self._outgoing.put(pb.ClientMessage(trace=pb.Trace(id=ask.id, now_s=now_s, spans=spans)))

    @property
    def messages(self) -> tuple[int, int]:
        """Sent and heard since it was opened; a batch is one."""
        return self._outgoing.sent, self._heard

    @property
    def alive(self) -> bool:
        return self._error is None

    def close(self, patience_s: float | None = None) -> None:
        """End the session; what it had in the store is freed. Every range of the address space is gone afterwards.

        Waits for the daemon's confirmation for `patience_s` (default: the timeout); not at all for a daemon that has
        failed already.
        """
        with self.lock:
            if self._closing or os.getpid() != self._pid:
                return
            self._closing = True
        self._outgoing.put(pb.ClientMessage(close=pb.Close()))
        if self.alive:
            self._reader.join(self.timeout_s if patience_s is None else patience_s)
        if self._reader.is_alive():
            _log.warning("the daemon did not confirm the end of session %s", self.opened.session)
            self._stream.cancel()
        self._outgoing.close()
        self._reader.join()
        self._side.close()
        self.connection.close()
        with self.lock:
            self._closed = True
            self.address_space.close()


def _granted(waiter: Waiter) -> int:
    return 0 if waiter.lease is None else waiter.lease.grant.bundle


def _process_hint(pid: int) -> str:
    """What /proc says of the daemon, as a clause with the remedy; empty where it runs or is not visible from here."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return "; its process is gone: look at its log and start it again"
    if state in "Tt":
        return f"; its process is stopped: continue it with `kill -CONT {pid}`"
    if state == "Z":
        return "; its process has died"
    return ""


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _in_forked_child() -> None:
    for session in _sessions:
        session.renew_lock()


os.register_at_fork(after_in_child=_in_forked_child)
