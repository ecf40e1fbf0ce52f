"""All comparisons with peers in one run: a table of ratios, its picture, and one of memory over a step (20 minutes).

    python benchmarks/bench_all.py [--deepspeed-python /path/to/venv/bin/python]
    python benchmarks/bench_all.py --only step,load
    python benchmarks/bench_all.py --only frozen,memory-budget --add
    python benchmarks/bench_all.py --docs

Cases of a measurement take turns, and ratios are taken within a round. A measurement is disturbed if other programs or
the hypervisor took CPU time meanwhile, or if quartiles of lt_zero's ratios are far apart; it is repeated, at most
twice, after all others and as long as the budget lasts. All attempts are in the .json, with the figures of each round.

``--add`` puts what was measured into the stored results, with its own date, machine and versions, and leaves all other
rows as they are.

Results are those of the kernels' best instruction set; as on a CPU without AVX-512 they are with
``LT_ZERO_ISA=avx2 ATEN_CPU_CAPABILITY=avx2``. ``--docs`` measures nothing: it puts the ratios of all results files
into README.md and docs/performance.md, and draws the pictures of docs/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import bench_pictures
import bench_report
import psutil
import step_memory
from bench_rows import Group, LeftOut, Options, best_isa, groups
from measuring import ROOT, Rounds, cpu_name, ratio, versions

OTHERS, STEAL, SPREAD = 0.05, 0.02, 0.15  # shares of all cores; of a median from quartile to quartile
REPEATS = 2

# ---- the machine meanwhile -----------------------------------------------------------------------------------------


class Watch:
    """What the machine did beside this process and its children, since it was made; in seconds of CPU time."""

    def __init__(self) -> None:
        self.start, self.load = time.monotonic(), os.getloadavg()[0]
        self._before = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        """All but this process, its children and the kernel's threads, which write what was saved; and steal."""
        times = psutil.cpu_times()._asdict()
        busy: float = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            busy -= usage.ru_utime + usage.ru_stime
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.ppid() == 2 and not process.cmdline():
                    spent = process.cpu_times()
                    busy -= spent.user + spent.system
        return busy, times.get("steal", 0.0)

    def shares(self) -> tuple[float, float]:
        """Of all cores: other programs', and the hypervisor's."""
        room = max(time.monotonic() - self.start, 1e-9) * (psutil.cpu_count() or 1)
        others, steal = ((after - before) / room for after, before in zip(self._read(), self._before, strict=True))
        return max(0.0, others), max(0.0, steal)


@dataclass
class Attempt:
    """One run of a group.

    Attributes:
        reasons: what disturbed it.
        spread: the widest of lt_zero's ratios, from quartile to quartile, relative to the median.
    """

    rounds: Rounds
    seconds: float
    others: float
    steal: float
    load: float
    spread: float = 0.0
    reasons: list[str] = field(default_factory=list)


def judge(attempt: Attempt, group: Group) -> None:
    """Find out what disturbed it."""
    widest = ""
    for row in group.rows:
        reference = next((name for name in row.references if name in attempt.rounds), None)
        names = attempt.rounds if row.cases is None else [name for name in row.cases if name in attempt.rounds]
        for name in names if reference else ():
            spread = abs(ratio(attempt.rounds[name], attempt.rounds[str(reference)]).spread)
            if "lt_zero" in name and spread > attempt.spread:
                attempt.spread, widest = spread, name
    if not group.timed:
        return
    found = {
        f"other programs, {attempt.others:.0%} of the CPUs": attempt.others > OTHERS,
        f"the hypervisor, {attempt.steal:.0%} of the CPUs": attempt.steal > STEAL,
        f"quartiles of {widest} {attempt.spread:.0%} apart": attempt.spread > SPREAD,
    }
    attempt.reasons = [reason for reason, holds in found.items() if holds]


# ---- measurements --------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """A group, its attempts, and why there are none."""

    group: Group
    attempts: list[Attempt] = field(default_factory=list)
    left_out: str = ""
    failed: bool = False

    @property
    def kept(self) -> int:
        """The attempt that counts: an undisturbed one, or the one that was disturbed least."""

        def badness(number: int) -> tuple[bool, float]:
            each = self.attempts[number]
            return bool(each.reasons), each.others + each.steal + each.spread

        return min(range(len(self.attempts)), key=badness, default=0)

    @property
    def again(self) -> bool:
        return bool(self.attempts) and all(attempt.reasons for attempt in self.attempts)

    def measure(self, options: Options) -> None:
        watch = Watch()
        try:
            rounds = self.group.measure(options)
        except LeftOut as reason:
            self.left_out = str(reason)
            return
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            if not self.attempts:
                self.left_out, self.failed = f"failed: {(str(error) or repr(error)).splitlines()[0]}", True
            return
        others, steal = watch.shares()
        seconds = time.monotonic() - watch.start
        self.attempts.append(Attempt(rounds, seconds, others, steal, watch.load))
        judge(self.attempts[-1], self.group)

    def state(self) -> str:
        if not self.attempts:
            return self.left_out
        last = self.attempts[-1]
        return f"{last.seconds:.0f} s" + (f", disturbed by {'; '.join(last.reasons)}" if last.reasons else "")

    def content(self) -> dict[str, Any]:
        """As it stands in the results file."""
        attempts = [asdict(attempt) | {"rounds": short(attempt.rounds)} for attempt in self.attempts]
        group = {"name": self.group.name, "unit": self.group.unit, "rows": [asdict(row) for row in self.group.rows]}
        return group | {"left_out": self.left_out, "kept": self.kept, "attempts": attempts}


