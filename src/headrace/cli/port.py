"""The server's port: bound before anything slow happens, for one process or for several."""

from __future__ import annotations

import errno
import socket

from headrace.errors import ParameterError

# What is asked of a client who says nothing, in seconds and times, by each connection as by its listener: one that is gone
# without a word is noticed, and what forgets silent connections on the way (a NAT, a load balancer) lets long answers through.
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def bind(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Listen on exactly this address, with so many sockets. Raises ParameterError at once if that is not possible.

    The first is bound alone, which fails where another server has the port; then it lets the others beside it. The kernel
    spreads connections over them by a hash of their addresses.
    """
    listeners: list[socket.socket] = []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        for number in range(count):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE.items():
                if hasattr(socket, name):  # not everywhere
                    listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if number > 0:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            if number == 0 and count > 1:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                address = listener.getsockname()
        for listener in listeners:
            listener.listen(2048)
    except OSError as e:
        for listener in listeners:
            listener.close()
        hint = "; --port 0 takes a free one" if e.errno == errno.EADDRINUSE else ""
        allowed = f"an address that can be bound ({e.strerror or e}{hint})"
        raise ParameterError("--host, --port", f"{host}:{port}", allowed) from None
    return listeners
