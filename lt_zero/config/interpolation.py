"""``${...}`` in values: what OmegaConf makes of it, and which values came from the environment."""

from __future__ import annotations

import re
from typing import Any

from lt_zero.common.errors import ConfigError, Path, dotted
from lt_zero.config.document import Document, leaves, mapped

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")
_NAME = re.compile(r"[\w.\-\[\]]+")
_PLAIN = (str, int, float, bool, type(None))


class _Box:
    """Hides an object from OmegaConf, which would refuse a torch.dtype, and take a dataclass apart."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)


def resolve(document: Document) -> Document:
    """Replace ``${oc.env:NAME}``, ``${oc.env:NAME,default}``, ``${key.other}`` and whatever else OmegaConf resolves.

    Values from environment variables, directly or not, are noted as secret. They are text, as in OmegaConf: "1e-4"
    becomes a number by ``${oc.decode:${oc.env:NAME}}``, or where the schema wants one.

    Raises:
        ConfigError: all variables and keys that are missing, circles, unknown resolvers, and values ``???``.
    """
    texts = {path: leaf for path, leaf in leaves(document.values) if isinstance(leaf, str) and _is_special(leaf)}
    if not texts:
        return document
    document = document.copy()
    for path, leaf in texts.items():
        if leaf == "???":
            document.problem(path, f"{dotted(path)} is ???, a value that is to be given; set it, or delete the key")
    if len(document.problems) < len(texts):
        _check_grammar(document, texts)
        if not document.problems:
            _evaluate(document, texts)
    if document.problems:
        raise ConfigError(document.problems)
    document.secret = _hidden(texts, document.secret)
    return document


def _is_special(text: str) -> bool:
    return "${" in text or text == "???"


def _check_grammar(document: Document, texts: dict[Path, str]) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for path, text in texts.items():
        try:
            OmegaConf.create([text])
        except (OmegaConfBaseException, RecursionError) as error:
            said = f"{dotted(path)}: {text!r} is no interpolation ({_said(error)})"
            document.problem(path, f"{said}; write ${{key.other}} or ${{oc.env:NAME}}")


def _evaluate(document: Document, texts: dict[Path, str]) -> None:
    """Replace each of ``texts`` by what OmegaConf makes of it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    boxed = mapped(document.values, lambda leaf: leaf if type(leaf) in _PLAIN else _Box(leaf))
    config = OmegaConf.create(boxed, flags={"allow_objects": True})
    for path, text in texts.items():
        holder, node = document.values, config
        try:
            for part in path[:-1]:
                holder, node = holder[part], node[part]  # type: ignore[index]
            found = node[path[-1]]
            found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except (OmegaConfBaseException, RecursionError) as error:
            document.problem(path, _explained(path, text, error))
            continue
        holder[path[-1]] = mapped(found, lambda leaf: leaf.value if isinstance(leaf, _Box) else leaf)  # type: ignore[index]


def _explained(path: Path, text: str, error: BaseException) -> str:
    said = _said(error)
    head = f"{dotted(path)}: {text} cannot be resolved"
    if variable := re.search(r"Environment variable '([^']*)' not found", said):
        name = variable[1]
        return f"{head}: the environment variable {name} is not set; export it, or write ${{oc.env:{name},default}}"
    if "Recursive interpolation" in said or "to parent node" in said or isinstance(error, RecursionError):
        return f"{head}: it leads back to itself"
    if "Unsupported interpolation type" in said:
        remedy = "oc.env is one, or register it with OmegaConf.register_new_resolver"
        return f"{head}: there is no resolver {said.rsplit(' ', 1)[-1]}; {remedy}"
    if missing := re.search(r"Interpolation key '([^']*)' not found", said):
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
