"""`job.trace`: files that are written when the steps that they show are over."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from tiermem import trace_file
from tiermem.errors import TiermemError
from tiermem.trace import ProcessTrace, within
from tiermem_client.session import Session

_log = logging.getLogger("tiermem.trace")
_PATIENCE_S = 10.0


@dataclass(slots=True)
class _Recording:
    """`steps`: that are still to come; 0 where none are counted."""

    path: Path
    start_s: float
    steps: int


@dataclass(slots=True)
class TraceRecordings:
    """The traces that were asked for and are not written yet. The user's threads only, one at a time."""

    session: Session
    _open: list[_Recording] = field(default_factory=list)

    def begin(self, path: Path, steps: int) -> None:
        """From now on, until `steps` steps are over; 0: until the end of the job. Raises InvalidArgument (the path),
        DaemonUnavailable.
        """
        self.session.check_usable()
        trace_file.check_target(path)
        self._open.append(_Recording(path.absolute(), time.monotonic(), steps))

    def step_ended(self) -> None:
        for recording in list(self._open):
            recording.steps -= 1
            if recording.steps == 0:
                self._open.remove(recording)
                self._write(recording, _PATIENCE_S)

    def finish(self, patience_s: float = _PATIENCE_S) -> None:
        """Write what there is: the session is about to end. The daemon may take `patience_s` to tell its part."""
        while self._open:
            self._write(self._open.pop(), patience_s)

    def _write(self, recording: _Recording, patience_s: float) -> None:
        """A trace that fails does not end the training; it is in the log."""
        end_s = time.monotonic()
        mine = self.session.trace.since(recording.start_s)
        notes = () if mine.complete else ("older spans have been overwritten; trace fewer steps",)
        processes = [
            ProcessTrace("trainer", os.getpid(), mine.spans, notes),
            *self._daemon(recording.start_s, patience_s),
        ]
        try:
            trace_file.write(recording.path, within(processes, recording.start_s, end_s))
        except TiermemError as error:
            _log.error("%s", error)
            return
        for process in processes:
            for note in process.notes:
                _log.warning("trace %s: %s: %s", recording.path, process.name, note)
        _log.info("trace %s is written; open it in https://ui.perfetto.dev or chrome://tracing", recording.path)

    def _daemon(self, start_s: float, patience_s: float) -> list[ProcessTrace]:
        try:
            return self.session.daemon_trace(start_s, patience_s)
        except TiermemError as error:
            return [ProcessTrace("tiermemd", self.session.connection.info.pid, (), (str(error),))]
