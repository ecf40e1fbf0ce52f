"""What the pickles of checkpoints may name, and what is made of it.

See Note [An interpreter of our own] in unpickle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from lt_zero.checkpoint.formats.unpickle import Machine


@dataclass(frozen=True)
class Global:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Inert:
    """What is known of an object without its class: its name, what it was made of, and its attributes."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)  # of objects that are mappings

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


class Refused(ValueError):
    """A pickle holds what is not taken from it."""


INERT = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.config.DeepSpeedConfig",
        "argparse.Namespace",
        "datetime.timedelta",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
    }
)
DTYPES = {
    f"torch.{name}": value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
}  # "torch.float32" and the like

Maker = Callable[["Machine", tuple[Any, ...]], Any]


def _dictionary(machine: Machine, args: tuple[Any, ...]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    (pairs,) = args or ([],)
    machine.spend(len(pairs))
    for key, value in pairs:
        machine.put(result, key, value)
    return result


def _sequence(kind: type) -> Maker:
    def make(machine: Machine, args: tuple[Any, ...]) -> Any:
        (values,) = args or ((),)
        if not isinstance(values, (list, tuple)):
            raise Refused(f"{kind.__name__} of {type(values).__name__}")
        machine.spend(len(values))
        return kind(values if kind is tuple else [machine.key(value) for value in values])

    return make


def _encoded(machine: Machine, args: tuple[Any, ...]) -> bytes:
    """How protocol 2 writes bytes."""
    text, encoding = args
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Refused("bytes in another encoding than latin1")
    machine.spend(len(text))
    return text.encode("latin1")


def _bytes(machine: Machine, args: tuple[Any, ...]) -> bytes:
    if args:
        raise Refused("bytes of something")
    return b""


def _complex(machine: Machine, args: tuple[Any, ...]) -> complex:
    real, imag = args
    return complex(float(real), float(imag))


def _number(machine: Machine, args: tuple[Any, ...]) -> Any:
    """A numpy scalar, as a Python number."""
    kind, data = args
    if not isinstance(kind, Inert) or kind.name != "numpy.dtype" or not isinstance(data, bytes):
        raise Refused("a numpy scalar of an unknown kind")
    code = str(kind.args[0])
    big = isinstance(kind.state, tuple) and len(kind.state) > 1 and kind.state[1] == ">"
    if code[:1] not in "biufc" or not code[1:].isdigit() or len(data) != int(code[1:]):
        raise Refused(f"a numpy scalar of type {code} in {len(data)} bytes")
    return np.frombuffer(data, np.dtype(("<>"[big]) + code))[0].item()


def _text(machine: Machine, args: tuple[Any, ...]) -> str:
    """Of an enumeration whose members are strings."""
    (value,) = args
    if not isinstance(value, str):
        raise Refused(f"an enumeration of {type(value).__name__}")
    return value


def _path(machine: Machine, args: tuple[Any, ...]) -> str:
    if not all(isinstance(part, str) for part in args):
        raise Refused("a path of other things than text")
    machine.spend(sum(len(part) for part in args))
    return str(PurePosixPath(*args))


MAKERS: dict[str, Maker] = {
    "lightning.pytorch.trainer.states.RunningStage": _text,
    "pytorch_lightning.trainer.states.RunningStage": _text,
    **dict.fromkeys(
        (f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")),
        _path,
    ),
    "collections.OrderedDict": _dictionary,
    "builtins.dict": _dictionary,
    "torch.Size": _sequence(tuple),
    "builtins.set": _sequence(set),
    "builtins.frozenset": _sequence(frozenset),
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "_codecs.encode": _encoded,
    "numpy.dtype": lambda machine, args: Inert("numpy.dtype", args),
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}
MAKERS |= {name.replace("builtins", "__builtin__"): make for name, make in MAKERS.items() if "builtins" in name}
