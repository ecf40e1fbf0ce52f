"""Nodes of a cluster simulated on one machine: processes that only a network of given speed connects.

Every node has network, PID, mount and host-name namespaces of its own. Its ranks reach each other through its loopback
and see each other in ``/proc``, as on one machine; ranks of another node they reach through a link (a veth pair) to a
bridge. ``tc`` shapes what leaves a node, and the kernel counts it: what a collective costs can be measured without a
cluster.

    python -m benchmarks.simulated_nodes --nodes 2 --per-node 2 --mbit 200 train.py --steps 10
    python -m benchmarks.simulated_nodes --nodes 2 --mbit 1000 --slow 1:50 -- train.py    # node 1 sends 50 Mbit/s

Each rank runs the script with the variables that torchrun sets. Needs Linux, root and iproute2.

Nothing is left behind, even if this process is killed: no namespace has a name, so the kernel removes it with its last
process; all processes of a node end with its first one; and that one reads from a pipe that only this process writes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

INTERFACE, BRIDGE = "e0", "br0"
PORT = 29500  # of rank 0's store; each set of nodes has a network of its own
NAMESPACES = ("net", "mnt", "uts", "pid_for_children")
GRACE_S = 10.0  # for the other ranks, once one has failed
_PR_SET_PDEATHSIG = 1
# A namespace's first process sets the host name and what resolves it (else torch warns), then it waits.
_HOLD = """
hostname "$1"
hosts=$(mktemp)
printf '%s' "$2" > "$hosts"
mount --bind "$hosts" /etc/hosts
rm "$hosts"
echo ready
exec cat
"""


class NodesUnavailable(RuntimeError):
    """This machine, or this user, cannot simulate nodes."""


def enter(holder: int) -> None:
    """Go on inside the node whose namespaces the process ``holder`` has: as a fork of this process.

    This process itself waits for its fork and ends as it ended; if it is killed, the fork is.

    Raises:
        OSError: the node is gone, or this process has several threads.
    """
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
    doors = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in NAMESPACES]
    for door in doors:  # all are open: once inside, /proc is the node's
        if libc.setns(door, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a simulated node")
        os.close(door)
    os.chdir(folder)  # a new mount namespace begins at /
    child = os.fork()  # a PID namespace is entered by children
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the fork, too
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != 0:  # not a process outside of the namespace: it died before it could be watched
        os._exit(1)


def sent_by(process: int | str = "self") -> int:
    """Bytes that the node of a process (default: this one) has sent to other nodes."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    counts = next(line.split(":")[1] for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(counts.split()[8])


