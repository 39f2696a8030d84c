"""Where the C stack of a trace's body ends, for whoever walks up its frames.

A body's frames lie on the forward's stack, below those that it was started from. When it is resumed from elsewhere, other frames are in the
place of these, and what its own outermost frame takes for its return address is whatever lies there. Nothing ever returns to it. But torch
takes a backtrace of the stack whenever it makes a C++ exception, as for an index out of range, and libgcc's unwinder reads the code at
each return address that belongs to no known function: seen to kill the process, by an `IndexError` behind a read of the logits.

The unwinder stops at a function of which it has no unwind table. So a body runs inside of one, a few instructions that do nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable

_CODE = {
    # push rbp; mov rbp, rsp; mov rax, rdi; mov rdi, rsi; call rax; pop rbp; ret
    "x86_64": bytes.fromhex("55 4889e5 4889f8 4889f7 ffd0 5d c3"),
}


def _make() -> Callable[[Callable[[], None]], None] | None:
    """f(run) calls `run`; None where there is no such code, or the system lets nobody make any."""
    code = _CODE.get(platform.machine())
    if code is None:
        return None
    try:
        prototype = ctypes.PYFUNCTYPE(None, ctypes.py_object)
        enter = prototype(lambda run: run())
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
            return None
    except (OSError, MemoryError):
        return None
    call = ctypes.PYFUNCTYPE(None, prototype, ctypes.py_object)(address)
    call.page = page  # type: ignore[attr-defined]
    return lambda run: call(enter, run)


_call = _make()


def at_stack_end(run: Callable[[], None]) -> None:
    """Call `run` with nothing above it to walk up to."""
    if _call is None:
        return run()
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:  # ctypes would print it
            raised.append(error)

    _call(caught)
    if raised:
        raise raised.pop()
