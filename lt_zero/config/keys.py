"""Keys that the schema does not have: DeepSpeed's, whose status ``keys.tsv`` tells, old spellings, and unknown ones.

Each row of the table is about a dotted key. A segment ``*`` matches any one segment; a last segment ``**`` matches the
block itself and everything in it. The most specific row wins: segment by segment from the left, a name precedes ``*``,
which precedes ``**``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from lt_zero.common.errors import MOST_SHOWN, Check, dotted
from lt_zero.common.errors import Path as KeyPath
from lt_zero.common.fields import Block, block_of, dotted_keys, keys_of
from lt_zero.config.document import MISSING, Document, Notice

TABLE = Path(__file__).with_name("keys.tsv")
STATUSES = ("alias", "no_effect", "unsupported")
ZERO = "zero_optimization"
NO_EFFECT = " has no effect here: "  # between a key and the reason

# Keys that a Trainer has, too, by the names of its arguments and attributes.
TRAINER: Mapping[str, str] = {
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "gradient_clipping": "gradient_clip_val",
}

# How each key is resolved, for docs/config.md and errors. Excludes keys with "auto" as a value of their own.
AUTO: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "the size of the first batch",
    "gradient_accumulation_steps": f"Trainer({TRAINER['gradient_accumulation_steps']}), or what train_batch_size and "
    "the micro-batch leave, if they are written",
    "train_batch_size": "micro-batch * accumulation * ranks",
    "gradient_clipping": f"Trainer({TRAINER['gradient_clipping']}), 0 without one",
    "zero_optimization.reduce_bucket_size": "hidden size squared",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 * hidden size squared, rounded down",
    "zero_optimization.stage3_param_persistence_threshold": "10 * hidden size",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "false",
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
    "optimizer.params.lr": "`lr` or `learning_rate` of the module or its hparams",
    "optimizer.params.betas": "`betas`, or `adam_beta1` and `adam_beta2`, of the module or its hparams, else "
    "0.9, 0.999",
    "optimizer.params.eps": "`eps` or `adam_epsilon` of the module or its hparams, else 1e-8",
    "optimizer.params.weight_decay": "`weight_decay` of the module or its hparams, else 0",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "the optimizer's lr",
    "scheduler.params.warmup_num_steps": "`warmup_steps` of the module or its hparams, else `warmup_ratio` of it times "
    "the optimizer steps of the run, at least 1",
    "scheduler.params.total_num_steps": "the optimizer steps of the run (Trainer.estimated_stepping_batches)",
}


@dataclass(frozen=True)
class KeyStatus:
    """A row of the table."""

    key: str  # dotted; may have * and end in **
    status: str  # alias, no_effect (accepted and ignored), unsupported (refused)
    to: str  # of an alias: the dotted key or block that it stands for; several are joined by " and "
    off: str  # JSON values joined by | that switch the key off; these are accepted silently
    note: str  # one or two sentences for users

    def targets(self, path: KeyPath) -> tuple[str, ...]:
        """The dotted keys that the alias ``path`` stands for; segments matched by ``**`` are kept."""
        fixed = len(self.key.split(".")) - 1 if self.key.endswith(".**") else len(path)
        rest = "".join(f".{part}" for part in path[fixed:])
        return tuple(f"{target}{rest}" for target in self.to.split(" and ") if target)

    @property
    def refused(self) -> bool:
        return self.status == "unsupported"


@cache
def rows() -> tuple[KeyStatus, ...]:
    """The whole table, in the order of its file (by key)."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)  # ``off`` contains JSON quotes
        next(lines)
        return tuple(KeyStatus(*line) for line in lines)


def aliases() -> tuple[KeyStatus, ...]:
    """The rows of other spellings."""
    return tuple(row for row in rows() if row.status == "alias")


@cache
def _patterns() -> Mapping[str, Sequence[tuple[list[str], KeyStatus]]]:
    """The segments and rows of all keys, by their last segment."""
    found: dict[str, list[tuple[list[str], KeyStatus]]] = {}
    for row in rows():
        pattern = row.key.split(".")
        found.setdefault(pattern[-1], []).append((pattern, row))
    return found


def lookup(path: KeyPath) -> KeyStatus | None:
    """The most specific row for a key or block, or None."""
    patterns = _patterns()
    found: dict[tuple[int, ...], KeyStatus] = {}  # by how general each segment is
    for pattern, row in chain.from_iterable(patterns.get(last, ()) for last in {str(path[-1]), "*", "**"}):
        end = len(pattern) - 1 if pattern[-1] == "**" else None
        if _fits(path[:end], pattern[:end]):
            found[tuple({"*": 1, "**": 2}.get(part, 0) for part in pattern)] = row
    return found[min(found)] if found else None


