"""Names of DeepSpeed without a counterpart: they can be imported, and their use is an error that says the remedy."""

from __future__ import annotations

from typing import Any, NoReturn


class _MissingType(type):
    """Makes classes that cannot be called, derived from, or asked for attributes."""

    def __new__(mcs, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, mcs):
                base.refuse()
        return super().__new__(mcs, name, bases, content)

    def refuse(cls) -> NoReturn:
        """Raise NotImplementedError with the remedy."""
        raise NotImplementedError(cls.__doc__)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.refuse()

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(cls.__doc__)

    def __getitem__(cls, key: Any) -> Any:
        cls.refuse()


def missing(name: str, remedy: str) -> type:
    """A class that stands for ``name``, and tells the ``remedy`` when it is used. No object is an instance of it."""
    text = f"{name} is not in lt_zero. {remedy}."
    made: type = _MissingType(name.rpartition(".")[2], (), {"__doc__": text, "__module__": name.rpartition(".")[0]})
    return made


def is_missing(value: Any) -> bool:
    """True for what ``missing`` has made."""
    return isinstance(value, _MissingType)
