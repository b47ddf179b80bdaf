"""A core's process on any machine: it listens for its front, which it knows by its key, then is what `engine.process` is.

Started by `core_host` as `python -m headrace.distributed.process HOST PARENT BUILDER LOGLEVEL LOGFORMAT TRACED`. The front's
public key comes on stdin; the process makes a pair of its own and writes a Door to stdout: no secret key leaves its process.
Whoever has not the front's is refused in ZMQ's CURVE handshake, before any socket of ours knows of him.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from headrace.config import prepare_threads
from headrace.engine.process import IDLE_POLL_MS, leave, serve
from headrace.logs import configure
from headrace.parent import leave_signals_to_parent

LARGEST_MESSAGE = 2**28  # bytes: a prompt of 16M tokens has 2**26


class Door(NamedTuple):
    """Where a core listens and who it is."""

    inbox: str  # addresses
    outbox: str
    public_key: str


class Listener:
    """Both sockets of a core, open to one front only."""

    def __init__(self, context: zmq.Context, host: str, front_key: bytes):
        self._front_key = front_key
        self._gate = ThreadAuthenticator(context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=self)
        self.inbox, self.outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        public, secret = zmq.curve_keypair()
        for socket in (self.inbox, self.outbox):
            socket.set_hwm(0)  # bounded by the requests in flight, which admission bounds
            socket.linger = 1000
            socket.maxmsgsize = LARGEST_MESSAGE
            socket.ipv6 = ":" in host
            socket.curve_server = True
            socket.curve_secretkey = secret
            socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.outbox.sndtimeo = 1000  # when there is no front any more, this process is about to end
        inbox, outbox = (s.getsockopt_string(zmq.LAST_ENDPOINT) for s in (self.inbox, self.outbox))
        self.door = Door(inbox, outbox, public.decode())

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator: may the owner of this public key come in?"""
        return key == self._front_key

    def wait_for_front(self, parent: int) -> None:
        """Until it is connected to both, which it says by an empty message."""
        while not self.inbox.poll(IDLE_POLL_MS) or not self.outbox.poll(IDLE_POLL_MS, zmq.POLLOUT):
            if os.getppid() != parent:
                os._exit(1)
        self.inbox.recv()


def main(host: str, parent: int, builder: str, traced: bool) -> int:
    leave_signals_to_parent()
    prepare_threads()
    context = zmq.Context()
    listener = Listener(context, host, sys.stdin.buffer.readline().strip())
    os.write(1, msgspec.json.encode(listener.door) + b"\n")
    os.dup2(2, 1)  # nobody reads any more there
    listener.wait_for_front(parent)
    return serve(context, listener.inbox, listener.outbox, parent, builder, traced)


if __name__ == "__main__":
    configure("core", *sys.argv[4:6])
    leave(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[6] == "1"))
