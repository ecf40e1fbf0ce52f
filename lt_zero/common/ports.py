"""Ports for processes that this one starts."""

from __future__ import annotations

import errno
import random
import socket

_FIRST, _END = 10_000, 32_768  # Linux gives these to no connection


def free_port() -> int:
    """A port of this host that nothing listens to.

    The kernel chooses ports for ``bind`` from the range that it also uses for outgoing connections, so a connection can
    take such a port before the started process listens to it. This port is outside of that range.

    Raises:
        OSError: there is no loopback interface, or all ports are taken.
    """
    for port in random.SystemRandom().sample(range(_FIRST, _END), _END - _FIRST):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"All ports from {_FIRST} to {_END - 1} are taken: end programs that listen there")
