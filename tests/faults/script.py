"""A user's script whose run is disturbed: it goes on from a checkpoint, trains, validates, saves, exports and ends.

The argument is a plan in JSON, see ``Plan``. Faults come from hooks of the script, none from the package.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero

ROWS, WIDTH, MICRO = 64, 17, 4  # odd, so that parts are padded
SAVE_EVERY = 2
STOP_S = 4.0  # that a process is stopped


@dataclass
class Plan:
    """What a run is to do.

    Attributes:
        folder: of the run: its checkpoint ``last``, its export ``weights.safetensors``.
        logs: the folder of what it prints.
        face: "trainer", "fabric" or "loop".
        zero: the ``zero_optimization`` block; ``more``: other keys.
        until: the last step; the script begins after that of its checkpoint, if there is one.
        point, fault: where it ends, and how; ``rank``: that of the fault.
    """

    folder: str
    logs: str
    face: str
    zero: dict[str, Any]
    more: dict[str, Any]
    until: int
    point: str = ""
    fault: str = ""
    rank: int = 0
    value: str = ""  # of the fault

    @property
    def last(self) -> str:
        return f"{self.folder}/last"


PLAN = Plan(**json.loads(sys.argv[1]))
PHASE = ""  # save, load, export: files are written or read


# ---- faults ----------------------------------------------------------------------------------------------------------


def _rank() -> int:
    given = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return dist.get_rank() if dist.is_initialized() else int(given)


def at(point: str) -> None:
    """A point of the run: its fault happens here."""
    if point != PLAN.point or _rank() != PLAN.rank or not PLAN.fault:
        return
    fault, PLAN.fault = PLAN.fault, ""
    told = {"point": point, "pid": os.getpid(), "time": time.time()}
    Path(PLAN.logs, "fault.json").write_text(json.dumps(told), encoding="utf-8")
    FAULTS[fault]()


def _stop() -> None:
    """Stop this process for some seconds; a shell wakes it."""
    subprocess.Popen(["sh", "-c", f"sleep {STOP_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def _signal(number: int) -> Callable[[], None]:
    def fault() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # a handler runs

    return fault


def _shim() -> None:
    """From here on the operations of ``Plan.value`` fail, see shim.c."""
    os.environ["FAULT"] = PLAN.value


def _memory() -> None:
    """From here on this process gets no more memory than some MB."""
    from tests.faults.memory import limit_address_space

    limit_address_space(int(PLAN.value))


def _killed_by_kernel() -> None:
    """Take memory in a group of a few MB, until the kernel ends this process."""
    Path(PLAN.value, "cgroup.procs").write_text(str(os.getpid()))
    taken = [bytearray(1 << 20) for _ in range(4096)]
    raise RuntimeError(f"took {len(taken)} MB in a group that has less")


def _full_disk() -> None:
    """Fill the file system of the run's folder."""
    with open(f"{PLAN.folder}/hog", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def _deleted() -> None:
    """Remove what a save has written, as another program might."""
    for path in Path(PLAN.folder).glob(".last.tmp-*"):
        shutil.rmtree(path)


def _closed() -> None:
    """Let nobody make, rename or remove a file in the run's folder, not even root."""
    subprocess.run(["chattr", "+i", PLAN.folder], check=True)


FAULTS: dict[str, Callable[[], None]] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGINT": _signal(signal.SIGINT),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGSTOP": _stop,
    "os._exit(3)": lambda: os._exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(1)": lambda: sys.exit(1),
    "sys.exit(0)": lambda: sys.exit(0),
    "ValueError": _raise(ValueError("broken on purpose")),
    "MemoryError": _raise(MemoryError("broken on purpose")),
    "KeyboardInterrupt": _raise(KeyboardInterrupt()),
    "shim": _shim,
    "address space": _memory,
    "kernel": _killed_by_kernel,
    "full disk": _full_disk,
    "deleted folder": _deleted,
    "closed folder": _closed,
}


