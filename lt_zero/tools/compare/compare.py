"""The command ``lt-zero compare``: the first output, gradient or update in which two recorded runs differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lt_zero.common.compat import clean_name
from lt_zero.common.console import Console
from lt_zero.common.tables import show
from lt_zero.core.stores.regular_file import parse_json, read_text
from lt_zero.tools.compare.digests import DigestsError, file_of, parting_of, read_digests

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = ("input", "output", "gradient", "update")  # in the order of a step
_VERSION = 2  # of records
_MOST = 1 << 30  # bytes of a record
# Relative differences that rounding explains: the epsilon times the root of 65,536 added numbers. Sums of 16-bit
# numbers are fp32's, and the results of a few layers are rounded.
_ROUNDING = {"float64": 256 * 2.0**-52, "float32": 256 * 2.0**-23, "float16": 8 * 2.0**-10, "bfloat16": 8 * 2.0**-7}
_EXACT = 2.0**-40  # of whole numbers, such as tokens
_SHOWN = 10  # differences in the table, and in a panel of the picture: the names with the largest
_NAMES = 24


class RecordError(ValueError):
    """A record cannot be read or compared. Names the file and the remedy."""


class Tensors(NamedTuple):
    """A recorded tensor: fields are those of ``Fingerprint``."""

    dtype: str
    rows: int
    numel: int
    squares: float
    largest: float
    products: Sequence[float]

    @classmethod
    def of(cls, fields: Any) -> Tensors:
        """Parse a line of a record.

        Raises:
            ValueError, TypeError: lt_zero does not write such a line.
        """
        made = cls(**fields)
        numbers = [made.rows, made.numel, made.squares, made.largest, *made.products]
        if not isinstance(made.dtype, str) or not all(type(number) in (int, float) for number in numbers):
            raise TypeError("a tensor has a field of another type")
        if made.rows < 0 or made.numel < 0 or made.squares < 0:
            raise ValueError("a tensor has a negative size")
        return made

    @property
    def in_parts(self) -> bool:
        """True if the parts of the tensor are known, of which ranks had one each, and only its norm can be compared."""
        return not self.products

    @property
    def total(self) -> float:
        """The norm of all samples."""
        return math.sqrt(self.squares)

    @property
    def norm(self) -> float:
        """The root of the mean of samples' squared norms."""
        return math.sqrt(self.squares / max(1, self.rows))

    @property
    def means(self) -> list[float]:
        """The products, of the mean of the samples."""
        return [value / max(1, self.rows) for value in self.products]


class RecordedRun(NamedTuple):
    """The record of a run.

    Attributes:
        name: as the user wrote the folder.
        about: what is known of the run.
        steps: by number of the optimizer's step, for each kind and name the tensor: 0 has the first weights only.
        skipped: how often a step was skipped before the taken one of that number.
    """

    name: str
    about: Mapping[str, Any]
    steps: Mapping[int, Mapping[tuple[str, str], Tensors]]
    skipped: Mapping[int, int] = {}  # noqa: RUF012 - never changed

    def skips_until(self, step: int) -> int:
        """Count the steps that were skipped before the taken one ``step``."""
        return sum(count for number, count in self.skipped.items() if number <= step)


class Difference(NamedTuple):
    """Difference of one tensor in a step.

    Attributes:
        size: the norm of the difference, relative to that of the tensor.
        allowed: what rounding explains.
        norms: of both runs.
    """

    step: int
    kind: str
    name: str
    size: float
    allowed: float
    norms: tuple[float, float]

    @property
    def excess(self) -> float:
        """The size in units of what is allowed; infinite if one of the two is not finite."""
        return self.size / self.allowed if math.isfinite(self.size) else math.inf


