"""The socket that users connect to."""

from __future__ import annotations

import errno
import socket


class Failed(Exception):
    """The server cannot start or go on. The message is one clear line."""


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises Failed."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Inherited by every connection: one whose peer takes nothing for a minute is closed by the system.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
        listening.bind(address)
        listening.listen(2048)
        return listening
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Failed(f"port {port} on {host} is in use: stop what listens there or set PORT") from None
        raise Failed(f"cannot listen on HOST={host} PORT={port}: {error.strerror or error}") from None


def origin_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable(origin: str) -> str:
    """The origin as this machine itself reaches it: a server that listens everywhere is at home."""
    return origin.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")
