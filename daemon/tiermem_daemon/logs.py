"""The daemon's log: stdlib logging to standard error, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal, TextIO


class JsonFormatter(logging.Formatter):
    """Keys: time (Unix seconds), level, logger, thread, message; `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(level: str, form: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Replace the root logger's handlers by one on `stream` (standard error by default)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