def below(path: KeyPath) -> bool:
    """True if the table has rows for keys inside the block ``path``."""
    patterns = (row.key.split(".") for row in rows())
    return any(_fits(path, p[: len(path)]) and p[len(path) :] not in ([], ["**"]) for p in patterns)


def _fits(path: KeyPath, pattern: Sequence[str]) -> bool:
    return len(path) == len(pattern) and all(want in ("*", str(part)) for part, want in zip(path, pattern, strict=True))


def is_off(row: KeyStatus, value: Any) -> bool:
    """True if this value switches the key off: null, or one of the values in the row's ``off``.

    Numbers are compared by value, text ignoring case; booleans are not numbers. A block equals a mapping in ``off`` if
    the keys named there do.
    """
    return value is None or any(_same(value, json.loads(off)) for off in row.off.split("|") if off)


def _same(value: Any, off: Any) -> bool:
    if isinstance(off, dict):
        return isinstance(value, Mapping) and all(_same(value.get(key), inner) for key, inner in off.items())
    if isinstance(value, bool) or isinstance(off, bool):
        return value is off
    if isinstance(value, str) and isinstance(off, str):
        return value.lower() == off.lower()
    return bool(value == off)


# ---- old spellings ---------------------------------------------------------------------------------------------------

# Old types of values that current keys accept, for the documentation.
FORMS: Mapping[str, str] = {
    f"{ZERO}: true": f"{ZERO}.stage: 1",
    f"{ZERO}: false": f"{ZERO}.stage: 0",
    f"{ZERO}.offload_optimizer: true": f"{ZERO}.offload_optimizer.device: cpu",
    f"{ZERO}.offload_param: true": f"{ZERO}.offload_param.device: cpu",
    f"{ZERO}.offload_param: nvme": f"{ZERO}.offload_param.device: nvme",
    "gradient_clipping: {enabled: true, clip_value: 1.0}": "gradient_clipping: 1.0",
}


def rename(document: Document) -> Document:
    """Move values from old keys to current ones, with a notice for each; a contradiction is a problem."""
    document = document.copy()
    _rename_values(document)
    for row in aliases():
        old, target = tuple(row.key.removesuffix(".**").split(".")), tuple(row.to.split("."))
        value = document.get(old)
        if value is MISSING or old[0] == "gradient_clipping":  # see _rename_values
            continue
        if value is None or (old[-1] == "fp32_allreduce" and value is not True):
            document.pop(old)  # null in an old spelling is the same as absent
        elif old[-1] in ("pin_memory", "cpu_offload_use_pin_memory"):
            _spread_pin_memory(document, old, value)
        elif row.key.endswith(".**") and isinstance(value, Mapping):
            document.tell(old, f"{dotted(old)} is read as {row.to}. Write the latter.")
            for key in list(value):
                document.move((*old, key), (*target, key), value[key], quiet=True)
            document.pop(old)
        elif target[-1] == "device" and value in (True, False):  # cpu_offload: true; also 1 and 0
            document.move(old, target, "cpu" if value else "none")
        elif target[-1] == "ignore_unused_parameters" and isinstance(value, bool):  # find_unused_parameters
            document.move(old, target, not value)
        else:
            document.move(old, target, "fp32" if old[-1] == "fp32_allreduce" else value)
    return document


def _rename_values(document: Document) -> None:
    """Old types of values of current keys, see ``FORMS``."""
    for path in ((ZERO,), (ZERO, "offload_optimizer"), (ZERO, "offload_param"), (ZERO, "offload_params")):
        value, key = document.get(path), "stage" if path == (ZERO,) else "device"
        if isinstance(value, bool):
            meant: Any = int(value) if key == "stage" else "cpu" if value else "none"
        elif key == "device" and value in ("none", "cpu", "nvme"):
            meant = value
        else:
            continue
        shown = f"{dotted(path)}: {str(value).lower()} is read as {dotted((*path, key))}={meant}. Write the latter."
        document.tell(path, shown)
        document.put(path, {key: meant})
    path = ("compile",)
    value = document.get(path)
    if isinstance(value, Mapping) and "deepcompile" in value and not value["deepcompile"]:
        # The other keys of DeepCompile are switched off with it.
        document.put(path, {name: value[name] for name in ("disable", "backend", "kwargs") if name in value})
    path = ("gradient_clipping",)
    value = document.get(path)
    if not isinstance(value, Mapping) or set(value) - {"enabled", "clip_value"}:
        return
    enabled, limit = value.get("enabled", True), value.get("clip_value")
    if enabled not in (True, False) or (enabled and limit is None):
        text = f"gradient_clipping={dict(value)} has no limit. Write the norm as a number: gradient_clipping: 1.0."
        document.problem(path, text)
        document.pop(path)
        return
    meant = limit if enabled else 0.0
    text = f"gradient_clipping: {{enabled, clip_value}} is read as a limit of the norm, gradient_clipping={meant}."
    document.tell(path, f"{text} Write the latter.")
    document.put(path, meant)


