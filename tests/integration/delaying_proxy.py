"""A socket before a daemon's: whatever goes through it, either way, comes a little later, never the same."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def delaying_proxy(target: Path, path: Path, seed: int, longest_s: float) -> Iterator[Path]:
    """The path of a socket that leads to `target`. Each piece of bytes is held for up to `longest_s`, most for less."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    ends: list[socket.socket] = [listener]
    threads: list[threading.Thread] = []
    numbers = random.Random(seed)

    def start(*arguments: socket.socket) -> None:
        thread = threading.Thread(target=carry, args=(*arguments, random.Random(numbers.random())), daemon=True)
        thread.start()
        threads.append(thread)

    def carry(source: socket.socket, sink: socket.socket, delays: random.Random) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                time.sleep(longest_s * delays.random() ** 3)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(target))
                ends.extend((near, far))
                start(near, far)
                start(far, near)

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield path
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()