class phase:
    """Context of an operation on files, within which calls of the system are points."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        global PHASE
        if self.name != "load":
            at(f"before {self.name}")
        PHASE = self.name

    def __exit__(self, *rest: Any) -> None:
        global PHASE
        PHASE = ""


def watch_files() -> None:
    """Make the calls by which files are written and read points of the run."""
    real_open, real_write, real_read, real_sync = os.open, os.pwritev, os.preadv, os.fsync
    real_rename, real_replace = os.rename, os.replace
    sealed = False

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        nonlocal sealed
        if PHASE == "save" and flags & os.O_CREAT and os.path.basename(os.fspath(path)) == "manifest.json":
            at("manifest")
            sealed = True
        return real_open(path, flags, *rest, **named)

    def written(*args: Any) -> int:
        if PHASE in ("save", "export"):
            at(f"middle of {PHASE}")
        return real_write(*args)

    def read(*args: Any) -> int:
        if PHASE == "load":
            at("middle of load")
        return real_read(*args)

    def synced(fd: int) -> None:
        nonlocal sealed
        if PHASE == "export":
            at("middle of export")
        if sealed and os.path.isdir(f"/proc/self/fd/{fd}"):
            sealed = False
            at("before rename")
        real_sync(fd)

    def renamed(*args: Any, **named: Any) -> None:
        if PHASE == "save":
            at("after rename")  # of what was exchanged for the old checkpoint
        real_rename(*args, **named)

    def replaced(*args: Any, **named: Any) -> None:
        if PHASE == "export":
            at("rename of export")
        real_replace(*args, **named)

    os.open, os.pwritev, os.preadv, os.fsync = opened, written, read, synced
    os.rename, os.replace = renamed, replaced


# ---- what is trained -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(5)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, 23), nn.Tanh(), nn.Dropout(dropout), nn.Linear(23, WIDTH)) for _ in range(3)
        ]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 3)
        self.body[1].register_forward_hook(self._watch)
        self.entered = 0

    def _watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if not self.training or not torch.is_grad_enabled():
            at("validation")
            return
        self.entered += 1
        if self.entered == 1:
            at("first forward")
        if self.entered == 2:
            at("forward")
            output.register_hook(lambda grad: at("backward"))

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows))


def rows_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(MICRO, WIDTH, generator=source), torch.randint(3, (MICRO,), generator=source)


def loss_of(net: Any, step: int, rank: int) -> Tensor:
    rows, labels = rows_of(step, rank)
    return nn.functional.cross_entropy(net(rows), labels)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: at("step"))
    return optimizer


def tell(net: nn.Module, step: int) -> None:
    """Print what a run has come to."""
    with torch.no_grad(), lt_zero.gathered(net):
        values = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    line = {"rank": _rank(), "step": step, "sum": hashlib.sha256(values).hexdigest()[:16]}
    print("RESULT " + json.dumps(line), flush=True)


def keep(step: int) -> None:
    """Copy the first checkpoint of an undisturbed run, from which others go on."""
    if PLAN.point == "none" and step == SAVE_EVERY and _rank() == 0:
        copy = shutil.copytree if os.path.isdir(PLAN.last) else shutil.copy
        copy(PLAN.last, f"{PLAN.folder}/base")


# ---- the faces -------------------------------------------------------------------------------------------------------


def run_trainer() -> None:
    from tests.faults.script_trainer import fit

    fit(PLAN, at, phase, Net(0.2), optimizer_of, tell, keep)


def run_fabric() -> None:
    import lightning as L

    strategy = lt_zero.FabricZeroStrategy(config={"zero_optimization": PLAN.zero, **PLAN.more})
    fabric: Any = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    at("set-up")
    net = Net(0.0)
    model, optimizer = fabric.setup(net, optimizer_of(net))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if (found := _found()) is not None:
        with phase("load"):
            fabric.load(found, state)
    for step in range(state["step"], PLAN.until):
        model.train()
        fabric.backward(loss_of(model, step, fabric.global_rank))
        at("clip")
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            _validate(model, step)
            state["step"] = step + 1
            with phase("save"):
                fabric.save(PLAN.last, state)
            keep(step + 1)
    with phase("export"):
        fabric.strategy.export(model, f"{PLAN.folder}/weights.safetensors")
    tell(net, PLAN.until)
    at("teardown")


def run_loop() -> None:
    lt_zero.init_distributed()
    at("set-up")
    net = Net(0.0)
    config = {"zero_optimization": PLAN.zero, "gradient_clipping": 1.0, **PLAN.more}
    engine: Any = lt_zero.initialize(model=net, optimizer=optimizer_of(net), config=config)[0]
    begin = 0
    if (found := _found()) is not None:
        with phase("load"):
            begin = engine.load_checkpoint(PLAN.folder, Path(found).name)[1]["step"]
    for step in range(begin, PLAN.until):
        engine.train()
        engine.backward(loss_of(engine, step, engine.global_rank))
        at("clip")
        engine.step()
        if (step + 1) % SAVE_EVERY == 0:
            _validate(engine, step)
            with phase("save"):
                engine.save_checkpoint(PLAN.folder, "last", client_state={"step": step + 1})
            keep(step + 1)
    with phase("export"):
        engine.save_16bit_model(PLAN.folder, "weights.safetensors")
    tell(net, PLAN.until)
    at("teardown")
    engine.destroy()


def _found() -> str | None:
    """The checkpoint to go on from."""
    from lt_zero.checkpoint.native.directory import find

    found = find(PLAN.last)
    return found if Path(found).exists() else None


def _validate(model: Any, step: int) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model, step, 7)


def _redirect() -> None:
    """Give this rank a log of its own."""
    with open(f"{PLAN.logs}/rank{_rank()}.log", "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    _redirect()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    watch_files()
    atexit.register(at, "exit")
    at("start")
    {"trainer": run_trainer, "fabric": run_fabric, "loop": run_loop}[PLAN.face]()
