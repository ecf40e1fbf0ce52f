"""Runs of script.py on some ranks: how they are started, what they leave, and what they have to come to."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_zero.common.ports import free_port
from tests.faults import tree
from tests.faults.case import Outcome
from tests.support.launchers import environment
from tests.support.paths import ROOT

FOLDER = "LT_ZERO_FAULTS_FOLDER"  # the variable with the campaign's folder
SCRIPT = str(ROOT / "tests" / "faults" / "script.py")
UNTIL, END = 4, 6  # steps: where a disturbed run ends (it begins after 2), and the one that goes on from it
_TOLD = re.compile("lt_zero_rank.*\\.txt|torchelastic_|torchinductor_")  # whole errors, and what torch leaves
BOUND_S = 30.0  # from a fault until no process is left, on an idle machine
CUT = [  # the parts of a net that tensor ranks cut
    {"patterns": [r".*body\.\d\.0\.weight"], "partition_type": "column"},
    {"patterns": [r".*body\.\d\.3\.weight"], "partition_type": "row"},
]
# Keys of the ``zero_optimization`` block, and others, by what ranks share.
MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "tensor": ({}, {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": CUT}}}),
    "pipeline": ({}, {"pipeline": {"num_microbatches": 2}}),
    "expert": ({}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    "sequence": ({}, {"sequence_parallel_size": 2}),
    "MiCS": ({"mics_shard_size": 2}, {}),
    "hpZ": ({"zero_hpz_partition_size": 2}, {}),
}


@dataclass(frozen=True)
class Setting:
    """A face with a configuration.

    Attributes:
        nvme: which of ``offload_optimizer`` and ``offload_param`` rest in files of the run's folder.
        mesh: what ranks share beside data, a key of ``MESHES``.
    """

    face: str
    stage: int
    nvme: tuple[str, ...] = ()
    cpu: bool = False
    full: bool = False
    mesh: str = ""
    ranks: int = 2

    @property
    def name(self) -> str:
        mesh = [self.mesh, f"{self.ranks} ranks"] if self.mesh else []
        rest = [f"{self.face} stage {self.stage}", *mesh]
        return " ".join(rest + ["nvme"] * bool(self.nvme) + ["offload"] * self.cpu + ["file"] * self.full)

    @property
    def stages(self) -> int:
        """Of the pipeline: two of four ranks each, or a rank each."""
        if self.mesh != "pipeline":
            return 1
        return 2 if self.ranks == 4 else self.ranks

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same weights."""
        return self.mesh in ("", "sequence", "MiCS", "hpZ")

    def kind_of(self, rank: int) -> str:
        """A rank in words."""
        if self.stages == 1:
            return f"rank {rank}"
        stage = rank * self.stages // self.ranks
        place = "first" if stage == 0 else "last" if stage == self.stages - 1 else "middle"
        return f"rank {rank} of the {place} stage"

    def keys(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """The ``zero_optimization`` block, and the other keys."""
        of_zero, of_mesh = MESHES[self.mesh]
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0, **of_zero}
        for name in self.nvme:
            zero[name] = {"device": "nvme", "nvme_path": str(folder / "nvme")}
        if self.cpu:
            zero["offload_optimizer"] = {"device": "cpu"}
        more: dict[str, Any] = copy.deepcopy(of_mesh)
        if self.stages > 1:
            more["pipeline"]["stages"] = self.stages
        if self.face != "loop":
            more["checkpoint"] = {"format": "full" if self.full else "sharded"}
        return zero, more