def short(rounds: Rounds) -> Rounds:
    """With as many digits as mean something."""
    return {name: [float(f"{value:.5g}") for value in values] for name, values in rounds.items()}


def measure_all(
    chosen: Iterable[Group], options: Options, budget: float, note: Callable[[str], object]
) -> list[Result]:
    """Each group once, then those again that were disturbed, while there is time. ``budget`` is in seconds."""
    start = time.monotonic()
    results = [Result(group) for group in chosen]
    for number in range(1 + (0 if options.quick else REPEATS)):
        for result in results:
            if number > 0:
                spent = time.monotonic() - start
                if not result.again or spent + result.attempts[-1].seconds > budget:
                    continue
            note(f"{result.group.name} ...")
            result.measure(options)
            note(f"{result.group.name}: {result.state()}")
    return results


# ---- the command ---------------------------------------------------------------------------------------------------


def content_of(results: list[Result], options: Options, before: float) -> dict[str, Any]:
    packages = ["lightning", "safetensors", "numpy", *([] if options.deepspeed else ["deepspeed"])]
    found = versions(packages=packages)
    if options.deepspeed:
        found += f"; DeepSpeed {options.deepspeed['version']} with torch {options.deepspeed['torch']}"
    head: dict[str, Any] = {"date": str(date.today()), "isa": best_isa(), "cpu": cpu_name(), "versions": found}
    head |= {"quick": options.quick, "load": [before, os.getloadavg()[0]]}
    return head | {"groups": [result.content() for result in results]}


def added(stored: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Stored results with the groups of ``content`` in them, which keep where and when they were measured."""
    head = {key: content[key] for key in ("date", "isa", "cpu", "versions", "load", "quick")}
    new = {group["name"]: group | {"measured": head} for group in content["groups"]}
    old = {group["name"]: group for group in stored["groups"]}
    order = list(dict.fromkeys([*(group.name for group in groups()), *old]))
    every = old | new
    return stored | {"groups": [every[name] for name in order if name in every]}


def write(content: dict[str, Any], folder: Path) -> Path:
    """The table, the figures and, with matplotlib, the pictures; returns the path of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"all_{content['isa']}.md"
    file.write_text(bench_report.page(content), encoding="utf-8")
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    file.with_suffix(".json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    try:
        bench_report.draw(content, file.with_suffix(".png"))
        if content.get("memory"):
            step_memory.draw(content["memory"], folder / "step_memory.png")
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install lt-zero[bench])", file=sys.stderr)
    return file


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [group.name for group in groups()] + ["memory"]
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--deepspeed-python", default="", help="an interpreter that has deepspeed")
    parser.add_argument("--budget", type=float, default=20, help="minutes; nothing is repeated after it")
    parser.add_argument("--path", type=Path, default=Path("/tmp"), help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, help="folder; default benchmarks/results, or build/bench-all for a part")
    parser.add_argument("--add", action="store_true", help="to the stored results of this instruction set")
    parser.add_argument("--docs", action="store_true", help="only put the stored ratios into the pages, and draw them")
    args = parser.parse_args()
    args.only = args.only.split(",") if args.only else names
    if unknown := [name for name in args.only if name not in names]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(names)}")
    if not args.deepspeed_python and importlib.util.find_spec("deepspeed"):
        args.deepspeed_python = sys.executable
    whole = args.only == names and not args.quick
    args.out = args.out or (bench_report.RESULTS if whole or args.add else ROOT / "build" / "bench-all")
    if args.add and ("memory" in args.only or not (args.out / f"all_{best_isa()}.json").exists()):
        parser.error(f"--add: name groups with --only, without memory; {args.out} has to have results of {best_isa()}")
    return args


def main() -> None:
    args = parse()
    if args.docs:
        stored = bench_report.stored()
        if not stored:
            raise SystemExit("there are no results in benchmarks/results: run make bench-all first")
        print("\n".join(map(str, bench_report.rewrite(stored))))
        bench_pictures.main()
        return
    warnings.simplefilter("ignore")  # of DCP, which says in each call that there is one process
    options = Options(args.quick, args.deepspeed_python, args.path)
    before = os.getloadavg()[0]

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    chosen = [group for group in groups() if group.name in args.only]
    pictures = 120 * ("memory" in args.only)  # seconds that are left for it
    results = measure_all(chosen, options, args.budget * 60 - pictures, note)
    content = content_of(results, options, before)
    if "memory" in args.only:
        note("memory over a step ...")
        content["memory"] = (
            step_memory.traces(1, 64, ["ddp", "lt_zero-3"]) if args.quick else step_memory.traces(8, 512)
        )
    if args.add:
        kept = (args.out / f"all_{content['isa']}.json").read_text(encoding="utf-8")
        content = added(json.loads(kept), content)
    file = write(content, args.out)
    print(bench_report.page(content))
    print(file)
    raise SystemExit(any(result.failed for result in results))


if __name__ == "__main__":
    main()
