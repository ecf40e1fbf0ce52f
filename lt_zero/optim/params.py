"""The ``params`` of optimizers and schedulers: a type for each argument, and problems with a remedy for wrong values.

A type is an annotation for pydantic, made of those of the configuration's blocks; its description is what to write.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import NotRequired, TypedDict

from lt_zero.common.errors import Problem
from lt_zero.common.fields import Real, Whole
from lt_zero.common.numbers import to_number

# Arguments that may be "auto", which is resolved before anything is built; in a group the first four.
AUTO = frozenset(["lr", "betas", "eps", "weight_decay", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"])
AUTO |= {"total_num_steps"}

# ---- types -----------------------------------------------------------------------------------------------------------


def number(
    low: float = -math.inf,
    high: float = math.inf,
    *,
    whole: bool = False,
    low_open: bool = False,
    high_open: bool = False,
    example: str = "",
) -> Any:
    """A finite number, or its text ("1e-5")."""
    bounds: dict[str, Any] = {}
    limits = []
    if low > -math.inf:
        bounds["gt" if low_open else "ge"] = low
        limits.append(f"{'above' if low_open else 'of at least'} {low:g}")
    if high < math.inf:
        bounds["lt" if high_open else "le"] = high
        limits.append(f"{'below' if high_open else 'of at most'} {high:g}")
    text = " ".join(["a whole number" if whole else "a number", " and ".join(limits)]).rstrip()
    text = f"{text}, such as {example}" if example else text
    return Annotated[Whole if whole else Real, Field(**bounds, description=text)]


def several(count: int | None, each: Any, example: str = "") -> Any:
    """A list of ``count`` values (None: any number of them), which becomes a tuple."""
    length, shown = "" if count is None else f" of {count}", f", such as {example}" if example else ""
    text = f"a list{length}, each {remedy_of(each)}{shown}"
    return Annotated[tuple[each, ...], Field(min_length=count, max_length=count, description=text)]


def per_group(each: Any) -> Any:
    """One value, or a list with one for each parameter group."""
    text = f"{remedy_of(each)}, or a list of such numbers, one for each parameter group"
    return Annotated[each | Annotated[list[each], Field(min_length=1)], Field(description=text)]


def nullable(inner: Any) -> Any:
    """A value that ``inner`` accepts, or null."""
    return Annotated[inner | None, Field(description=f"{remedy_of(inner)}, or null")]


def choice(options: tuple[str, ...]) -> Any:
    """One of several strings."""
    return Annotated[Literal[options], Field(description=" or ".join(options))]


Flag = Annotated[bool, Field(strict=True, description="true or false")]


def only(position: bool, remedy: str) -> Any:
    """Type of a switch that supports one position only."""

    def check(value: bool) -> bool:
        if value is not position:
            raise ValueError(remedy)
        return value

    return Annotated[Flag, AfterValidator(check)]


def refused(remedy: str) -> Any:
    """An argument of another optimizer or block."""

    def refuse(value: Any) -> Any:
        raise ValueError(remedy)

    return Annotated[Any, BeforeValidator(refuse)]


def _numbers(value: Any) -> Any:
    return [_numbers(item) for item in value] if isinstance(value, (list, tuple)) else to_number(value)


Anything = Annotated[Any, BeforeValidator(_numbers)]  # text that is a number, also in lists, becomes a number


def remedy_of(kind: Any) -> str:
    """Text that tells users how to write a type."""
    found = [part.description for part in get_args(kind) if isinstance(part, FieldInfo) and part.description]
    return found[-1]


_ONE_BIT = "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler "
_ONE_BIT += "local_step_clipper coeff_beta factor_max factor_min factor_threshold"
_REFUSED: Mapping[str, Any] = {
    "max_grad_norm": refused("remove it, and set gradient_clipping, at the top of the configuration, to this norm"),
    **dict.fromkeys(_ONE_BIT.split(), refused("it belongs to the 1-bit optimizers; remove it")),
    **dict.fromkeys(("max_coeff", "min_coeff", "eps_inside_sqrt"), refused("it belongs to Lamb; remove it")),
    **dict.fromkeys(("muon_lr", "adam_lr", "ns_method", "per_head_muon"), refused("it belongs to Muon; remove it")),
}

# ---- arguments of a class --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature:
    """The constructor arguments of a class, without the first one (the parameters or the optimizer).

    Attributes:
        name: of the class.
        types: by argument.
        required: arguments without a default.
        is_open: whether other names are accepted, too.
    """

    name: str
    types: Mapping[str, Any]
    required: frozenset[str]
    is_open: bool = False

    @classmethod
    def of(cls, target: type, rules: Mapping[str, Any], name: str = "") -> Signature:
        """The signature of a constructor.

        Args:
            target: the class.
            rules: types that are stricter than the annotations, by argument.
            name: of the class in messages; "": its own.

        Raises:
            ValueError: the class has no readable signature.
        """
        parameters = list(inspect.signature(target).parameters.values())[1:]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p for p in parameters if p.kind in kinds]
        return cls(
            name or target.__name__,
            {p.name: _type_of(p, rules) for p in named},
            frozenset(p.name for p in named if p.default is inspect.Parameter.empty),
            any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        )

    def plus(self, types: Mapping[str, Any]) -> Signature:
        """The signature with further arguments."""
        return replace(self, types={**self.types, **types})

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[dict[str, Any]]:
        typed_dict: Any = TypedDict  # mypy knows those of literals only
        made = typed_dict(self.name, {name: NotRequired[kind] for name, kind in {**_REFUSED, **self.types}.items()})
        made.__pydantic_config__ = ConfigDict(extra="allow" if self.is_open else "forbid")
        return TypeAdapter(made)

    def read(
        self, key: str, given: Mapping[Any, Any], auto: bool, known: Collection[str] = ()
    ) -> tuple[dict[str, Any], list[Problem]]:
        """Check and convert arguments.

        Args:
            key: of the block they are in: ``optimizer.params``.
            given: as written.
            auto: whether "auto" will still be resolved; such values are left out.
            known: names that hints suggest; empty: the arguments.

        Returns:
            The converted values, empty if there are problems; and the problems in the order of ``given``.
        """
        written = {name if isinstance(name, str) else shown(name): value for name, value in given.items()}
        problems: dict[str, Problem] = {}
        values: dict[str, Any] = {}
        for name, value in written.items():
            may_be_auto = name in AUTO and (name in self.types or self.is_open)
            if not (may_be_auto and isinstance(value, str) and value == "auto"):
                values[name] = value
            elif not auto:
                problems[name] = problem(f"{key}.{name}", value, ": auto cannot be resolved here; write a value.")
        try:
            values = self._adapter.validate_python(values)
        except ValidationError as error:
            for entry in error.errors(include_url=False, include_input=False):
                name = str(entry["loc"][0])
                problems.setdefault(name, self._problem(f"{key}.{name}", name, written[name], entry, known))
        return {} if problems else values, [problems[name] for name in written if name in problems]

    def missing(self, key: str, given: Mapping[Any, Any]) -> list[Problem]:
        """Problems of required arguments that are not ``given``."""
        return [
            Problem(f"{key}.{name}", f"{key}.{name} is missing: {self.name} requires it. Write a value.")
            for name in sorted(self.required - given.keys())
        ]

    def _problem(self, key: str, name: str, value: Any, entry: Mapping[str, Any], known: Collection[str]) -> Problem:
        """A problem from one of pydantic's errors."""
        if entry["type"] == "extra_forbidden":
            known = sorted(known or self.types)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Remove it, or write one of {', '.join(known)}."
            return problem(key, value, f" is not a parameter of {self.name}. {hint}")
        own = entry.get("ctx", {}).get("error")
        return problem(key, value, f": {own if own is not None else f'write {remedy_of(self.types[name])}'}.")


def _type_of(parameter: inspect.Parameter, rules: Mapping[str, Any]) -> Any:
    """The rule of this name, if it applies (Adafactor's eps is a pair), else what default and annotation imply."""
    rule, default, annotation = rules.get(parameter.name), parameter.default, parameter.annotation
    is_list = get_origin(get_args(rule)[0] if rule is not None else None) is tuple
    if rule is not None and (default is inspect.Parameter.empty or isinstance(default, tuple) == is_list):
        return rule
    if isinstance(default, bool):
        return Flag
    if isinstance(default, tuple) and default and all(isinstance(item, (int, float)) for item in default):
        return several(len(default), number())
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if text == "int":
        return number(whole=True)
    if "list" not in text and (isinstance(default, float) or "float" in text):
        return number() if isinstance(default, (int, float)) or text == "float" else Anything
    return Anything


def problem(key: str, value: Any, text: str) -> Problem:
    """A problem with the value of ``key``; ``text`` follows the value."""
    return Problem(key, f"{key}={shown(value)}{text}")


def shown(value: Any) -> str:
    """A value as a message shows it, shortened."""
    try:
        return reprlib.repr(value)
    except Exception:  # a value of the user's own class
        return f"<{type(value).__name__}>"