@dataclass
class Run:
    """What has come of a run.

    Attributes:
        codes: exit codes of the processes that were started here, in their order.
        logs: what each rank has printed, and the launcher.
        gone: seconds from the fault until no process was left; None: there was no fault.
    """

    folder: Path
    setting: Setting
    codes: list[int]
    logs: list[str]
    launcher: str
    gone: float | None = None

    def sums(self) -> list[str | None]:
        """What the weights of each rank have come to; None if it has not got so far."""
        found = [re.findall(r'RESULT \{.*"sum": "(\w+)"\}', text) for text in self.logs]
        return [matches[-1] if matches else None for matches in found]

    def last_line(self, rank: int) -> str:
        lines = [line.strip() for line in self.logs[rank].splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def evidence(self) -> str:
        """The ends of all outputs."""
        parts = {"launcher": self.launcher} | {f"rank {rank}": text for rank, text in enumerate(self.logs)}
        ends = (f"--- {name}\n" + "\n".join(text.splitlines()[-22:]) for name, text in parts.items() if text)
        return f"exit codes {self.codes}\n" + "\n".join(ends)


class Hang(Exception):
    """Processes were still there when they had to be gone."""


def run(
    folder: Path, setting: Setting, until: int, launcher: str = "variables", logs: Path | None = None, **fault: Any
) -> Run:
    """Run the script in a folder until its end, or until a fault ends it.

    Args:
        logs: the folder of what the ranks print, unless it is the same.
        launcher: "variables" (ranks with torchrun's variables), "lightning" or "torchrun".
        fault: ``point``, ``fault``, ``rank``, ``value`` of its plan; names in capitals are variables of all ranks.

    Raises:
        Hang: its processes have not ended; they are ended here.
    """
    logs = logs or folder
    for path in (folder / "nvme", logs / "tmp"):
        path.mkdir(exist_ok=True)
    for path in [*logs.glob("*.log"), logs / "fault.json"]:
        path.unlink(missing_ok=True)
    zero, more = setting.keys(folder)
    variables = {name: fault.pop(name) for name in list(fault) if name.isupper()}
    plan = {
        "folder": str(folder),
        "logs": str(logs),
        "face": setting.face,
        "zero": zero,
        "more": more,
        "mesh": setting.mesh,
        "ranks": setting.ranks,
        "until": until,
        **fault,
    }
    ranks, arguments, log = setting.ranks, [json.dumps(plan)], logs / "launcher.log"
    env = environment(GLOO_SOCKET_IFNAME="lo", TMPDIR=str(logs / "tmp"), **variables)
    if launcher == "torchrun":
        options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
        pids = [tree.fork_script("torch.distributed.run", [*options, SCRIPT, *arguments], env, log, module=True)]
    elif launcher == "lightning":
        pids = [tree.fork_script(SCRIPT, arguments, env, log)]
    else:
        named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        named |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "faults"}
        numbers = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
        pids = [tree.fork_script(SCRIPT, arguments, env | named | number, log) for number in numbers]
    codes, gone = _wait(logs, pids)
    texts = [_text(logs / f"rank{rank}.log") for rank in range(ranks)]
    return Run(folder, setting, codes, texts, _text(log), gone)


def _wait(folder: Path, pids: list[int]) -> tuple[list[int], float | None]:
    """Wait until no process is left; the exit codes, and the seconds since the fault."""
    codes: dict[int, int] = {}
    busy = min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 6.0)
    bound = BOUND_S * busy
    began, told = time.time(), folder / "fault.json"
    while tree.descendants(os.getpid()) or not set(pids) <= codes.keys():  # whose threads may end later
        codes |= tree.reap()
        since = json.loads(told.read_text(encoding="utf-8") or "{}").get("time") if told.exists() else None
        if time.time() - (since or began) > (bound if since else 2 * bound):
            alive = [f"{pid} {tree.command_of(pid)}" for pid in tree.descendants(os.getpid())]
            stacks = _dump(folder)
            tree.end_all(os.getpid())
            raise Hang(f"{bound:.0f} s after {told.name}: {alive}\n{stacks}")
        time.sleep(0.03)
    since = json.loads(told.read_text(encoding="utf-8"))["time"] if told.exists() else None
    return [codes[pid] for pid in pids], time.time() - since if since else None


def _dump(folder: Path) -> str:
    for pid in tree.descendants(os.getpid()):
        if tree.catches(pid, tree.DUMP):
            tree.send(pid, tree.DUMP)
    time.sleep(0.5)
    return "\n".join(f"--- {path.name}\n{_text(path)[-5000:]}" for path in sorted(folder.glob("*.log")))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def verify(path: Path, folder: Path) -> str:
    """What is wrong with a checkpoint as ``lt-zero verify`` finds it; "" if nothing."""
    from lt_zero.checkpoint.native.directory import find

    found = Path(find(path))
    if not found.exists():
        return f"there is no {path}: {sorted(p.name for p in path.parent.iterdir())}"
    if found.is_file():
        return ""  # of torch.save; the run that goes on reads it
    log = folder / "verify.log"
    pid = tree.fork_script("lt_zero.cli", ["verify", str(found)], environment(), log, module=True)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "" if code == 0 else f"lt-zero verify: {code}\n{_text(log)}"


