"""What a body must not share with the forward, although both run on one thread: torch's modes, random numbers, and the C stack.

A body that parks inside `with torch.autocast(...)` must not leave the forward in that mode; a body that seeds torch's generator must not
change what the engine samples.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

# Do not ask here whether the machine has CUDA: a process that has asked cannot be forked any more, and vLLM forks its engine.
_KINDS = ("cpu", "cuda")


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)


_NO_AUTOCAST = _autocast()  # the state at import


class Modes(NamedTuple):
    """Torch's modes: gradients, inference mode, autocast for each kind of device, and how many Python modes are on the stacks."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    functions: int
    dispatches: int

    @classmethod
    def now(cls) -> Modes:
        """Those in force."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _autocast() if torch._C._is_any_autocast_enabled() else _NO_AUTOCAST,
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        )

    def put(self) -> None:
        """Restore gradients and autocast."""
        torch.set_grad_enabled(self.grad)
        for kind, (on, dtype) in zip(_KINDS, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)

    def put_back(self) -> None:
        """The same after other code had control, faster if no autocast is involved."""
        if self.autocast is _NO_AUTOCAST and not torch._C._is_any_autocast_enabled():  # nearly always
            torch.set_grad_enabled(self.grad)
        else:
            self.put()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore gradients, inference mode and autocast within the block."""
        before = Modes.now()
        with torch.inference_mode(self.inference):
            self.put()
            try:
                yield
            finally:
                before.put()


class Away:
    """Leaves all modes that were entered since `base`, until `back` enters them again.

    Args:
        base: the modes in force when this code was given control.
    """

    def __init__(self, base: Modes) -> None:
        self._own = own = Modes.now()
        self._guard: Any = None
        self._functions: list[Any] = []
        self._dispatches: list[Any] = []
        self._differs = own != base
        if not self._differs:  # nearly always; this runs at every read
            return
        self._functions = [pop_function_mode() for _ in range(own.functions - base.functions)]
        self._dispatches = [pop_dispatch_mode() for _ in range(own.dispatches - base.dispatches)]
        if own.inference != base.inference:
            self._guard = torch._C._InferenceMode(base.inference)
        base.put()

    def back(self) -> None:
        """Enter the modes again. To be called when `base` is in force."""
        if not self._differs:
            torch.set_grad_enabled(self._own.grad)
            return
        self._guard = None  # restores inference mode
        self._own.put()
        for mode in reversed(self._dispatches):
            push_dispatch_mode(mode)
        for mode in reversed(self._functions):
            push_function_mode(mode)


class Randomness:
    """A body's own state of torch's default generators, in force within `with`.

    Neither the engine's sampler nor another body notices what the body draws or seeds, and it draws the same on every rank.

    Args:
        seed_text: the body's name, the same on every rank.
        device: where the forward computes.
    """

    def __init__(self, seed_text: str, device: torch.device) -> None:
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        seed = zlib.crc32(seed_text.encode())
        self._generators = generators
        self._own = [torch.Generator(g.device).manual_seed(seed).get_state() for g in generators]
        self._others: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._others = [generator.get_state() for generator in self._generators]
        self._put(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = [generator.get_state() for generator in self._generators]
        self._put(self._others)

    def _put(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


# at_stack_end
#
# A body's frames lie on the forward's C stack, below those from which it was started. When the body is resumed from elsewhere, other frames
# have taken the place of these, so the return address of its outermost frame is garbage. Nothing returns there. But torch takes a backtrace
# whenever it makes a C++ exception, for example for an index out of range, and libgcc's unwinder reads the code at each return address that
# belongs to no known function. That has killed the process, with an `IndexError` after a read of the logits.
#
# The unwinder stops at a function without an unwind table. So a body runs inside of one, which only calls another function.

_CODE = {
    # push rbp; mov rbp, rsp; mov rax, rdi; mov rdi, rsi; call rax; pop rbp; ret
    "x86_64": bytes.fromhex("55 4889e5 4889f8 4889f7 ffd0 5d c3"),
}


def _make() -> Callable[[Callable[[], None]], None] | None:
    """f(run), which calls `run`; None if there is no code for this processor, or the system forbids making code."""
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
    """Call `run` such that a backtrace taken inside ends there."""
    if _call is None:
        return run()
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:  # ctypes would print it and go on
            raised.append(error)

    _call(caught)
    if raised:
        raise raised.pop()
