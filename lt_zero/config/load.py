"""Makes a ``ZeroConfig``: read, override, rename, classify, validate. All problems become one ``ConfigError``."""

from __future__ import annotations

import copy
import json
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, PrivateAttr, ValidationError, WithJsonSchema, create_model, model_validator

from lt_zero.common.errors import BLOCK_CHECKS, MOST_SHOWN, Check, ConfigError, Mark, Path, Problem, dotted, path_of
from lt_zero.common.fields import Block, block_of, item_block_of, key, keys_of, scalars, set_places, thawed
from lt_zero.common.users_code import warn
from lt_zero.common.variables import check_variables
from lt_zero.config.blocks import ActivationCheckpointing, Schema, ZeroOptimization
from lt_zero.config.document import MISSING, Document, Notice, literal, masked, masking, secrets
from lt_zero.config.keys import NO_EFFECT, below, classify, lookup, rename
from lt_zero.config.read import read
from lt_zero.config.rules import contradictions, inactive
from lt_zero.features import MissingBlock, own_blocks, registered_blocks

# Rank of the process and of the node; some launchers set only one.
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

OVERRIDES = "LT_ZERO_OVERRIDES"  # of a run's configuration, as on a command line; stronger than what the script says


_UNSHARDED = Notice(
    "zero_optimization.stage",
    "The configuration has no zero_optimization.stage, which means 0, as in DeepSpeed: nothing is sharded, every rank "
    "holds the whole model and its optimizer. To shard, write zero_optimization: {stage: 3} (or 1, 2).",
    kind="default",
)


NOTHING: dict[str, Any] = {"not": {}}  # JSON Schema of what no value fits
BlocksOfFeatures = tuple[tuple[str, type[Block]], ...]  # with their keys


class ConfigWarning(UserWarning):
    """A key was renamed or has no effect."""


def _refusal(missing: MissingBlock) -> Callable[[Any], Any]:
    """A validator for the key of a feature that is not installed: its error unless the feature is off."""

    def refuse(value: Any) -> Any:
        if missing.is_off(value):
            return None
        raise missing.error

    return refuse


def _key_of(block: type[Block] | MissingBlock) -> tuple[Any, Any]:
    """The type and default of a key whose block one of lt_zero's features brings, or would bring."""
    if isinstance(block, MissingBlock):
        return Annotated[Any, BeforeValidator(_refusal(block)), WithJsonSchema(NOTHING)], key(None, "")
    return block.at_top()


def with_own_blocks() -> type[Schema]:
    """``Schema`` with the blocks that lt_zero's features bring, in the places that it has for them."""
    fields: dict[str, Any] = {name: _key_of(block) for name, block in own_blocks().items()}
    made: type[Schema] = create_model("Schema", __base__=Schema, __doc__=Schema.__doc__, **fields)
    return made


if TYPE_CHECKING:
    _Schema = Schema
else:
    _Schema = with_own_blocks()