def read_record(folder: Path, number: int = 0) -> RecordedRun:
    """The record of the ``number``-th module of a run.

    Raises:
        RecordError: there is none, or it is damaged.
    """
    path = _record_of(folder, number)
    steps, skipped, taken = dict[int, Mapping[tuple[str, str], Tensors]](), dict[int, int](), 0
    try:
        lines = read_text(path, _MOST, errors="replace").splitlines()
    except OSError as error:
        remedy = f"Record a run: LT_ZERO_RECORD={folder} python train.py"
        raise RecordError(f"{path} cannot be read ({error.strerror or error}). {remedy}") from None
    for count, line in enumerate(lines):
        try:
            found = parse_json(line)
            if count == 0:
                about = dict(found)
            else:
                rows = {(row.pop("kind"), plain(row.pop("name"))): Tensors.of(row) for row in found["tensors"]}
                if found.get("skipped") or _was_skipped(rows, steps.get(taken)):
                    skipped[taken + 1] = skipped.get(taken + 1, 0) + 1
                    continue
                taken = 0 if int(found["step"]) == 0 else taken + 1
                steps[taken] = rows
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if count == len(lines) - 1 and count > 0:
                break  # the run was ended while it wrote
            raise RecordError(f"{path}, line {count + 1}: {error}. Record the run again.") from None
        if count == 0 and about.get("version") != _VERSION:
            wrote = f"is of version {about.get('version')}, and this package reads {_VERSION}"
            raise RecordError(f"{path} {wrote}. Record both runs with the same version of lt_zero.")
    if taken == 0:
        text = f"all {sum(skipped.values())} steps were skipped" if skipped else "the run ended before its first"
        raise RecordError(f"{path} has no step: {text}. Record the run again, for more steps.")
    return RecordedRun(str(folder), about, steps, skipped)


def plain(name: str) -> str:
    """The name of a module or parameter without what ``torch.compile`` puts into it."""
    return clean_name(name) or "(model)"


def _was_skipped(rows: Mapping[tuple[str, str], Tensors], before: Mapping[tuple[str, str], Tensors] | None) -> bool:
    """True if a GPU skipped the step: gradients are not finite, and all weights are as before."""
    broken = any(kind == "gradient" and not math.isfinite(made.squares) for (kind, _), made in rows.items())
    weights = {key: made.products for key, made in rows.items() if key[0] == "weight"}
    return (
        broken and before is not None and all(before[key].products == weights[key] for key in weights if key in before)
    )


# ---- names -----------------------------------------------------------------------------------------------------------


def aligned(one: RecordedRun, two: RecordedRun) -> tuple[RecordedRun, RecordedRun, tuple[str, str]]:
    """Both runs by common names, and the prefixes that names lost: a module may be inside of another in one run."""
    names = [{name for kind, name in run.steps[min(run.steps)] if kind == "weight"} for run in (one, two)]
    if names[0] & names[1] or not all(names):
        return one, two, ("", "")
    first, second = (_prefix(found) for found in names)
    if second.endswith(first):
        cut = "", second.removesuffix(first) if first else second
    elif first.endswith(second):
        cut = first.removesuffix(second) if second else first, ""
    else:
        cut = first, second
    if not {name.removeprefix(cut[0]) for name in names[0]} & {name.removeprefix(cut[1]) for name in names[1]}:
        return one, two, ("", "")
    return _without(one, cut[0]), _without(two, cut[1]), cut