class _Namespace:
    """Namespaces of a node, or of the network between them, held by a process that ends with this one."""

    def __init__(self, name: str, hosts: str = "") -> None:
        command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        # A session of its own: Ctrl-C must reach the ranks, and not what cleans up after them.
        self.process = subprocess.Popen(
            [*command, "sh", "-ec", _HOLD, "sh", name, f"127.0.0.1 localhost\n{hosts}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if self.process.stdout.readline() != b"ready\n":
            problem = self.process.stderr.read().decode(errors="replace").strip()
            self.close()
            raise NodesUnavailable(f"cannot make namespaces: {problem}; run as root, not in an unprivileged container")
        # Packets of a node that ended (its connections' last ones) still leave while its network is open.
        self.network = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def run(self, *words: object) -> None:
        """Run a command of iproute2 in this network."""
        command = ["nsenter", f"--net=/proc/self/fd/{self.network}", *map(str, words)]
        done = subprocess.run(command, pass_fds=[self.network], capture_output=True, text=True)
        if done.returncode:
            raise NodesUnavailable(f"`{' '.join(map(str, words))}` failed: {done.stderr.strip()}")

    def kill(self) -> None:
        """End every process of the namespaces."""
        self.process.kill()  # by --kill-child the first process, and with it all others
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        if hasattr(self, "network"):
            os.close(self.network)
            del self.network


class SimulatedNodes:
    """A context manager that makes nodes, starts processes in them, and shapes and counts what they send.

    Args:
        nodes: how many; node i has the address 10.77.0.(i + 1).
        per_node: ranks of a node. Rank r is local rank ``r % per_node`` of node ``r // per_node``.
        mbit: what each node may send, in Mbit/s; None: as fast as the machine copies.
        delay_ms: what a packet waits before it leaves a node, in ms; needs the kernel's netem.
        slow: node -> its own rate in Mbit/s.

    Raises:
        NodesUnavailable: on entering: not root, no iproute2, or a kernel without namespaces or shaping.
        ValueError: a node, a number of nodes or a rate that cannot be.
    """

    def __init__(
        self,
        nodes: int = 2,
        per_node: int = 1,
        mbit: float | None = None,
        delay_ms: float = 0.0,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        self.nodes, self.per_node, self.world = nodes, per_node, nodes * per_node
        self._delay_ms = delay_ms
        self._rates = [(slow or {}).get(node, mbit) for node in range(nodes)]
        if not 1 <= nodes <= 250 or per_node < 1:
            raise ValueError(f"{nodes} nodes of {per_node} ranks cannot be: 1 to 250 nodes of at least one rank.")
        if wrong := [node for node in slow or {} if not 0 <= node < nodes]:
            raise ValueError(f"There is no slow node {wrong[0]}: nodes are 0 to {nodes - 1}.")
        self._spaces: list[_Namespace] = []
        self._bridge: _Namespace | None = None
        self._sent_by_deleted: dict[int, int] = {}
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> SimulatedNodes:
        if problem := missing():
            raise NodesUnavailable(problem)
        try:
            self._bridge = _Namespace("bridge")
            self._bridge.run("ip", "link", "add", BRIDGE, "type", "bridge")
            self._bridge.run("ip", "link", "set", BRIDGE, "up")
            for node in range(self.nodes):
                self._add_node(node)
        except BaseException:
            self.close()
            raise
        return self

    def _add_node(self, node: int) -> None:
        assert self._bridge is not None
        hosts = "".join(f"{self.address(other)} node{other}\n" for other in range(self.nodes))
        space = _Namespace(f"node{node}", hosts)
        self._spaces.append(space)
        end, peer = f"p{node}", space.process.pid
        self._bridge.run("ip", "link", "add", end, "type", "veth", "peer", "name", INTERFACE, "netns", peer)
        self._bridge.run("ip", "link", "set", end, "master", BRIDGE, "up")
        space.run("ip", "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        space.run("ip", "link", "set", INTERFACE, "up")
        space.run("ip", "link", "set", "lo", "up")
        self.set_rate(node, self._rates[node])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the nodes, and the nodes."""
        for space in [*self._spaces, *([self._bridge] if self._bridge else [])]:
            space.close()
        for process in self._processes:  # each waits for a process of a node
            process.wait()
        self._spaces.clear()
        self._processes.clear()
        self._bridge = None

    # ---- links -----------------------------------------------------------------------------------------------------

    def address(self, node: int) -> str:
        """The node's IPv4 address."""
        return f"10.77.0.{node + 1}"

    def set_rate(self, node: int, mbit: float | None) -> None:
        """Let the node send ``mbit`` Mbit/s from now on, also while ranks run; None: as fast as the machine copies."""
        if mbit is not None and mbit <= 0:
            raise ValueError(f"A node cannot send {mbit} Mbit/s; a rate is positive, None is no limit.")
        space = self._spaces[node]
        if self._delay_ms:
            limit = [] if mbit is None else ["rate", f"{mbit}mbit"]
            shape: list[object] = ["netem", "delay", f"{self._delay_ms}ms", *limit, "limit", 100_000]
        elif mbit is None:
            shape = ["pfifo", "limit", 1000]
        else:
            # What the bucket may save up bounds the rate on a busy machine, where tc is called late: 4 ms of sending.
            shape = ["tbf", "rate", f"{mbit}mbit", "burst", max(32_768, int(mbit * 500)), "latency", "50ms"]
        try:
            space.run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *shape)
        except NodesUnavailable as error:
            remedy = "leave out the delay (this kernel has no netem)" if self._delay_ms else "load the module sch_tbf"
            raise NodesUnavailable(f"tc cannot shape a link: {error}; {remedy}") from None
        self._rates[node] = mbit

    def bytes_sent(self) -> list[int]:
        """What each node has sent to other nodes since it was made, in bytes with the headers of packets."""
        return [
            self._sent_by_deleted[node] if node in self._sent_by_deleted else sent_by(space.process.pid)
            for node, space in enumerate(self._spaces)
        ]

    def delete_node(self, node: int, silent: bool = False) -> None:
        """Kill all processes of a node at once.

        By default the node's kernel still closes its connections, as when a container is killed. ``silent``: its link
        is cut before, as when the power fails, so that peers wait until their own timeouts end.
        """
        self._sent_by_deleted[node] = sent_by(self._spaces[node].process.pid)
        if silent:
            self.cut(node)
        self._spaces[node].kill()

    def cut(self, node: int) -> None:
        """Cut the link of a node, whose processes go on."""
        self._spaces[node].run("ip", "link", "set", INTERFACE, "down")

    # ---- processes -------------------------------------------------------------------------------------------------

    def holder(self, rank: int) -> int:
        """The PID for which ``enter`` goes to the node of ``rank``."""
        return self._spaces[rank // self.per_node].process.pid

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun sets for a rank, and the interface that the nodes share."""
        node, local = divmod(rank, self.per_node)
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.world,
            "LOCAL_WORLD_SIZE": self.per_node,
            "GROUP_RANK": node,
            "NODE_RANK": node,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_PORT": PORT,
        }
        names = {"MASTER_ADDR": self.address(0), "TORCHELASTIC_RUN_ID": "simulated_nodes"}
        interface = {"GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return {**{key: str(value) for key, value in numbers.items()}, **names, **interface, **threads}

    def start(self, rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``command`` as ``rank``; ``options`` are those of ``subprocess.Popen``. Killing it ends the rank."""
        options["env"] = {**options.get("env", os.environ), **self.environment(rank)}
        inside = [sys.executable, "-I", __file__, "--enter", str(self.holder(rank)), *command]
        process = subprocess.Popen(inside, **options)
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str], timeout_s: float | None = None) -> int:
        """Run ``command`` on all ranks; the first exit status that is not 0 ends the others. Node 0's output is shown.

        Raises:
            TimeoutError: after ``timeout_s`` seconds.
        """
        ranks = [
            self.start(rank, command, stdout=None if rank < self.per_node else subprocess.DEVNULL)
            for rank in range(self.world)
        ]
        end = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        failed = 0
        while (codes := [process.poll() for process in ranks]).count(None):
            if not failed and (failed := _first_failure(codes)):
                end = min(end, time.monotonic() + GRACE_S)
            if time.monotonic() > end:
                for process in ranks:
                    process.kill()
                if not failed:
                    raise TimeoutError(f"{command[0]} still ran after {timeout_s} s")
                return failed
            time.sleep(0.05)
        return failed or _first_failure(codes)


def _first_failure(codes: Sequence[int | None]) -> int:
    return next((code for code in codes if code), 0)


def missing() -> str:
    """What keeps this machine from simulating nodes, as a sentence; "" if nothing that can be seen without trying."""
    if platform.system() != "Linux":
        return f"simulated nodes need Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return "simulated nodes need root: they are namespaces (start it with sudo)"
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
    for program, package in packages.items():
        if shutil.which(program) is None:
            return f"simulated nodes need the program {program}: install {package}"
    return ""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="simulated_nodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2, help="default 2")
    parser.add_argument("--per-node", type=int, default=1, metavar="RANKS", help="default 1")
    parser.add_argument("--mbit", type=float, help="what a node may send; default: no limit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each packet that leaves a node; default 0")
    parser.add_argument(
        "--slow", action="append", default=[], metavar="NODE:MBIT", help="a node with a rate of its own"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="end the ranks after so many seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a Python script and its arguments")
    args = parser.parse_args()
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not args.command:
        parser.error("no script is given")
    try:
        pairs = [text.split(":") for text in args.slow]
        args.slow = {int(node): float(mbit) for node, mbit in pairs}
    except ValueError:
        parser.error(f"--slow takes NODE:MBIT, as in 1:50, not {' '.join(args.slow)}")
    return args


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    if sys.argv[1:2] == ["--enter"]:
        enter(int(sys.argv[2]))
        os.execvp(sys.argv[3], sys.argv[3:])
    args = _parse()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with SimulatedNodes(args.nodes, args.per_node, args.mbit, args.delay_ms, args.slow) as nodes:
            code = nodes.run([sys.executable, *args.command], args.timeout)
            for node, sent in enumerate(nodes.bytes_sent()):
                print(f"node {node} sent {sent / 1e6:.2f} MB", flush=True)
    except (NodesUnavailable, ValueError, TimeoutError) as error:
        print(f"simulated_nodes: {error}", file=sys.stderr)
        return 124 if isinstance(error, TimeoutError) else 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
