"""A bad network: in place of a bridge, a program that carries frames between two simulated nodes as a rule says.

The kernel's netem does this, too, but not every kernel has it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import random
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from simulated_nodes import INTERFACE, SimulatedNodes

_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_STXCSUM, _STSO, _SGSO, _SGRO: what a card does for the kernel
_ALL_FRAMES = 3
_IPV4, _TCP = 0x0800, 6


@dataclass
class Rule:
    """What happens to frames. It may be changed while they pass.

    Attributes:
        loss: share of the frames that are lost.
        delay: seconds that each waits.
        blocked: TCP ports, of either end, whose frames are lost.
    """

    loss: float = 0.0
    delay: float = 0.0
    blocked: set[int] = field(default_factory=set)


class Relay:
    """A context manager: while it is entered, the frames between nodes 0 and 1 take this way."""

    def __init__(self, nodes: SimulatedNodes, rule: Rule, seed: int) -> None:
        self._nodes, self.rule, self._chance = nodes, rule, random.Random(seed)
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self.carried = self.lost = 0

    def __enter__(self) -> Relay:
        assert self._nodes._bridge is not None
        for node in range(2):
            self._nodes._bridge.run("ip", "link", "set", f"p{node}", "nomaster", "promisc", "on")
            thread = threading.Thread(target=self._make_plain, args=(node,))
            thread.start()
            thread.join()
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the relay did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _make_plain(self, node: int) -> None:
        """In a thread of its own, as a network namespace is entered by threads."""
        _enter(self._nodes._spaces[node].network)
        _without_offloads(INTERFACE)

    def _carry(self) -> None:
        assert self._nodes._bridge is not None
        _enter(self._nodes._bridge.network)
        ends = []
        for node in range(2):
            _without_offloads(f"p{node}")
            end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
            end.bind((f"p{node}", 0))
            end.setblocking(False)
            ends.append(end)
        self._ready.set()
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self._stop.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for end in select.select(ends, [], [], min(pause, 0.1))[0]:
                frame, place = end.recvfrom(65_536)
                if place[2] != socket.PACKET_OUTGOING and self._passes(frame):
                    due, to = time.monotonic() + self.rule.delay, 1 - ends.index(end)
                    heapq.heappush(waiting, (due, self.carried, to, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(waiting)
                try:
                    ends[to].send(frame)
                except OSError:  # its buffer is full, or the link is down: lost, as on any network
                    self.lost += 1
        for end in ends:
            end.close()

    def _passes(self, frame: bytes) -> bool:
        self.carried += 1
        if len(frame) > 34 and struct.unpack_from("!H", frame, 12)[0] == _IPV4 and frame[23] == _TCP:
            ports = struct.unpack_from("!HH", frame, 14 + 4 * (frame[14] & 15))
            if self.rule.blocked & {*ports} or self._chance.random() < self.rule.loss:
                self.lost += 1
                return False
        return True


def _enter(network: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(network, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _without_offloads(interface: str) -> None:
    """Let the kernel send frames as they are on a wire: of at most one packet, with checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value)).ljust(40, b"\0")
            fcntl.ioctl(control, _SIOCETHTOOL, request)
