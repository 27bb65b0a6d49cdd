"""The side socket's two ends together, and the directory that it lies in."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tiermem.errors import (
    AccessDenied,
    ConfigError,
    DaemonTimeout,
    DaemonUnavailable,
    DirectoryInUse,
    ProtocolError,
    ResourceExhausted,
)
from tiermem_client.side_channel import SideChannel
from tiermem_daemon.listener import Peer, ProcessWatch, SideSocket
from tiermem_daemon.runtime_directory import prepare_runtime_directory

# Connects, prints its token, leaves the connection to a forked child that lives until its input ends, and exits.
_FORKING_CLIENT = """
import os, sys
from pathlib import Path
from tiermem_client.side_channel import SideChannel
channel = SideChannel()
print(channel.connect(Path(sys.argv[1]), 5).hex(), flush=True)
sys.stdin.readline()
if os.fork() == 0:
    sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.sock.fd"


@asynccontextmanager
async def serving(side: SideSocket) -> AsyncIterator[SideSocket]:
    await side.start()
    try:
        yield side
    finally:
        await side.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(test)


async def connect(channel: SideChannel, path: Path) -> bytes:
    return await asyncio.to_thread(channel.connect, path, 5.0)


def claimed(side: SideSocket, token: bytes) -> Peer:
    peer = side.claim(token)
    assert peer is not None
    return peer


def test_a_descriptor_reaches_the_process_that_the_token_was_given_to(path: Path) -> None:
    async def test() -> None:
        async with serving(SideSocket(path)) as side:
            with SideChannel() as channel:
                peer = claimed(side, await connect(channel, path))
                assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
                sent = os.memfd_create("arena")
                os.write(sent, b"bytes")
                await side.send_descriptor(peer, sent, {"arena": True})
                os.close(sent)
                peer.close()
                peer.close()
                received, payload = await asyncio.to_thread(channel.receive_descriptor, 5.0)
                assert payload == {"arena": True}
                assert os.pread(received, 9, 0) == b"bytes"
                assert not os.get_inheritable(received)
                os.close(received)
                with pytest.raises(DaemonUnavailable, match="closed"):
                    channel.receive_descriptor(5.0)

    run(test())


def test_a_token_is_claimed_once_and_guesses_are_nobody(path: Path) -> None:
    async def test() -> None:
        async with serving(SideSocket(path)) as side:
            with SideChannel() as first, SideChannel() as second:
                token, other = await connect(first, path), await connect(second, path)
                assert len(token) == len(other) == 16
                assert token != other
                peer = claimed(side, token)
                assert side.claim(token) is None
                assert side.claim(b"\0" * 16) is None
                assert side.claim(b"") is None
                assert side.unclaimed == 1
                peer.close()

    run(test())


def test_another_user_is_refused_with_the_remedy(path: Path) -> None:
    uid = os.getuid()
    if uid == 0:
        pytest.skip("root may connect to every daemon")

    async def test() -> None:
        async with serving(SideSocket(path, owner_uid=uid + 1)):
            with SideChannel() as channel, pytest.raises(AccessDenied, match="allowed_uids"):
                await connect(channel, path)
        async with serving(SideSocket(path, owner_uid=uid + 1, allowed_uids=(uid,))):
            with SideChannel() as channel:
                await connect(channel, path)

    run(test())