class ZeroConfig(_Schema):
    """Everything that can be configured.

    >>> ZeroConfig.of({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e7"}}).zero_optimization.stage
    2
    """

    of_features: ClassVar[BlocksOfFeatures] = ()  # of the classes that ``current_schema`` makes
    _autos: frozenset[Path] = PrivateAttr(frozenset())
    _secret: frozenset[Path] = PrivateAttr(frozenset())  # values from environment variables, as they were found

    def __init__(self, *, stage: int | None = None, **keys: Any) -> None:
        """Keys as in a file; ``stage`` is ``zero_optimization.stage``, as ``ZeroStrategy`` has it."""
        if stage is not None:
            block = keys.get("zero_optimization", {})
            block = block.model_dump(exclude_unset=True) if isinstance(block, ZeroOptimization) else block
            keys["zero_optimization"] = {**block, "stage": stage}
        if type(self) is ZeroConfig:
            object.__setattr__(self, "__class__", current_schema())
        super().__init__(**keys)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a class that was made with blocks of features as these blocks: it has no place in a module."""
        if not self.of_features:
            return super().__reduce_ex__(protocol)
        return _unfilled, (self.of_features,), self.__getstate__()

    def __eq__(self, other: object) -> bool:
        """True if all values are equal, however they were written; ``secret`` does not matter."""
        return isinstance(other, ZeroConfig) and vars(self) == vars(other) and self._autos == other._autos

    __hash__ = Schema.__hash__

    @model_validator(mode="after")
    def _consistent(self) -> ZeroConfig:
        if problems := list(contradictions(self)):
            raise ConfigError(problems)
        return self

    @property
    def autos(self) -> frozenset[Path]:
        """Keys written "auto" that are not resolved yet; they hold their defaults."""
        return self._autos

    @property
    def secret(self) -> frozenset[Path]:
        """Keys whose values are not shown: from environment variables, or with the name of a secret."""
        return self._secret | secrets(_written(self))

    @classmethod
    def of(
        cls,
        config: Given = None,
        stage: int | None = None,
        overrides: Sequence[str] = (),
        default_stage: int | None = None,
        activations: Activations = None,
    ) -> ZeroConfig:
        """Validate a configuration. Warns of keys that are renamed or have no effect.

        Args:
            config: a mapping, the path of a JSON or YAML file, or a configuration to change.
            stage: sets ``zero_optimization.stage``.
            overrides: ``key=value`` and ``group=option`` in Hydra's grammar.
            default_stage: the stage if none is given.
            activations: keys of ``activation_checkpointing``, or its ``mode``; True: full, False: none.

        Raises:
            ConfigError: names every problem.
        """
        loaded = examine(config, stage, overrides, default_stage, activations)
        made = loaded.usable()
        loaded.announce()
        return made


set_places(ZeroConfig)


def current_schema() -> type[ZeroConfig]:
    """``ZeroConfig`` with the blocks that registered features bring, as if they stood in its class."""
    return _schema_with(tuple(registered_blocks().items()))


@cache
def _schema_with(of_features: BlocksOfFeatures) -> type[ZeroConfig]:
    """``ZeroConfig`` with more blocks.

    Raises:
        ValueError: a key is one of lt_zero's or DeepSpeed's, or no name; or a block has a key without default.
    """
    if not of_features:
        return ZeroConfig
    fields: dict[str, Any] = {}
    for name, block in of_features:
        if not name.isidentifier() or name.startswith("_"):
            text = "no configuration can have this key. Name it with letters, digits and underscores, first a letter."
            raise ValueError(f"register(Entry(key={name!r})): {text}")
        if name in keys_of(ZeroConfig) or hasattr(ZeroConfig, name) or lookup((name,)) is not None or below((name,)):
            raise ValueError(f"register(Entry(key={name!r})): lt_zero or DeepSpeed has this key. Name it otherwise.")
        try:
            fields[name] = block.at_top()
        except ValidationError as error:
            lacks = dotted((name, *error.errors()[0]["loc"]))
            text = f"{lacks} has no default. Give it one: the feature is off then."
            raise ValueError(f"register(Entry(block={block.__name__})): {text}") from error
    made: type[ZeroConfig] = create_model("ZeroConfig", __base__=ZeroConfig, __doc__=ZeroConfig.__doc__, **fields)
    made.of_features = of_features
    set_places(made)
    return made


def _unfilled(of_features: BlocksOfFeatures) -> ZeroConfig:
    """An object of that schema without values, which unpickling fills in."""
    schema = _schema_with(of_features)
    return schema.__new__(schema)


Given = ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None
Activations = ActivationCheckpointing | Mapping[str, Any] | str | bool | None


@dataclass
class Loaded(Document):
    """A document after overrides and interpolations, its values as written, with the validated configuration."""

    config: ZeroConfig | None = None  # validated; None if there are problems

    def usable(self) -> ZeroConfig:
        """The configuration; a ``ConfigError`` that names every problem if there is none."""
        if self.config is None:
            raise ConfigError(self.problems)
        return self.config

    def announce(self) -> None:
        """Warn of each notice, on the first rank only; of all keys that have no effect at once."""
        if any(os.environ.get(name, "0") not in ("0", "") for name in _RANKS):
            return
        idle: dict[str, list[str]] = defaultdict(list)
        alike: dict[str, list[Notice]] = defaultdict(list)
        for notice in self.notices:
            if notice.kind == "inactive":
                idle[notice.message].append(notice.key)
            else:
                reason = notice.message.removeprefix(f"{notice.key}{NO_EFFECT}")
                alike[reason if notice.kind == "no effect" else str(notice)].append(notice)
        told = [str(found[0]) if len(found) == 1 else _joined(found, why) for why, found in alike.items()]
        if idle:
            reasons = ", ".join(f"{', '.join(keys)} ({why})" for why, keys in idle.items())
            told.append(f"These keys have no effect here: {reasons}.")
        more = [f"... and {len(told) - MOST_SHOWN:,} more notices"] if len(told) > MOST_SHOWN else []
        for text in [*told[:MOST_SHOWN], *more]:
            warn(text, ConfigWarning)


def _joined(notices: list[Notice], why: str) -> str:
    """One sentence about several keys that have no effect for the same reason, with the place of the first."""
    text = f"{', '.join(notice.key for notice in notices)} have no effect here: {why}"
    return str(replace(notices[0], message=text))


def examine(
    config: Given = None,
    stage: int | None = None,
    overrides: Sequence[str] = (),
    default_stage: int | None = None,
    activations: Activations = None,
    for_run: bool = False,
    broadcast_buffers: bool | None = None,
) -> Loaded:
    """``ZeroConfig.of`` whose warnings, and problems with keys and values, are returned.

    Args:
        for_run: of a run, so that the overrides in the environment (``LT_ZERO_OVERRIDES``) are applied last.
        broadcast_buffers: sets that key.
        config, stage, overrides, default_stage, activations: as for ``ZeroConfig.of``.

    Raises:
        ConfigError: the configuration cannot be read at all.
    """
    told = [Notice("", text, kind="environment") for text in check_variables()] if for_run else []
    last = shlex.split(os.environ.get(OVERRIDES, "")) if for_run else []
    known: frozenset[Path] = frozenset()
    if isinstance(config, ZeroConfig):
        unchanged = type(config) is current_schema()  # no feature was registered since it was made
        if (
            unchanged
            and stage is None
            and not overrides
            and activations is None
            and broadcast_buffers is None
            and not last
        ):
            if for_run and "stage" not in config.zero_optimization.model_fields_set:
                told.append(_UNSHARDED)
            return Loaded({}, config=config, notices=told)
        values: dict[str, Any] = literal(plain(config))  # resolved once, when it was made
        known, config = config.secret, values
    document = _resolved(_overridden(read(config), overrides))
    document.secret |= known
    mask = masking(document)
    try:
        return _examined(document, stage, default_stage, activations, broadcast_buffers, for_run, last, told)
    except ConfigError as error:
        raise error.masked(mask) from None


def _examined(
    document: Document,
    stage: int | None,
    default_stage: int | None,
    activations: Activations,
    broadcast_buffers: bool | None,
    for_run: bool,
    last: Sequence[str],
    told: list[Notice],
) -> Loaded:
    """``examine`` from a document without interpolations on.

    Args:
        last: overrides of the environment.
        told: notices so far.
        document, stage, default_stage, activations, broadcast_buffers, for_run: as for ``examine``.
    """
    written = document.values
    masks = [masking(document)]  # before values are converted
    document = _with_arguments(document, stage, default_stage, activations, broadcast_buffers)
    document = rename(document)
    if last:
        document = rename(_of_environment(replace(document, values=literal(document.values)), last))
        masks.append(masking(document))
        text = f"{OVERRIDES} in the environment sets {', '.join(text.partition('=')[0] for text in last)}."
        told.append(Notice("", text, kind="environment"))
    if for_run and document.get(("zero_optimization", "stage")) in (MISSING, None):
        told.append(_UNSHARDED)
    document.notices += told
    schema = current_schema()
    document = classify(document, schema, BLOCK_CHECKS)
    made = validate(document, schema)
    _check_blocks(document, BLOCK_CHECKS)
    if made is not None:
        made._autos, made._secret = document.autos, frozenset(document.secret)
        for path, why in inactive(made, plain(made)):
            document.notices.append(Notice(dotted(path), why, document.mark(path), "inactive"))
    problems, notices = _findings(document, lambda message: reduce(lambda text, mask: mask(text), masks, message))
    config = None if problems else made
    return Loaded(written, document.marks, notices=notices, problems=problems, secret=document.secret, config=config)


def _findings(document: Document, mask: Callable[[str], str]) -> tuple[list[Problem], list[Notice]]:
    """The problems in the order of their places, and the notices, each once and without secret values."""
    problems = dict.fromkeys(replace(problem, message=mask(problem.message)) for problem in document.problems)
    notices = dict.fromkeys(replace(notice, message=mask(notice.message)) for notice in document.notices)

    def place(problem: Problem) -> tuple[str, int, int]:
        mark = problem.mark
        return ("", 0, 0) if mark is None else (mark.source, mark.line or 0, mark.column or 0)

    return sorted(problems, key=place), list(notices)


def _overridden(document: Document, overrides: Sequence[str]) -> Document:
    """``document`` with ``overrides`` applied. Errors: those of ``apply``."""
    if isinstance(overrides, (list, tuple)) and not overrides:
        return document
    from lt_zero.config.overrides import apply

    return apply(document, overrides)


def _resolved(document: Document) -> Document:
    """``document`` without interpolations. Errors: those of ``resolve``."""
    if not document.interpolations():
        return document
    from lt_zero.config.interpolations import resolve

    return resolve(document)


def _of_environment(document: Document, overrides: Sequence[str]) -> Document:
    """Apply overrides from ``LT_ZERO_OVERRIDES``, which errors name."""
    try:
        return _resolved(_overridden(document, overrides))
    except ConfigError as error:
        where = f"{OVERRIDES} in the environment: "
        raise ConfigError([replace(problem, message=where + problem.message) for problem in error.problems]) from None


def plain(config: ZeroConfig) -> dict[str, Any]:
    """The written keys as plain containers, from which ``ZeroConfig.of`` makes the same configuration."""
    return _with_autos(config, _written(config))


def resolved(config: ZeroConfig) -> dict[str, Any]:
    """All keys with their values in plain containers, readable by ``ZeroConfig.of``. API keys are left out."""
    return _with_autos(config, scalars(config.model_dump()))


def shown(config: ZeroConfig) -> dict[str, Any]:
    """``resolved``, with ``***`` for each secret: for files and terminals."""
    values: dict[str, Any] = masked(resolved(config), config.secret)
    return values


def _with_autos(config: ZeroConfig, values: dict[str, Any]) -> dict[str, Any]:
    document = Document(values)
    for path in sorted(config.autos, key=dotted):
        document.put(path, "auto")
    return values


def _written(block: Block) -> dict[str, Any]:
    values = ((name, getattr(block, name)) for name in type(block).model_fields if name in block.model_fields_set)
    return {name: _plain_value(value) for name, value in values}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Block):
        return _written(value)
    if isinstance(value, tuple) and any(isinstance(item, Block) for item in value):
        return [_plain_value(item) for item in value]
    return thawed(copy.deepcopy(value))


# ---- arguments of the strategy ---------------------------------------------------------------------------------------


def _with_arguments(
    document: Document,
    stage: int | None,
    default_stage: int | None,
    activations: Activations,
    broadcast_buffers: bool | None,
) -> Document:
    """Add the keys that are arguments of ``ZeroStrategy``; a contradiction is a problem."""
    document = document.copy()
    zero = document.get(("zero_optimization",))
    if isinstance(zero, bool) and stage is not None:  # an old spelling
        document.put(("zero_optimization",), {"stage": int(zero)})
    path: Path = ("zero_optimization", "stage")
    if not isinstance(zero, bool) and stage is None and document.get(path) is MISSING:
        stage = default_stage
    wanted: list[tuple[Path, Any, str, str]] = []
    for where, argument in ((path, stage), (("broadcast_buffers",), broadcast_buffers)):
        if argument is not None:
            wanted.append((where, argument, f"{where[-1]}={argument}", f"{where[-1]}={argument}"))
    given: Any = {True: "full", False: "none"}[activations] if isinstance(activations, bool) else activations
    given = {"mode": given} if isinstance(given, str) else _written(given) if isinstance(given, Block) else given
    if given is not None and not isinstance(given, Mapping):
        text = f"activation_checkpointing={given!r} is neither a mode nor a mapping of keys of the block."
        document.problem(("activation_checkpointing",), text)
        return document
    given = read(given).values
    for name, value in given.items():
        says = f"ZeroStrategy(activation_checkpointing=...) says {name}={value!r}, which"
        wanted.append((("activation_checkpointing", name), value, says, f"activation_checkpointing={given!r}"))
    for path, value, says, source in wanted:
        there = document.get(path)
        if there is MISSING or there is None or (there == "auto" and path[-1] == "stage"):
            if document.put(path, value):
                document.marks[path] = Mark(source)
            continue
        # A name equals a list of one, and numbers may be text.
        texts = ([str(entry) for entry in (v if isinstance(v, (list, tuple)) else [v])] for v in (there, value))
        if there != value and next(texts) != next(texts):
            document.problem(path, f"{says} contradicts {dotted(path)}={there!r}. Remove one of them.")
    return document


# ---- validation ------------------------------------------------------------------------------------------------------

AnyBlock = TypeVar("AnyBlock", bound=Block)


def validate(document: Document, schema: type[AnyBlock]) -> AnyBlock | None:
    """Make an object of the schema; errors become problems of ``document``.

    Rules between keys are checked even if some values are wrong, to report all problems at once.
    """
    try:
        return schema.model_validate(document.values)
    except ValidationError as error:
        wrong = _add_problems(document, error, schema)
    if 0 < len(wrong) <= MOST_SHOWN:
        right = replace(document.copy(), problems=[])
        for path in wrong:
            right.pop(path)
        try:
            schema.model_validate(right.values)
        except ValidationError as error:
            _add_problems(right, error, schema)
        document.problems += [p for p in right.problems if not any(dotted(path) in p.message for path in wrong)]
    return None


def _check_blocks(document: Document, checks: Mapping[str, Check]) -> None:
    """Check the arguments of optimizers and schedulers, which the schema leaves to their classes."""
    for block, check in checks.items():
        kind, params = document.get((block, "type")), document.get((block, "params"))
        params = {} if params is MISSING or params is None else params
        if isinstance(kind, str) and kind and isinstance(params, Mapping):
            autos = {str(path[-1]): "auto" for path in document.autos if path[:-1] == (block, "params")}
            groups = document.get((block, "param_groups"))
            for problem in check(kind, {**params, **autos}, *([] if groups is MISSING else [groups])):
                document.problems.append(replace(problem, mark=document.mark(path_of(problem.key))))


def _add_problems(document: Document, error: ValidationError, schema: type[Block]) -> list[Path]:
    """Turn pydantic's errors into problems; returns the paths of wrong values, without those of rules."""
    wrong: dict[Path, None] = {}
    for entry in error.errors(include_url=False):
        inner = entry.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            document.problems += [replace(p, mark=document.mark(path_of(p.key))) for p in inner.problems]
            continue
        path, message = _message_of(document, entry, schema)
        if entry["type"] == "missing":
            path = path[:-1]
        if path not in wrong:
            wrong[path] = None
            document.problem(path, message)
    return [path for path in wrong if path]