def _spread_pin_memory(document: Document, old: KeyPath, value: Any) -> None:
    """One switch for both offload blocks; a block's own key takes precedence."""
    blocks = [n for n in ("offload_optimizer", "offload_param") if isinstance(document.get((ZERO, n)), Mapping)]
    paths = [(ZERO, name, "pin_memory") for name in blocks or ["offload_optimizer"]]
    added = [document.put(path, value) for path in paths if document.get(path) is MISSING]
    if any(added):
        document.tell(old, f"{dotted(old)} is read as {' and '.join(map(dotted, paths))}={value}. Write the latter.")
    document.pop(old)


# ---- status of each key ----------------------------------------------------------------------------------------------

_LONGEST = 200  # characters of a key that is compared with others
_NO_HINT = " Remove it, or see docs/config.md for all keys."
_OFF = (False, None, "none", "None")  # values that switch an unsupported block off
_FROZEN = ("freeze_step", "cuda_aware", "comm_backend_name")
_ONE_BIT: Mapping[str, Sequence[str]] = {  # arguments of 1-bit optimizers, by their names in lower case
    "onebitadam": _FROZEN,
    "onebitlamb": (*_FROZEN, "coeff_beta", "factor_max", "factor_min", "factor_threshold"),
    "zerooneadam": (
        *("cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler"),
        *("local_step_scaler", "local_step_clipper"),
    ),
}
_FREE = {("optimizer", "params"), ("scheduler", "params")}  # checked where their type is known
# Sizes that TRL computes for its reference models. It writes each as one name with a dot, which DeepSpeed drops.
_DROPPED = frozenset(
    f"{ZERO}.{name}"
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)


def classify(document: Document, schema: type[Block], checks: Mapping[str, Check]) -> Document:
    """Remove keys that the schema does not have, with a notice or a problem for each; note those written "auto".

    ``checks`` of blocks, by their names, tell whether an argument is misplaced.
    """
    document = document.copy()
    autos: set[KeyPath] = set()
    hints = count()  # each is a search through all keys

    def hint(path: KeyPath, value: Any) -> str:
        return _hint(document, path, value, schema, checks) if next(hints) < MOST_SHOWN else _NO_HINT

    for path, field, kind in list(_special(document.values, schema, ())):
        value, key = document.get(path), dotted(path)
        document.pop(path)
        if kind == "foreign":
            _foreign(document, path, value, hint)
        elif kind == "auto" and key in AUTO:
            autos.add(path)
        elif kind == "auto":
            default = ""
            if field is not None and not field.is_required():
                value = field.get_default(call_default_factory=True)
                value = json.dumps(value) if value is None or isinstance(value, bool) else value
                default = f"; its default is {value}"
            text = f'{key}="auto": it cannot be resolved for this key. Write a value, or remove the key{default}.'
            document.problem(path, text)
    document.autos = frozenset(autos)
    return document


def _special(
    values: Mapping[str, Any], schema: type[Block], path: KeyPath
) -> Iterator[tuple[KeyPath, FieldInfo | None, Literal["foreign", "null", "auto"]]]:
    """Keys that the schema does not have, and those written null or "auto" where that is no value of the key."""
    fields = keys_of(schema)
    for key, value in values.items():
        here, field = (*path, key), fields.get(key)
        if field is None:
            yield here, None, "foreign"
        elif value is None and not field.is_required() and field.default is not None:
            yield here, field, "null"  # the same as absent
        elif value == "auto" and "auto" not in str(field.annotation):
            yield here, field, "auto"
        elif isinstance(value, Mapping) and (inner := block_of(field)) is not None:
            yield from _special(value, inner, here)
        elif isinstance(value, Mapping) and here in _FREE:
            own = _ONE_BIT.get(str(values.get("type")).lower(), ()) if here[0] == "optimizer" else ()
            for name, argument in value.items():
                if lookup((*here, name)) is not None and name not in own:
                    yield (*here, name), None, "foreign"
                elif argument == "auto":
                    yield (*here, name), None, "auto"


