"""Waits of a script for collectives that it has launched with ``async_op=True``: ``work.wait()``.

Note [Waits without a frame]
    ``wait`` is a method in C++, so the innermost frame is the script's, and looks the same as one that computes. But
    the instruction at which it stands is a call, and those before it name the method and, if it is a variable or an
    attribute of one, the object. Nothing is executed to find it. What is written otherwise (``works.pop().wait()``) is
    not seen.
"""

from __future__ import annotations

import dis
import inspect
import sys
from types import FrameType
from typing import Any

import torch.distributed as dist

_PASSED = {"PRECALL", "EXTENDED_ARG", "NOP", "PUSH_NULL"}  # instructions that tell nothing here
_CALLS = {"CALL", "CALL_METHOD"}
# The last one is that of a loop in one line, from Python 3.13: it stores the variable and loads it.
_LOCAL = ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL", "STORE_FAST_LOAD_FAST")


def work_awaited(frame: FrameType, instruction: int | None = None) -> dist.Work | None:
    """The work whose ``wait()`` a frame calls; None if it does not, or that is not known.

    Args:
        instruction: at which the frame stands, by default where it stands now; tracebacks have it.
    """
    code = frame.f_code
    if "wait" not in code.co_names:
        return None
    at = frame.f_lasti if instruction is None else instruction
    # The last of these is the one at which the frame stands, which may be inside of it: at a cache of the call.
    passed = [entry for entry in dis.get_instructions(code) if entry.offset <= at]
    before = [entry for entry in passed if entry.opname not in _PASSED]
    if len(before) < 3 or before[-1].opname not in _CALLS or before[-1].arg:
        return None  # no call, or one with a timeout, which ends by itself
    if before[-2].opname not in ("LOAD_METHOD", "LOAD_ATTR") or before[-2].argval != "wait":
        return None
    names = list[str]()
    place = len(before) - 3
    while place > 0 and before[place].opname == "LOAD_ATTR":
        names.append(before[place].argval)
        place -= 1
    base = before[place]
    # What a jump leads to may have another object than the last one that was loaded: ``(work or other).wait()``.
    jumps = any(entry.is_jump_target for entry in passed if entry.offset > base.offset)
    if jumps or not base.opname.startswith(_LOCAL):
        return None
    name = base.argval[-1] if isinstance(base.argval, tuple) else base.argval  # one instruction may load two
    found = _variable(frame, name)
    for attribute in reversed(names):
        found = getattr(found, "__dict__", {}).get(attribute)
    return found if isinstance(found, dist.Work) else None


def _variable(frame: FrameType, name: str) -> Any:
    """The value of a variable of a frame, without keeping the others alive.

    Before Python 3.13 a function's frame keeps the dict of values that it is asked for, and tensors of a training loop
    would stay until the loop ends. So it is emptied, unless the function has asked for it, too, by ``locals()``.
    """
    found = frame.f_locals
    value = found.get(name, frame.f_globals.get(name))
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(found) is dict
    # Three references: of the frame, of this function, and of the call below.
    if is_copy and frame.f_trace is None and sys.getrefcount(found) <= 3:
        found.clear()
    return value