_REQUIREMENTS = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number, such as 8, 5e8 or 500M"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a block of keys"),
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "some text",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
    "path_type": "a path",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
}


def _message_of(document: Document, entry: Mapping[str, Any], schema: type[Block]) -> tuple[Path, str]:
    """The path of one of pydantic's errors, and a message for authors of configuration files."""
    path: list[str | int] = []
    block: type[Block] | None = schema
    items: type[Block] | None = None
    description, secret = "", False
    for part in entry["loc"]:  # for unions the location ends in names internal to pydantic
        found = keys_of(block).get(str(part)) if block is not None else None
        if found is None and (block is not None or not isinstance(part, int)):
            break
        path.append(part)
        if found is not None:
            description, secret = found.description or "", bool(found.exclude)
            block, items = block_of(found), item_block_of(found)
        else:
            block, items = items, None
    key, value = dotted(tuple(path)), document.get(tuple(path))
    if entry["type"] == "extra_forbidden" and block is not None:  # in a list: classify() has seen the others
        text = f"{key}.{entry['loc'][-1]} is not a key here, where there are {', '.join(keys_of(block))}."
        return tuple(path), text
    if entry["type"] == "missing":
        return tuple(path), f"{key} is missing: {description}."
    item = bool(entry["loc"]) and isinstance(entry["loc"][-1], int)  # an item of a list: the input shows which one
    value = entry["input"] if item or value is entry["input"] else value
    try:
        shown = json.dumps(value)
    except (TypeError, ValueError):
        shown = str(value)
    shown = "..." if secret else shown if len(shown) <= 80 else f"{shown[:77]}..."
    if entry["type"] in _REQUIREMENTS:
        what = _REQUIREMENTS[entry["type"]].format(**entry.get("ctx", {}))
        return tuple(path), f"{key}={shown} is wrong: it must be {what}. Meaning: {description}."
    text = entry["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return tuple(path), f"{key}={shown} is wrong: {text.removesuffix('.')}."