def _foreign(document: Document, path: KeyPath, value: Any, hint: Callable[[KeyPath, Any], str]) -> None:
    """A key that the schema does not have."""
    row, key = lookup(path), dotted(path)
    if str(path[-1]).startswith("_"):
        text = f"{key}{NO_EFFECT}its name begins with an underscore, so it is read as a comment."
        document.notices.append(Notice(key, text, document.mark(path), "no effect"))
    elif isinstance(value, Mapping) and below(path) and (row is None or row.status == "no_effect"):
        for name in value:
            _foreign(document, (*path, name), value[name], hint)
    elif row is None and len(path) == 1 and key in _DROPPED:
        text = f"{key}{NO_EFFECT}it is one name with a dot in it, which DeepSpeed drops, too. "
        document.notices.append(Notice(key, f"{text}Write the key into its block.", document.mark(path), "no effect"))
    elif row is None:
        document.problem(path, f"{key} is not a key of lt_zero or DeepSpeed.{hint(path, value)}")
    elif row.status == "no_effect":
        if value is not None:
            text = f"{key}{NO_EFFECT}{row.note}"
            document.notices.append(Notice(key, text, document.mark(path), "no effect"))
    elif row.status == "alias":  # an alias, but the value has another type
        document.problem(path, f"{key}={value!r} cannot be read as {row.to}. Write {row.to}.")
    elif not unused(row, path, value):
        shown = "" if isinstance(value, (Mapping, list)) else f"={value!r}"
        document.problem(path, f"{key}{shown} is known, but not supported: {row.note}")


def _hint(document: Document, path: KeyPath, value: Any, schema: type[Block], checks: Mapping[str, Check]) -> str:
    """A suggestion: a supported key, an argument one level too high, or a key that is refused."""
    key = dotted(path)
    if len(key) > _LONGEST:
        return _NO_HINT
    if "." in str(path[-1]) and key in accepted(schema):
        block, _, name = key.rpartition(".")
        return f" It is one name with a dot in it: write {name} into the block {block}."
    if near := nearest(key, accepted(schema)):
        return f" Did you mean {near}?"
    if len(path) == 2 and (check := checks.get(str(path[0]))) is not None:
        near = f"{path[0]}.params.{path[1]}"
        problems = check(document.get((path[0], "type")), {str(path[1]): value})
        if not any(problem.key in (near, f"{path[0]}.type") for problem in problems):
            return f" Did you mean {near}?"
    alike = nearest(key, (row.key for row in rows() if row.refused))
    if alike is not None and (row := lookup(tuple(alike.split(".")))) is not None:
        return f" It looks like {alike}, which is not supported either: {row.note}"
    return _NO_HINT


def unused(row: KeyStatus, path: KeyPath, value: Any) -> bool:
    """True if an unsupported key or block is written, but switched off."""
    if row.status == "no_effect":
        return True
    if not isinstance(value, Mapping):
        return is_off(row, value) if row.off else value is None or value in _OFF
    if value.get("enabled", True) in (False, None, 0, "false", "auto") or is_off(row, value):
        return True
    return all(unused(lookup((*path, key)) or row, (*path, key), inner) for key, inner in value.items())


# ---- suggestions for unknown keys ------------------------------------------------------------------------------------

_CLOSE = 0.78  # minimum difflib ratio of two key names: a typo or two
_ALIKE = 0.6  # minimum difflib ratio of two blocks that have a key of the same name
_FEW = 2  # up to so many blocks with this key name, suggest one: offload_optimizer and offload_param


def nearest(key: str, candidates: Iterable[str]) -> str | None:
    """The nearest dotted candidate: the same name in another block, or one that differs by a typo or two."""
    block, _, name = key.replace("-", "_").lower().rpartition(".")
    names = {c: c.rpartition(".") for c in _with_blocks(candidates) if c != key}
    same = {c: _ratio(block, b) for c, (b, _, n) in names.items() if n.lower() == name and b != block}
    if same:
        best = max(same, key=lambda c: same[c])  # the first in a tie
        if len(same) <= _FEW or same[best] >= _ALIKE:
            return best
    scores = {}
    for candidate, (other, _, other_name) in names.items():
        if candidate not in same and (alike := _ratio(name, other_name.lower())) >= _CLOSE:
            scores[candidate] = alike * (0.9 + 0.1 * _ratio(block, other))  # counts less in a different block
    best = max(scores, key=lambda c: scores[c], default="")
    return best if best and scores[best] >= _CLOSE else None


def _ratio(one: str, other: str) -> float:
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() >= _ALIKE else 0.0


def _with_blocks(keys: Iterable[str]) -> dict[str, None]:
    """``keys`` and their blocks, cut at placeholders such as ``<name>``."""
    found: dict[str, None] = {}
    for key in keys:
        parts = list(takewhile(lambda part: part[:1] not in "<(*", key.split(".")))
        found |= {".".join(parts[: n + 1]): None for n in range(len(parts))}
    return found


@cache
def accepted(schema: type[Block]) -> tuple[str, ...]:
    """All dotted keys that are accepted: those of the schema and of the table."""
    found = [*dotted_keys(schema), *AUTO]
    for target in (target for row in aliases() for target in row.to.split(" and ")):
        row = lookup(tuple(target.split(".")))
        found += [target] if row is None or not row.refused else []
    return (*found, *(row.key for row in rows() if row.status == "no_effect"))