@dataclass
class Reference:
    """An undisturbed run: its first checkpoint, its export, and what each rank's weights have come to at the end."""

    folder: Path
    end: list[str]

    def give(self, folder: Path) -> None:
        """Copy the first checkpoint and the export to a run's folder."""
        base = self.folder / "base"
        if base.is_dir():
            shutil.copytree(base, folder / "last")
        else:
            shutil.copy(base, folder / "last")
        shutil.copy(self.folder / "weights.safetensors", folder)


def reference(campaign: Path, setting: Setting) -> Reference:
    """The undisturbed run of a setting, made once in a campaign."""
    folder = campaign / "references" / setting.name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not (folder / "end").exists():
            done = run(folder, setting, END, point="none")
            sums = done.sums()
            if None in sums or (setting.alike and len(set(sums)) > 1) or any(done.codes):
                raise AssertionError(f"The undisturbed run failed.\n{done.evidence()}")
            (folder / "end").write_text(json.dumps(sums), encoding="utf-8")
    return Reference(folder, json.loads((folder / "end").read_text(encoding="utf-8")))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


Judge = Callable[[Run], tuple[str, str]]  # in words what has come of a run, or what is wrong with it


def disturb(
    folder: Path,
    setting: Setting,
    judge: Judge,
    launcher: str = "variables",
    repair: Callable[[], object] = lambda: None,
    disk: Path | None = None,
    **fault: Any,
) -> Outcome:
    """Give a fault to a run that goes on from a checkpoint; look at it, at its files, and at the run after it.

    Args:
        repair: what the user does before the run after it.
        disk: the folder of the run, if it is another one than that of the case.
    """
    wanted, case = reference(folder.parent, setting), folder
    folder = disk or folder
    wanted.give(folder)
    evidence = ""
    try:
        done = run(folder, setting, UNTIL, launcher, case, **fault)
        evidence = "\n=== the disturbed run\n" + done.evidence()
        if done.gone is None:
            return Outcome(False, "the point was not reached", evidence)
        repair()
        _note(done.gone)
        what, problem = judge(done)
        if problem := problem or _export(folder, wanted):
            return Outcome(False, problem, evidence)
        problem, more = goes_on(folder, setting, wanted, case)
    except Hang as hang:
        return Outcome(False, "hang", f"{hang}{evidence}")
    return Outcome(False, problem, more + evidence) if problem else Outcome(True, what)


def _note(gone: float) -> None:
    """Note how soon the processes were gone, for the report."""
    if FOLDER in os.environ:
        with open(f"{os.environ[FOLDER]}/gone", "a", encoding="utf-8") as file:
            file.write(f"{gone:.1f}\n")


def _export(folder: Path, wanted: Reference) -> str:
    """What is wrong with the exported file, which is the old or the new one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = load_file(wanted.folder / "weights.safetensors").keys()
    try:
        found = load_file(folder / "weights.safetensors")
    except (SafetensorError, OSError) as error:
        return f"the exported file is damaged: {error}"
    whole = found.keys() == names and all(bool(value.isfinite().all()) for value in found.values())
    return "" if whole else "weights are lost"


def goes_on(folder: Path, setting: Setting, wanted: Reference, logs: Path) -> tuple[str, str]:
    """What is wrong with a run that goes on from what another has left, and evidence; "" if it comes to the same."""
    if problem := verify(folder / "last", logs):
        return "no complete checkpoint", problem
    done = run(folder, setting, END, logs=logs)
    sums = done.sums()
    if sums != wanted.end or any(done.codes):
        what = "the resumed run differs" if None not in sums else "the resumed run fails"
        return what, f"wanted {wanted.end}, got {sums}\n{done.evidence()}"
    left = [path for path in folder.iterdir() if path.name.startswith(".last") or ".tmp-" in path.name]
    left += [path for path in (logs / "tmp").iterdir() if not _TOLD.match(path.name)]
    left += [
        path for path in (folder / "nvme").iterdir() if path.suffix != ".new"
    ]  # which are removed when they are old
    return ("files are left after the resumed run", str(left)) if left else ("", "")
