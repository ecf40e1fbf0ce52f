"""Ports for processes that this one starts."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port of this host that nothing listens to.

    Ports that the kernel chooses for ``bind`` are those that it also gives to connections, so one can be taken between
    here and the process that is told to listen to it. Linux gives none below 32,768 to connections.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
