"""``${...}`` in values: what OmegaConf makes of it, and which values came from the environment."""

from __future__ import annotations

import re
from typing import Any

from lt_zero.common.errors import ConfigError, Path, Problem, dotted
from lt_zero.config.read.source import Budget, Source, leaves, mapped

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")
_NAME = re.compile(r"[\w.\-\[\]]+")
_PLAIN = (str, int, float, bool, type(None))


class _Box:
    """An object that OmegaConf is not to look into: it would refuse a torch.dtype, and take a dataclass apart."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)


def resolve(source: Source) -> Source:
    """``source`` with values for ``${oc.env:NAME}``, ``${oc.env:NAME,default}``, ``${key.other}`` and whatever else
    OmegaConf resolves; those from environment variables, directly or not, are noted as secret.

    Environment variables are text, as in OmegaConf: "1e-4" becomes a number by ``${oc.decode:${oc.env:NAME}}``, or
    where the schema wants one.

    Raises:
        ConfigError: all variables and keys that are missing, circles, unknown resolvers, and values ``???``.
    """
    texts = {path: leaf for path, leaf in leaves(source.values) if isinstance(leaf, str) and _is_special(leaf)}
    to_give = "is ???, a value that is to be given; set it, or delete the key"
    problems = [
        Problem(dotted(path), f"{dotted(path)} {to_give}", source.mark(path))
        for path, leaf in texts.items()
        if leaf == "???"
    ]
    values = source.values
    if len(problems) < len(texts):
        problems += _grammar(source, texts)
        if not problems:
            values = _evaluated(source, texts, problems)
    if problems:
        raise ConfigError(problems)
    secret = _hidden(texts, source.secret)
    return Source(values, dict(source.marks), source.name, list(source.notices), secret)


def _is_special(text: str) -> bool:
    return "${" in text or text == "???"


def _grammar(source: Source, texts: dict[Path, str]) -> list[Problem]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems = []
    for path, text in texts.items():
        try:
            OmegaConf.create([text])
        except (OmegaConfBaseException, RecursionError) as error:
            remedy = "write ${key.other} or ${oc.env:NAME}"
            message = f"{dotted(path)}: {text!r} is no interpolation ({_said(error)}); {remedy}"
            problems.append(Problem(dotted(path), message, source.mark(path)))
    return problems


def _evaluated(source: Source, texts: dict[Path, str], problems: list[Problem]) -> dict[str, Any]:
    """Values in which each of ``texts`` is replaced by what OmegaConf makes of it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    boxed = mapped(source.values, lambda leaf: leaf if type(leaf) in _PLAIN else _Box(leaf))
    config = OmegaConf.create(boxed, flags={"allow_objects": True})
    budget = Budget(source.name)

    def value(node: Any, path: Path, depth: int) -> Any:
        budget.take(depth, source.mark(path))
        if OmegaConf.is_config(node):
            is_list = OmegaConf.is_list(node)
            keys = range(len(node)) if is_list else list(node)
            items = [item(node, key, (*path, key), depth) for key in keys]
            return items if is_list else dict(zip(keys, items, strict=True))
        if isinstance(node, (dict, list)):  # made by oc.decode
            return mapped(node)
        return node.value if isinstance(node, _Box) else node

    def item(node: Any, key: str | int, path: Path, depth: int) -> Any:
        try:
            found = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(Problem(dotted(path), _explained(path, texts.get(path, ""), error), source.mark(path)))
            return None
        return value(found, path, depth + 1)

    return {key: item(config, key, (key,), 0) for key in source.values}


def _explained(path: Path, text: str, error: BaseException) -> str:
    said = _said(error)
    head = f"{dotted(path)}: {text or 'an interpolation'} cannot be resolved"
    variable = re.search(r"Environment variable '([^']*)' not found", said)
    if variable:
        name = variable[1]
        return f"{head}: the environment variable {name} is not set; export it, or write ${{oc.env:{name},default}}"
    if "Recursive interpolation" in said or "to parent node" in said or isinstance(error, RecursionError):
        return f"{head}: it leads back to itself"
    if "Unsupported interpolation type" in said:
        name = said.rsplit(" ", 1)[-1]
        return (
            f"{head}: there is no resolver {name}; oc.env is one, or register it with OmegaConf.register_new_resolver"
        )
    missing = re.search(r"Interpolation key '([^']*)' not found", said)
    if missing:
        return f"{head}: there is no key {missing[1]}; keys count from the top level of the configuration"
    if _ENVIRONMENT.search(text):  # OmegaConf may repeat the variable's value
        return f"{head}: the resolver cannot read what the environment variable holds"
    return f"{head}: {said}"


def _said(error: BaseException) -> str:
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error)).split("\n", 1)[0]


def _hidden(texts: dict[Path, str], known: set[Path]) -> set[Path]:
    """Secrets: ``known``, texts that read a variable, texts that name either; rather one too many than one too few."""
    secret = known | {path for path, text in texts.items() if _ENVIRONMENT.search(text)}
    waiting = set(texts) - secret
    while secret:
        names = [f".{dotted(path)}." for path in secret]
        new = {path for path in waiting if any(_refers(token, names) for token in _NAME.findall(texts[path]))}
        if not new:
            break
        secret |= new
        waiting -= new
    return secret


def _refers(token: str, names: list[str]) -> bool:
    """Whether a word in an interpolation names one of the values, or a block around it; relative ones by their end."""
    name = "." + re.sub(r"[\[\].]+", ".", token).strip(".") + "."
    return name != ".." and any(name in whole if token.startswith(".") else whole.startswith(name) for whole in names)