def test_the_kernel_says_who_connects(path: Path) -> None:
    """As root, by a child that gives up its user id; the daemon believes the kernel, not the client."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    for directory in path.parents:
        if directory.stat().st_mode & 0o077 == 0:  # what pytest keeps private
            directory.chmod(0o711)
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect(sys.argv[1]); print(s.recv(4096).decode())"
    )

    async def answer(side: SideSocket) -> str:
        async with serving(side):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, str(path), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await child.communicate()
            return out.decode()

    async def test() -> None:
        # A mode that lets everybody connect comes with allowed users; 65534 is not among them.
        assert "PERMISSION_DENIED" in await answer(SideSocket(path, allowed_uids=(12345,)))
        assert '"token"' in await answer(SideSocket(path, allowed_uids=(65534,)))

    run(test())


def test_only_the_owner_may_open_the_socket_unless_others_are_allowed(path: Path) -> None:
    async def test() -> None:
        async with serving(SideSocket(path)):
            assert path.stat().st_mode & 0o777 == 0o600
        async with serving(SideSocket(path, allowed_uids=(5,))):
            assert path.stat().st_mode & 0o777 == 0o666
        assert not path.exists()

    run(test())


def test_garbage_closes_only_the_connection_that_sent_it(path: Path) -> None:
    async def test() -> None:
        async with serving(SideSocket(path)) as side:
            with SideChannel() as good, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bad:
                token = await connect(good, path)
                bad.connect(str(path))
                bad.send(b"\xff\x00garbage" * 100)
                await until(lambda: side.unclaimed == 1)
                claimed(side, token).close()

    run(test())


def test_a_client_that_leaves_is_forgotten(path: Path) -> None:
    async def test() -> None:
        async with serving(SideSocket(path)) as side:
            channel = SideChannel()
            token = await connect(channel, path)
            channel.close()
            await until(lambda: side.unclaimed == 0)
            assert side.claim(token) is None

    run(test())


def test_unclaimed_connections_are_bounded_in_number_and_time(path: Path) -> None:
    async def test() -> None:
        async with serving(SideSocket(path, unclaimed_limit=1, unclaimed_timeout_s=0.2)) as side:
            with SideChannel() as first, SideChannel() as second:
                token = await connect(first, path)
                with pytest.raises(ResourceExhausted):
                    await connect(second, path)
                await until(lambda: side.unclaimed == 0)
                assert side.claim(token) is None
                with pytest.raises(DaemonUnavailable):
                    first.receive_descriptor(5.0)
                await connect(second, path)

    run(test())


def test_a_fork_that_holds_the_connection_hides_nothing(path: Path) -> None:
    """The connection stays open in the child; the pidfd tells of the parent's death all the same."""

    async def test() -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        async with serving(SideSocket(path)) as side:
            client = subprocess.Popen(
                [sys.executable, "-c", _FORKING_CLIENT, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
            )
            assert client.stdin is not None
            assert client.stdout is not None
            with client:
                token = bytes.fromhex((await asyncio.to_thread(client.stdout.readline)).decode())
                peer = claimed(side, token)
                assert peer.pid == client.pid
                exits: list[int] = []
                watch = ProcessWatch(peer.pidfd, lambda: exits.append(peer.pid))
                await asyncio.sleep(0.05)
                assert exits == []
                client.stdin.write(b"\n")
                client.stdin.flush()
                await until(lambda: bool(exits))
                with pytest.raises(BlockingIOError):
                    peer.connection.recv(1)  # no end of file: the child lives and holds it
                assert exits == [client.pid]
                watch.close()
                peer.close()

    run(test())


def test_a_closed_watch_stays_silent() -> None:
    async def test() -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            pidfd = os.pidfd_open(child.pid)
            exits: list[str] = []
            silent = ProcessWatch(pidfd, lambda: exits.append("silent"))
            silent.close()
            assert child.stdin is not None
            child.stdin.close()
            ProcessWatch(pidfd, lambda: exits.append("watching"))
            await until(lambda: bool(exits))
            os.close(pidfd)
            assert exits == ["watching"]

    run(test())


def test_a_peer_that_never_reads_does_not_hold_the_daemon(path: Path) -> None:
    async def test() -> None:
        async with serving(SideSocket(path)) as side:
            with SideChannel() as channel:
                peer = claimed(side, await connect(channel, path))
                fd = os.memfd_create("arena")

                async def flood() -> None:
                    for _ in range(10_000):
                        await side.send_descriptor(peer, fd, {"arena": True}, timeout_s=0.1)

                with pytest.raises(DaemonUnavailable, match="has not read"):
                    await flood()
                channel.close()
                with pytest.raises(DaemonUnavailable, match="closed its side socket"):
                    await side.send_descriptor(peer, fd, {"arena": True})
                os.close(fd)
                peer.close()

    run(test())


def test_the_client_names_an_absent_and_a_silent_daemon(path: Path) -> None:
    with SideChannel() as channel:
        with pytest.raises(DaemonUnavailable, match=f"no daemon answers at {path}"):
            channel.connect(path, 1.0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
            mute.bind(str(path))
            mute.listen(1)
            with pytest.raises(DaemonTimeout, match="silent"):
                channel.connect(path, 0.05)


@pytest.mark.parametrize(
    "packet",
    [b"not json", b"[1]", b'{"protocol":2,"token":"00"}', b'{"protocol":1}', b'{"protocol":1,"token":"zz"}', b"\xff"],
)
def test_the_client_refuses_what_no_daemon_sends(path: Path, packet: bytes) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(path))
            listening.listen(1)

            def serve() -> None:
                connection, _ = listening.accept()
                with connection:
                    socket.send_fds(connection, [packet], [1])

            serve_task = asyncio.create_task(asyncio.to_thread(serve))
            before = len(os.listdir("/proc/self/fd"))
            with SideChannel() as channel, pytest.raises(ProtocolError):
                await connect(channel, path)
            await serve_task
            assert len(os.listdir("/proc/self/fd")) == before  # the unwanted descriptor was closed

    run(test())


def test_a_new_runtime_directory_is_private_and_locked(tmp_path: Path) -> None:
    path = tmp_path / "run" / "tiermem" / "t.sock"
    with prepare_runtime_directory(path) as lock:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with pytest.raises(DirectoryInUse, match=f"already running at {path}"):
            prepare_runtime_directory(path)
        with prepare_runtime_directory(path.with_name("other.sock")):
            pass  # another daemon of the same user, at another socket
        lock.close()
        prepare_runtime_directory(path).close()


def test_sockets_of_a_dead_daemon_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    for name, kind in (("t.sock", socket.SOCK_STREAM), ("t.sock.fd", socket.SOCK_SEQPACKET)):
        with socket.socket(socket.AF_UNIX, kind) as dead:
            dead.bind(str(tmp_path / name))
            dead.listen()
    prepare_runtime_directory(path).close()
    assert not path.exists()
    assert not Path(f"{path}.fd").exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("backlog", [0, 5])
def test_a_socket_that_somebody_listens_at_is_left_alone(tmp_path: Path, kind: socket.SocketKind, backlog: int) -> None:
    path = tmp_path / "t.sock"
    with socket.socket(socket.AF_UNIX, kind) as alive, socket.socket(socket.AF_UNIX, kind) as waiting:
        alive.bind(str(path))
        alive.listen(backlog)
        waiting.connect(str(path))  # with a backlog of 0 the next one finds no room
        with pytest.raises(DirectoryInUse, match=rf"already running at .* \(pid (unknown|{os.getpid()})\)"):
            prepare_runtime_directory(path)
        assert path.exists()
    prepare_runtime_directory(path).close()  # the failed attempt has kept no lock


def test_a_stopped_daemon_is_alive(tmp_path: Path) -> None:
    """It holds the lock, whether or not its socket exists yet."""
    with open(tmp_path / "t.sock.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DirectoryInUse):
            prepare_runtime_directory(tmp_path / "t.sock")


def test_unsafe_runtime_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name, why in (("shared", "writable by others"), ("link", "link"), ("file", "no directory")):
        with pytest.raises(AccessDenied, match=why):
            prepare_runtime_directory(tmp_path / name / "t.sock")
    (tmp_path / "t.sock").write_text("not a socket")
    with pytest.raises(ConfigError, match="not a socket"):
        prepare_runtime_directory(tmp_path / "t.sock")
    with pytest.raises(ConfigError, match="No such file"):
        prepare_runtime_directory(Path("/proc/nothing/t.sock"))
