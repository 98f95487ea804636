"""Answer lines on a Unix socket while a model runs: how another program asks for memory.

    VRAM [MIB]   leave so much of the device free for others (without a number: as at the start)
    STATUS       describe the engine, as one line of JSON

Each line gets one line. An answer to VRAM begins with VRAM and gives key=value pairs; what cannot
be done is answered with ERR, the word, and the reason. One thread serves all connections, in turn:
what it asks of the engine waits for the step that runs.

An error that is no StrataError is our own bug, or the machine has no memory: the client is told in
one line, the socket goes away, so that nobody waits at it, and the main thread has the error.
"""

from __future__ import annotations

import errno
import json
import os
import re
import selectors
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from strata_nb.engine import Engine
from strata_nb.errors import ConfigError, StrataError

MAX_LINE_BYTES = 1000
MAX_CONNECTIONS = 16


def answer(engine: Engine, line: str) -> str:
    """Return the answer to one line, without its end; raises what is no StrataError."""
    word, _, rest = line.strip().partition(" ")
    try:
        if word == "VRAM":
            return _change_reserve(engine, rest.strip())
        if word == "STATUS" and not rest:
            return json.dumps(engine.describe().figures())
    except StrataError as error:
        return f"ERR {word}: {' '.join(error.message.split())}"
    return f"ERR {word[:20]!a}: not understood; write VRAM [MIB] or STATUS"


def _change_reserve(engine: Engine, number: str) -> str:
    if number and not re.fullmatch("[0-9]{1,9}", number):
        return f"ERR VRAM: {number[:20]!a} is not a number of MiB"
    report = engine.set_vram_reserve(int(number) if number else None)
    return "VRAM " + " ".join(f"{key}={value}" for key, value in asdict(report).items())


class ControlSocket:
    """Hold a socket at a path, from before the model is loaded, so that a bad path is told early.

    Only this user may connect. A socket that a dead process left at the path is replaced.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._listener.fileno(), 0o600)  # before bind: nobody gets in between
            _remove_stale(self._path)
            self._made = _listen_at(self._listener, path)
        except (OSError, ValueError) as error:
            self._listener.close()
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigError(
                f"--control {path}: {reason}", hint="the name of a new file, of at most 100 bytes"
            ) from error
        self._listener.setblocking(False)
        self._bound = True
        self._failure: BaseException | None = None  # that ended the thread

    @contextmanager
    def serving(self, engine: Engine) -> Iterator[None]:
        """Answer lines until the block ends; the engine must be open that long.

        Raises at the end what ended the thread before.
        """
        ending, ended = socket.socketpair()
        thread = threading.Thread(
            target=self._serve, args=(engine, ended), name="control", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ending.close()
            thread.join()
            ended.close()
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Remove the socket; one that another process has made in its place stays."""
        self._listener.close()
        bound, self._bound = self._bound, False
        with suppress(FileNotFoundError):
            if bound and os.path.samestat(self._made, os.lstat(self._path)):
                self._path.unlink()

    def _serve(self, engine: Engine, ended: socket.socket) -> None:
        buffers: dict[socket.socket, bytes] = {}
        try:
            self._serve_until(ended, engine, buffers)
        except BaseException as failure:  # noqa: BLE001 - `serving` raises it in its own thread
            self._failure = failure
            self.close()
        finally:
            for connection in buffers:
                connection.close()

    def _serve_until(
        self, ended: socket.socket, engine: Engine, buffers: dict[socket.socket, bytes]
    ) -> None:
        with selectors.DefaultSelector() as selector:
            for one in (self._listener, ended):
                selector.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is ended:
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector, buffers)
                        continue
                    connection = next(one for one in buffers if one is key.fileobj)
                    if not self._read(engine, connection, buffers):
                        selector.unregister(connection)
                        del buffers[connection]
                        connection.close()

    def _accept(
        self, selector: selectors.BaseSelector, buffers: dict[socket.socket, bytes]
    ) -> None:
        with suppress(OSError):  # who gave up before we came
            connection, _ = self._listener.accept()
            if len(buffers) == MAX_CONNECTIONS:
                connection.close()
                return
            connection.settimeout(1)  # for a reader that does not read its answers
            buffers[connection] = b""
            selector.register(connection, selectors.EVENT_READ)

    def _read(
        self, engine: Engine, connection: socket.socket, buffers: dict[socket.socket, bytes]
    ) -> bool:
        """Answer the whole lines that have come; returns whether the connection goes on."""
        try:
            data = connection.recv(4096)
        except OSError:
            return False
        *lines, rest = (buffers[connection] + data).split(b"\n")
        if not data and rest:
            lines.append(rest)  # the last line of a client that closed its side
        for line in lines:
            if not _tell(connection, engine, line.decode("ascii", "replace")):
                return False
        buffers[connection] = rest
        return bool(data) and len(rest) <= MAX_LINE_BYTES


def _tell(connection: socket.socket, engine: Engine, line: str) -> bool:
    """Send the answer to a line; returns whether it was sent. What `answer` raises is told too."""
    try:
        text = answer(engine, line)
    except BaseException as failure:
        words = " ".join(f"{type(failure).__name__}: {failure}".split())
        _send(connection, f"ERR {line.strip().partition(' ')[0]}: {words}")
        raise
    return _send(connection, text)


def _send(connection: socket.socket, text: str) -> bool:
    try:
        connection.sendall(text.encode() + b"\n")
    except OSError:
        return False
    return True


def _listen_at(listener: socket.socket, path: str) -> os.stat_result:
    """Let a socket listen, and only then be at a path: who finds it there is never refused."""
    place = f"{path}.{os.getpid():x}"
    listener.bind(place)
    try:
        listener.listen(MAX_CONNECTIONS)
        os.link(place, path)
        return os.stat(path)
    except FileExistsError as error:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
    finally:
        os.unlink(place)


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens at; anything else at the path stays."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # who listens and is busy need not answer
        if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
            path.unlink()
