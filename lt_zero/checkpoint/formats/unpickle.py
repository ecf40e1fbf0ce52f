"""Reads pickles that others wrote as data: nothing in them is imported, called or executed.

Note [An interpreter of our own]
    ``pickle.Unpickler`` with a strict ``find_class`` still calls what it let in, sets attributes of it (BUILD on a
    class or function), takes classes from copyreg's registry (EXT) and makes room for any memo number.
    ``torch.load(weights_only=True)`` takes more classes only by a list that is global to the process, and takes the
    objects then for what they say to be; DeepSpeed's own classes, DCP's metadata and tensors that stay on disk are
    beyond it. A pickle is a program of some sixty operations for a stack machine, and the standard library decodes
    them (``pickletools.genops``). Here they work on plain values, and on ``Global`` where the pickle names a class:
    a name and nothing else. What REDUCE and the like make of it is looked up in ``MAKERS``
    (admitted.py), or is an ``Inert``.

Note [Small files, large results]
    What an operation makes is no larger than what it reads, except where a maker copies what the memo holds. Those
    copies are counted (``_copied``): a file cannot ask for much more memory than it has bytes.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Collection
from typing import IO, Any

import torch

from lt_zero.checkpoint.formats.admitted import DTYPES, INERT, MAKERS, Global, Inert, Maker, Refused
from lt_zero.common.errors import CheckpointError

# Operations whose decoded argument is the value.
_VALUES = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
        "FLOAT",
        "BINFLOAT",
        "UNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
    ]
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_SIMPLE_KEYS = (str, int, float, bool, bytes, type(None), Global, Inert, torch.dtype)


class Machine:
    """Runs one pickle.

    Args:
        makers: what to make of other classes, beside ``MAKERS``; they get the arguments of the call.
        persistent: what a persistent id stands for; none are taken without it.
        inert: names of further classes whose objects are kept as ``Inert``.
        globals: names of classes and functions that the makers want to see as arguments.
    """

    def __init__(
        self,
        makers: dict[str, Maker] | None = None,
        persistent: Callable[[Any], Any] | None = None,
        inert: Collection[str] = (),
        globals: Collection[str] = (),
    ) -> None:
        self._makers = {**MAKERS, **(makers or {})}
        self._persistent = persistent
        self._inert = INERT | frozenset(inert)
        self._globals = frozenset(globals)
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def run(self, stream: bytes | IO[bytes], size: int) -> Any:
        """The object that the pickle describes; ``size``: its bytes, or the file's.

        Raises:
            Refused: it names a class that is not on the list, or uses what no checkpoint needs.
            ValueError, TypeError, LookupError: it is damaged.
        """
        self._stack, self._marks, self._memo = [], [], {}
        self._copied = -16 * size - 65536
        for code, arg, _ in pickletools.genops(stream):
            name = code.name
            if name in _VALUES:
                self._stack.append(arg)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name == "STOP":
                (result,) = self._stack
                return result
            else:
                operation = _OPERATIONS.get(name)
                if operation is None:
                    raise Refused(f"the pickle operation {name}, which no checkpoint needs")
                operation(self, arg)
        raise ValueError("the pickle has no end")

    def spend(self, count: int) -> None:
        """See Note [Small files, large results]."""
        self._copied += count
        if self._copied > 0:
            raise Refused("so many copies of its own content that they are far larger than the file")

    def key(self, value: Any) -> Any:
        """``value`` if it may be hashed: hashing a deep tuple would exhaust the C stack."""
        plain = isinstance(value, _SIMPLE_KEYS)
        if not plain and not (isinstance(value, tuple) and all(isinstance(item, _SIMPLE_KEYS) for item in value)):
            raise Refused(f"a {type(value).__name__} as a key")
        return value

    def put(self, target: Any, key: Any, value: Any) -> None:
        """Set an item of a mapping."""
        items = target.items if isinstance(target, Inert) else target
        if not isinstance(items, dict):
            raise TypeError(f"items for a {type(target).__name__}")
        items[self.key(key)] = value

    # ---- the stack ---------------------------------------------------------------------------------------------

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise IndexError("a mark is in the way")
        return self._stack.pop()

    def _popped_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update(self.key(value) for value in values)
        else:
            raise TypeError(f"elements for a {type(target).__name__}")

    def _set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError("a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            self.put(self._stack[-1], key, value)

    def _dictionary_of(self, values: list[Any]) -> dict[Any, Any]:
        self._stack.append({})
        self._set_items(values)
        result: dict[Any, Any] = self._stack.pop()
        return result

    # ---- classes -----------------------------------------------------------------------------------------------

    def _named(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a class whose name is no text")
        found = Global(module, name)
        known = str(found)
        if known in DTYPES:
            return DTYPES[known]
        # Dots in the name would make one entry of the list stand for several objects.
        if "." in name or not (known in self._makers or known in self._inert or known in self._globals):
            raise Refused(known)
        return found

    def made(self, what: Any, args: Any) -> Any:
        """What a call of ``what`` gives."""
        if not isinstance(what, Global) or not isinstance(args, tuple):
            raise Refused(f"a call of a {type(what).__name__}")
        maker = self._makers.get(str(what))
        if maker is not None:
            return maker(self, args)
        if str(what) not in self._inert:
            raise Refused(f"a call of {what}")
        return Inert(str(what), args)

    def _build(self, state: Any) -> None:
        target = self._stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif isinstance(target, dict) and isinstance(state, dict):
            pass  # attributes of an OrderedDict: ``_metadata`` of a state dict, which knows versions of modules
        else:
            raise Refused(f"attributes for a {type(target).__name__}")

    def _of_class(self, values: list[Any]) -> Any:
        return self.made(values[0], tuple(values[1:]))

    def _object(self, identity: Any) -> Any:
        if self._persistent is None:
            raise Refused("an object that is stored elsewhere (persistent id)")
        return self._persistent(identity)

    def _memoized(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _call(self) -> None:
        args, what = self._pop(), self._pop()
        self._stack.append(self.made(what, args))

    def _global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(self._named(module, name))

    def _tuple_of(self, count: int) -> None:
        self._stack.append(tuple(self._pop() for _ in range(count))[::-1])

    def _push(self, value: Any) -> None:
        self._stack.append(value)


_OPERATIONS: dict[str, Callable[[Machine, Any], Any]] = {
    "PROTO": lambda m, arg: None,
    "FRAME": lambda m, arg: None,
    "MARK": lambda m, arg: m._marks.append(len(m._stack)),
    "POP": lambda m, arg: m._pop() if not m._marks or len(m._stack) > m._marks[-1] else m._marks.pop(),
    "POP_MARK": lambda m, arg: m._popped_to_mark(),
    "DUP": lambda m, arg: m._push(m._stack[-1]),
    "TUPLE": lambda m, arg: m._push(tuple(m._popped_to_mark())),
    "TUPLE1": lambda m, arg: m._tuple_of(1),
    "TUPLE2": lambda m, arg: m._tuple_of(2),
    "TUPLE3": lambda m, arg: m._tuple_of(3),
    "LIST": lambda m, arg: m._push(m._popped_to_mark()),
    "DICT": lambda m, arg: m._push(m._dictionary_of(m._popped_to_mark())),
    "FROZENSET": lambda m, arg: m._push(frozenset(m.key(value) for value in m._popped_to_mark())),
    "APPEND": lambda m, arg: m._extend([m._pop()]),
    "APPENDS": lambda m, arg: m._extend(m._popped_to_mark()),
    "ADDITEMS": lambda m, arg: m._extend(m._popped_to_mark()),
    "SETITEM": lambda m, arg: m._set_items([m._pop(), m._pop()][::-1]),
    "SETITEMS": lambda m, arg: m._set_items(m._popped_to_mark()),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, arg: m._push(m._memo[arg])),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, arg: m._memoized(arg)),
    "MEMOIZE": lambda m, arg: m._memoized(len(m._memo)),
    "GLOBAL": lambda m, arg: m._push(m._named(*arg.split(" ", 1))),
    "STACK_GLOBAL": lambda m, arg: m._global(),
    "REDUCE": lambda m, arg: m._call(),
    "NEWOBJ": lambda m, arg: m._call(),
    "INST": lambda m, arg: m._push(m.made(m._named(*arg.split(" ", 1)), tuple(m._popped_to_mark()))),
    "OBJ": lambda m, arg: m._push(m._of_class(m._popped_to_mark())),
    "BUILD": lambda m, arg: m._build(m._pop()),
    "BINPERSID": lambda m, arg: m._push(m._object(m._pop())),
}

DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, struct.error, EOFError, MemoryError, RecursionError)


def load_pickle(machine: Machine, stream: bytes | IO[bytes], size: int, where: object) -> Any:
    """Run a pickle of the file ``where``.

    Raises:
        CheckpointError: it is damaged, or holds what is not on the list; names the file and the class.
    """
    try:
        return machine.run(stream, size)
    except Refused as error:
        raise CheckpointError(
            f"{where} holds {error}, which is not read, because loading it could run code. Save the checkpoint without "
            "it; or, if its content is not needed, name the class in `inert`: then it is kept as data only."
        ) from None
    except DAMAGE as error:
        raise CheckpointError(
            f"{where} is damaged: its pickle cannot be read ({type(error).__name__}: {error}). Take another checkpoint."
        ) from None