def _prefix(names: set[str]) -> str:
    """The modules in which all parameters are: "model." or ""."""
    every = [name.split(".")[:-1] for name in names]
    shared = []
    for column in zip(*every, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return "".join(f"{part}." for part in shared)


def _without(run: RecordedRun, prefix: str) -> RecordedRun:
    if not prefix:
        return run

    def renamed(name: str) -> str:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
        module = prefix[:-1]  # its outputs and inputs are "model", "model[1]"
        return (
            name.replace(module, "(model)", 1)
            if re.fullmatch(rf"{re.escape(module)}(\[\d+\])?", name)
            else f"around {name}"
        )

    steps = {n: {(kind, renamed(name)): made for (kind, name), made in rows.items()} for n, rows in run.steps.items()}
    return run._replace(steps=steps)


# ---- differences -----------------------------------------------------------------------------------------------------


def compare(one: RecordedRun, two: RecordedRun, factor: float = 1.0) -> list[Difference]:
    """All differences of the steps that both have, in the order of execution, small ones too.

    ``factor``: multiplies what rounding explains.
    """
    found: list[Difference] = []
    for step in sorted(set(one.steps) & set(two.steps)):
        first, second = one.steps[step], two.steps[step]
        inputs, outputs = ([name for kind, name in first if kind == wanted] for wanted in ("input", "output"))
        rank = {name: number for number, name in enumerate(outputs)}
        names: dict[str, list[str]] = {"input": inputs, "output": outputs}
        # Backward computes gradients from the last module to the first.
        grads = [name for kind, name in first if kind == "gradient"]
        names["gradient"] = sorted(grads, key=lambda n: -rank.get(n.rpartition(".")[0], -1))
        names["update"] = [name for kind, name in first if kind == "weight"]
        for kind in _KINDS:
            for name in names[kind]:
                key = "weight" if kind == "update" else kind, name
                pair = first[key], second.get(key)
                if pair[1] is None or not _alike(pair[0], pair[1]):
                    continue
                if kind == "update":
                    made = _of_update(step, name, one, two, factor)
                else:
                    made = _of_tensors(step, kind, name, pair[0], pair[1], factor)
                if made is not None:
                    found.append(made)
    return found


def _alike(one: Tensors, two: Tensors) -> bool:
    """True if two tensors have as many samples of the same size; of losses, means of samples, there may be fewer.

    Of a tensor in parts only the number of all elements has to be the same.
    """
    if one.in_parts or two.in_parts:
        return one.rows * one.numel == two.rows * two.numel
    return one.numel == two.numel and (one.rows == two.rows or one.numel == 1)


def rounding(one: Tensors, two: Tensors, step: int) -> float:
    """The relative difference that rounding explains; those of earlier steps add up like a random walk."""
    if all("int" in each.dtype or each.dtype == "bool" for each in (one, two)):
        return _EXACT
    found = max(_ROUNDING.get(each.dtype, 0.0) for each in (one, two)) or _ROUNDING["float32"]
    return found * math.sqrt(max(1, step))


def _of_tensors(step: int, kind: str, name: str, one: Tensors, two: Tensors, factor: float) -> Difference:
    allowed = rounding(one, two, step) * factor
    if one.in_parts or two.in_parts:
        norms = one.total, two.total
        return Difference(step, kind, name, _relative(abs(norms[0] - norms[1]), norms), allowed, norms)
    norms = one.norm, two.norm
    size = _root_mean(one.means, two.means)
    if one.rows == two.rows:  # otherwise losses, of which more or fewer were averaged
        size = max(size, abs(one.norm - two.norm))
    return Difference(step, kind, name, _relative(size, norms), allowed, norms)


def _of_update(step: int, name: str, one: RecordedRun, two: RecordedRun, factor: float) -> Difference | None:
    """The difference of the updates; for step 0 that of the first weights."""
    key = "weight", name
    after = one.steps[step][key], two.steps[step][key]
    if step == 0:
        return _of_tensors(0, "update", name, *after, factor)
    before = [record.steps.get(step - 1, {}).get(key) for record in (one, two)]
    if before[0] is None or before[1] is None:
        return None
    changes = [
        [new - old for new, old in zip(now.means, then.means, strict=True)]
        for now, then in zip(after, before, strict=True)
        if then is not None
    ]
    zeros = [0.0] * len(changes[0])
    norms = _root_mean(changes[0], zeros), _root_mean(changes[1], zeros)
    scale = max(norms)
    if scale == 0.0 or not all(map(math.isfinite, norms)):
        return Difference(step, "update", name, _relative(0.0, norms), 1.0, norms)
    # Adam's update of an element whose gradient is near zero changes its sign with the rounding of the gradient. So a
    # share of the elements differs in full, and the norm of their difference is the root of that share.
    allowed = 2 * math.sqrt(rounding(*after, step))
    allowed += 2.0**-23 * max(each.norm for each in after) / scale  # weights are rounded to fp32
    return Difference(step, "update", name, _root_mean(*changes) / scale, allowed * factor, norms)


def _relative(size: float, norms: tuple[float, float]) -> float:
    """``size`` relative to the larger norm. If only one norm is finite, infinite; if none is, 0: the runs agree."""
    finite = [math.isfinite(norm) for norm in norms]
    if not all(finite):
        return math.inf if any(finite) else 0.0
    return size / max(norms) if max(norms) else 0.0


def _root_mean(one: Sequence[float], two: Sequence[float]) -> float:
    """The root of the mean of the squared differences: an estimate of the norm of the difference."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, two, strict=True)) / len(one))


def first_of(differences: Sequence[Difference]) -> Difference | None:
    """The first one that rounding does not explain."""
    return next((each for each in differences if each.excess > 1), None)


def not_compared(one: RecordedRun, two: RecordedRun) -> list[str]:
    """Names, with their kind, of what only one run has, or what has other sizes."""
    step = min((s for s in one.steps if s > 0 and s in two.steps), default=None)
    if step is None:
        return []
    first, second = one.steps[step], two.steps[step]
    pairs = {key: (first.get(key), second.get(key)) for key in {**first, **second}}
    return [f"{kind} of {name}" for (kind, name), (a, b) in pairs.items() if a is None or b is None or not _alike(a, b)]


# ---- what is shown -------------------------------------------------------------------------------------------------


def _table(differences: Sequence[Difference], first: Difference) -> Table:
    begun = [each for each in differences if each.excess > 1 and each.step == first.step]
    table = Table(box=SIMPLE_HEAD, title=f"Differences beyond rounding in step {first.step}, in order of execution")
    for column in ("what", "module or parameter"):
        table.add_column(column, overflow="fold")
    for column in ("difference", "rounding", "norm of A", "norm of B"):
        table.add_column(column, justify="right")
    for each in begun[:_SHOWN]:
        numbers = each.size, each.allowed, *each.norms
        table.add_row(_kind(each), each.name, *(f"{number:.3g}" for number in numbers))
    if len(begun) > _SHOWN:
        table.caption = f"and {len(begun) - _SHOWN} more"
    return table


def _kind(each: Difference) -> str:
    return "first weights" if each.step == 0 else each.kind


def draw(differences: Sequence[Difference], names: tuple[str, str]) -> Figure:
    """Differences over steps, in units of what rounding explains, by name: a panel for each kind.

    Raises:
        RecordError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RecordError(f"The picture needs matplotlib ({error}). Run: pip install 'lt-zero[plot]'") from error
    kinds = [kind for kind in _KINDS if any(each.kind == kind for each in differences)]
    figure = Figure(figsize=(9, 1 + 3.2 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)
    for kind, axes in zip(kinds, grid[:, 0], strict=True):
        lines: dict[str, dict[int, float]] = {}
        for each in differences:
            if each.kind == kind and math.isfinite(each.excess):
                lines.setdefault(each.name, {})[each.step] = max(each.excess, 1e-6)
        largest = sorted(lines, key=lambda name: -max(lines[name].values()))
        for number, name in enumerate(largest[:_NAMES]):
            label, steps = (name if number < _SHOWN else None), lines[name]
            axes.plot(list(steps), list(steps.values()), marker=".", linewidth=1, label=label)
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set_yscale("log")
        axes.set_ylabel(f"{kind} / rounding")
        for text in axes.legend(fontsize="xx-small", loc="best").get_texts():
            text.set_parse_math(False)
    grid[-1, 0].set_xlabel("step")
    figure.suptitle(f"{names[0]} and {names[1]}", fontsize="medium", parse_math=False)
    return figure


def _facts(record: RecordedRun) -> str:
    about = {key: value for key, value in record.about.items() if key != "version"}
    return f"{record.name} ({', '.join(f'{key} {value}' for key, value in about.items())}, {max(record.steps)} steps)"


def _notes(one: RecordedRun, two: RecordedRun, cut: tuple[str, str]) -> Iterator[str]:
    """Lines on how the two runs were brought together."""
    for label, run, prefix in (("A", one, cut[0]), ("B", two, cut[1])):
        if prefix:
            yield f"Names of {label} are shown without {prefix!r}."
        if run.skipped:
            every = ", ".join(f"{count} before step {step}" for step, count in run.skipped.items())
            yield f"{label} skipped steps, which do not count: {every}."
    step = min((s for s in one.steps if s > 0 and s in two.steps), default=0)
    for (kind, name), first in one.steps[step].items():
        second = two.steps[step].get((kind, name))
        if kind == "input" and second is not None and not _alike(first, second):
            sizes = [f"{each.rows} samples of {each.numel:,} elements" for each in (first, second)]
            text = f"Input {name} of step {step} has {sizes[0]} in A, and {sizes[1]} in B"
            yield f"{text}: give both the same global batch."
            break


def _of_other_data(one: RecordedRun, two: RecordedRun, step: int) -> str:
    """Explain that inputs differ, after which all does."""
    counts = one.skips_until(step), two.skips_until(step)
    if counts[0] == counts[1]:
        return "The runs got other batches: give both the same data in the same order."
    return (
        f"The runs got other batches: until then A skipped {counts[0]} steps and B {counts[1]}, and went on with the "
        "next batch. Start both with a loss scale that does not overflow (fp16.initial_scale_power), or repeat the "
        "batch of a skipped step."
    )


def _numbered(a: Path, b: Path, file: Callable[[Path, int], Path]) -> Iterator[int]:
    """The numbers of the modules, 0 among them, of which both folders have a file."""
    number = 0
    while number == 0 or all(file(folder, number).exists() for folder in (a, b)):
        yield number
        number += 1


def _both(a: Path, b: Path) -> Iterator[tuple[RecordedRun, RecordedRun]]:
    for number in _numbered(a, b, _record_of):
        yield read_record(a, number), read_record(b, number)


def _record_of(folder: Path, number: int) -> Path:
    """The record of the ``number``-th module of a run."""
    return folder / f"engine{number}.jsonl"


def _have_digests_only(*folders: Path) -> bool:
    """True if the runs have digests of the weights, and not all of them a record."""
    return all(file_of(folder).exists() for folder in folders) and not all(_record_of(f, 0).exists() for f in folders)


def _print_digests(a: Path, b: Path, console: Console) -> bool:
    """Print where the weights of two runs part, for each module; returns whether they do.

    Raises:
        DigestsError: the digests of a run cannot be read or compared.
    """
    parted = False
    for number in _numbered(a, b, file_of):
        one = read_digests(a, number)
        two = read_digests(b, number)
        console.print(f"A: {one}\nB: {two}", markup=False)
        found = parting_of(one, two)
        if found.first is None:
            console.print(f"The weights are the same, to the bit, after each of {found.common:,} steps.")
            continue
        parted = True
        before = (
            f"after step {found.last_equal:,} they are the same" if found.last_equal else "they were never the same"
        )
        console.print(f"The weights part at step {found.first:,}; {before}.")
        console.print("Run both with LT_ZERO_RECORD=FOLDER until then to see which tensor is the first to differ.")
    return parted


def _end_with(problem: str) -> NoReturn:
    """End the program with status 2 and a message."""
    stderr = Console(stderr=True)
    stderr.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2) from None


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run with LT_ZERO_RECORD=A.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="That of another, whose differences are looked for.")],
    output: Annotated[Path | None, typer.Option(help="A PNG file for the differences over steps.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Multiplies what rounding explains.")] = 1.0,
) -> None:
    """Print the first output, gradient or update in which two runs differ beyond rounding.

    Ends with status 1 if there is one, and with 2 after an error.

    Record each run by LT_ZERO_RECORD=FOLDER in its environment. Stage, ranks, precision and offload may differ.

    Of runs with LT_ZERO_DIGESTS=FOLDER it prints the first step after which bits of the weights differ.
    """
    console, parted = Console(highlight=False, soft_wrap=True), False
    try:
        if _have_digests_only(a, b):
            raise typer.Exit(1 if _print_digests(a, b, console) else 0)
        for number, (one, two) in enumerate(_both(a, b)):
            console.print(f"A: {_facts(one)}\nB: {_facts(two)}", markup=False)
            one, two, cut = aligned(one, two)
            for line in _notes(one, two, cut):
                console.print(line, markup=False)
            differences = compare(one, two, tolerance)
            if not differences:
                raise RecordError(f"{one.name} and {two.name} have no tensor in common. Record two runs of one model.")
            if left := not_compared(one, two):
                shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
                console.print(f"Not compared, as only one run has it, or sizes differ: {shown}.", markup=False)
            first = first_of(differences)
            if output is not None:
                path = output if number == 0 else output.with_stem(f"{output.stem}_{number}")
                draw(differences, (one.name, two.name)).savefig(path, format="png", dpi=130)
                console.print(f"wrote {path}", markup=False)
            steps = len({each.step for each in differences if each.step > 0})
            if first is None:
                console.print(f"No difference beyond rounding in {steps} steps, {len(differences):,} tensors.")
                continue
            parted = True
            what = f"{_kind(first)} of {first.name}"
            times = f"{first.excess:.3g} times what rounding explains"
            console.print(f"First difference: step {first.step}, {what}: {first.size:.3g}, {times}.", markup=False)
            if first.kind == "input":
                console.print(_of_other_data(one, two, first.step))
            show(_table(differences, first), console)
    except typer.Exit:
        raise
    except (RecordError, DigestsError, OSError) as error:
        _end_with(str(error))
    except Exception as error:  # a record can be damaged in ways that only show here; 1 means that the runs differ
        _end_with(f"{a} or {b} is damaged ({type(error).__name__}: {error}). Record the runs again.")
    raise typer.Exit(1 if parted else 0)
