"""A with-block as a function: what `trace/block.py` captures, compiles, ships, skips and pushes back.

The oracle is Python: the same lines are run with `nullcontext` (an ordinary `with`) and with `Trace` (skipped,
compiled, run as a function, its names pushed back), and must leave the same names behind.
"""

# ruff: noqa: F821, F841 -- names are bound and looked up by the module under test

from __future__ import annotations

import linecache
import pickle
import re
import sys
import textwrap
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
import greenlet
import pytest
from bare_trace import Trace, run_python

from midstream.errors import SourceUnavailableError, TraceError, UnsavedError
from midstream.trace.block import Block, SkipBlock, capture, link, locals_at, push, skip, skipped
from midstream.trace.code import BlockProgram
from midstream.trace.saves import Unsaved
from midstream.trace.shipping import ship, unship
from midstream.trace.tracer import steps_of


class Outer(Trace):
    """A trace without a prompt: its body runs on the client at once, and its invokes are captured from there."""

    def __enter__(self) -> Outer:
        frame = sys._getframe(1)
        self.block = capture(frame)
        skip(frame, self.block.target, self)
        self.blocks: list[Block] = []
        return self

    def invoke(self, *_: Any) -> Invoke:
        return Invoke(self)


class Invoke:
    def __init__(self, outer: Outer) -> None:
        self.outer = outer

    def __enter__(self) -> Invoke:
        frame = sys._getframe(1)
        self.outer.blocks.append(capture(frame))
        skip(frame, self.outer.blocks[-1].target, self)
        return self

    def __exit__(self, kind: Any, exc: BaseException | None, tb: Any) -> bool:
        return skipped(exc)


def exec_cell(source: str, **names: Any) -> dict[str, Any]:
    """Runs a piece of source as a notebook does: compiled under a name that is registered in linecache."""
    source = textwrap.dedent(source)
    filename = f"<cell {abs(hash(source))}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"__name__": "cell", **names}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def left_behind(source: str, manager: Any) -> dict[str, Any]:
    """The values that a cell leaves, in a module and in a function."""
    module = exec_cell(source, trace=manager)
    body = textwrap.indent(textwrap.dedent(source), "    ")
    function = exec_cell(f"def f():\n{body}\n    return locals()\nleft = f()\n", trace=manager)["left"]
    plain = [
        {k: v for k, v in d.items() if isinstance(v, int | str | list | dict | set | tuple)} for d in (module, function)
    ]
    for values in plain:
        for name in ("__name__", "__builtins__", "__annotations__", "t"):
            values.pop(name, None)
    return {"module": plain[0], "function": plain[1]}


def cells(text: str) -> dict[str, str]:
    """Cells by the name that stands above each, after `##`."""
    parts = (part.partition("\n") for part in text.split("## ")[1:])
    return {name: source for name, _, source in parts}


BODIES = cells("""
## assignment
with trace(): x = 1
## captured
a = 2
with trace() as t:
    x = a + 1
## captured and assigned
total = 3
ids = [1]
with trace():
    total = total + 1
    ids += [2]
## for
out = []
with trace():
    for i in range(3):
        if i == 1:
            continue
        out.append(i)
    else:
        done = True
## while and break
with trace():
    n = 0
    while True:
        n += 1
        if n > 4:
            break
## nested with
from contextlib import nullcontext
with trace():
    with nullcontext(4) as v, nullcontext(5) as w:
        x = v + w
## comprehension
xs = [1, 2]
k = 10
with trace():
    ys = [x * k for x in xs if x]
    d = {x: y for x, y in zip(xs, ys)}
## comprehension over its own name
x = [1, 2]
with trace():
    x = [x for x in x]
## walrus
with trace():
    ys = [last := i for i in range(3)]
    if (m := max(ys)) > 1:
        y = m
## lambda and closure
k = 3
with trace():
    z = 4
    f = lambda v: v * k + z
    def g(v):
        return f(v) + z
    z = 5
    x = g(1)
## nested nonlocal
n = 1
with trace():
    n = n + 1
    def up():
        return [n + i for i in range(2)]
    x = up()
## class
base = 2
with trace():
    class A:
        size = base
        def get(self):
            return self.size + base
    x = A().get()
## import
with trace():
    import os.path
    from math import floor as fl
    x = fl(2.5)
    y = os.path.basename('a/b')
## try
with trace():
    try:
        1 / 0
    except ZeroDivisionError as error:
        x = str(error)
    finally:
        y = 2
## suppressed
import contextlib
v = 1
with trace():
    with contextlib.suppress(KeyError):
        v = {}['k']
    x = v
## del
a = 1
with trace():
    b = a
    c = 2
    del c
## match
p = {'k': [1, 2, 3], 'z': 0}
with trace():
    match p:
        case {'k': [first, *rest], **others}:
            x = first
## annotated
with trace():
    x: int = 3
    y: 'str'
    z = x
## unpacking
with trace():
    a, (b, *c) = 1, (2, 3, 4)
    c[0], d = 9, 8
## conditional
x = 1
with trace():
    if x > 5:
        x = 2
    else:
        y = x
## zero iterations
x = 1
with trace():
    for x in []:
        pass
    y = x
## several on a line
with trace(): x = 1
with trace(): y = 2; z = x
## multi-line header
with trace(
) as t:
    x = 1
## parenthesised items
with (
    trace() as t,
    trace() as u,
):
    x = 1
## a loop of blocks
out = []
for i in range(4):
    with trace() as t:
        out.append(i)
        j = i
## string first
with trace():
    "text"
    x = 1
## empty
x = 1
with trace():
    pass
y = 2
## tabs, comments, unicode
é = 'ü'
with trace(): # ü
\tx = é + 'ß' # c

\ty = x
## decorated first
ident = lambda f: f
with trace():
    @ident
    def f(): return 7
    x = f()
## nested traces
with trace():
    a = 1
    with trace():
        b = a + 1
    c = b + 1
""")


@pytest.mark.parametrize("source", BODIES.values(), ids=BODIES)
def test_same_as_plain(source: str) -> None:
    assert left_behind(source, Trace) == left_behind(source, nullcontext)


# A function from outside and the block use one variable, and one of them binds it: (the cell, what the error says).
SHARED = {
    "read by a function": ("x = 1\ndef f(): return x\nwith trace():\n    x = 2\n    y = f()\n", "f,.* reads 'x'"),
    "read by a lambda": ("x = 1\nf = lambda: x\nwith trace():\n    x = 2\n    y = f()\n", "reads 'x'"),
    "read in a comprehension": (
        "x = 1\ndef f(): return [x for _ in 'ab']\nwith trace():\n    x = 2\n    y = f()\n",
        "reads 'x'",
    ),
    "read by a function that a function calls": (
        "x = 1\ndef g(): return x\ndef f(): return g()\nwith trace():\n    x = 2\n    y = f()\n",
        "g,.* reads 'x'",
    ),
    "read by a method": (
        "x = 1\nclass K:\n    def m(self): return x\nk = K()\nwith trace():\n    x = 2\n    y = k.m()\n",
        "K.m,.* reads 'x'",
    ),
    "read by a property": (
        "x = 1\nclass K:\n    @property\n    def m(self): return x\nk = K()\nwith trace():\n    x = 2\n    y = k.m\n",
        "K.m,.* reads 'x'",
    ),
    "read by a function in a list": (
        "x = 1\ndef f(): return x\nfs = [f]\nwith trace():\n    x = 2\n    y = fs[0]()\n",
        "reads 'x'",
    ),
    "read by a partial": (
        "import functools\nx = 1\ndef f(a): return x + a\ng = functools.partial(f, 1)\nwith trace():\n    x = 2\n    y = g()\n",
        "reads 'x'",
    ),
    "bound by a function": (
        "x = 1\ndef f():\n    global x\n    x = 2\nwith trace():\n    f()\n    y = x\n",
        "f,.* binds 'x'",
    ),
    "a number that the function counts up": (
        "x = 1\ndef f():\n    global x\n    x += 2\nwith trace():\n    f()\n    y = x\n",
        "f,.* binds 'x'",
    ),
    "a list that is bound anew": (
        "x = [1]\ndef f():\n    global x\n    x = x + [2]\nwith trace():\n    f()\n    y = [*x]\n",
        "f,.* binds 'x'",
    ),
    "bound by both": (
        "x = 1\ndef f():\n    global x\n    x += 2\nwith trace():\n    x = 5\n    f()\n",
        "f,.* binds 'x'",
    ),
    "an enclosing function's, read": (
        "def o():\n    x = 1\n    def f(): return x\n    with trace():\n        x = 2\n        y = f()\n    return y\nr = o()\n",
        "f,.* reads 'x'",
    ),
    "an enclosing function's, bound": (
        "def o():\n    x = 1\n    def f():\n        nonlocal x\n        x = 2\n    with trace():\n        f()\n        y = x\n"
        "    return y\nr = o()\n",
        "f,.* binds 'x'",
    ),
    "an enclosing function's, read in another one": (
        "def o():\n    x = 1\n    def f(): return x\n    def g():\n        nonlocal x\n        with trace():\n            x = 2\n"
        "            y = f()\n        return y\n    return g()\nr = o()\n",
        "f,.* reads 'x'",
    ),
}


@pytest.mark.parametrize(("source", "said"), SHARED.values(), ids=SHARED)
def test_a_variable_that_a_function_and_the_block_share_is_refused(source: str, said: str) -> None:
    """The block has its own, so one of the two would go on with the old value."""
    exec_cell(source, trace=nullcontext)
    with pytest.raises(TraceError, match=said):
        exec_cell(source, trace=Trace)


# Names that are the same, and variables that are not, or that nobody binds anew.
APART = cells("""
## a parameter of the function
x = 1
def f(x): return x
with trace():
    x = 2
    y = f(3)
## a local variable of the function
x = 1
def f():
    x = 7
    return x
with trace():
    x = 2
    y = f()
## a variable of another function's call
def make(x):
    def f(): return x
    return f
x = 1
f = make(1)
with trace():
    x = 2
    y = f()
## both read it
x = 1
def f(): return x
with trace():
    y = f() + x
## a function that is not called
x = 1
def f(): return x
with trace():
    x = 2
## a module
import math
def f(): return math.floor(1.5)
with trace():
    import math
    y = f()
## a function of the block
x = 1
with trace():
    def f(): return x
    x = 2
    y = f()
## an attribute of that name
class K: x = 4
def f(): return K.x
with trace():
    x = 2
    y = f()
""")


@pytest.mark.parametrize("source", APART.values(), ids=APART)
def test_variables_that_are_not_shared_are_as_in_python(source: str) -> None:
    assert left_behind(source, Trace) == left_behind(source, nullcontext)


def test_a_function_may_change_a_shared_object_in_place() -> None:
    """`x += ...` of a list or a tensor binds the same object again."""
    source = "x = [1]\ndef f():\n    global x\n    x += [2]\nwith trace():\n    f()\n    y = [*x]\n"
    assert exec_cell(source, trace=Trace)["y"] == exec_cell(source, trace=nullcontext)["y"] == [1, 2]


def test_global_and_nonlocal_are_names_of_the_block() -> None:
    source = """
    counter = 1
    def f():
        global counter, made
        with trace():
            counter = counter + 1
            made = 5
    f()
    with trace():
        def up():
            global counter
            counter += 1
        up()
    def outer():
        n = 1
        def inner():
            nonlocal n
            with trace():
                n = n + 1
                def up():
                    nonlocal n
                    n *= 10
                up()
        inner()
        return n
    n = outer()
    """
    traced, plain = exec_cell(source, trace=Trace), exec_cell(source, trace=nullcontext)
    assert [traced[k] for k in ("counter", "made", "n")] == [plain[k] for k in ("counter", "made", "n")] == [3, 5, 20]


def test_names_of_enclosing_closures_are_captured() -> None:
    scale = 3

    def inner() -> int:
        with Trace() as t:
            x = scale * len([1, 2])
        assert t.block.captured == {"scale": 3}
        return x

    assert inner() == 6


def test_private_names_are_those_of_the_class() -> None:
    class A:
        def __init__(self) -> None:
            self.__v = 4

        def get(self) -> int:
            with Trace():
                __w = self.__v
                x = __w + 1
            return x

    assert A().get() == 5


def test_what_is_captured_and_assigned() -> None:
    old = fresh = 1
    with Trace(run=False) as t:
        fresh = old
        old = len([fresh])
    assert t.block.captured == {"old": 1}  # not fresh: it is bound before it is read; not len: a builtin
    assert t.block.assigned == {"old", "fresh"}
    assert t.block.target == "t"


def test_the_target_is_passed_in_not_captured() -> None:
    for _ in range(2):  # the second time, `t` still holds the first trace
        with Trace() as t:
            x = t
        assert "t" not in t.block.captured
        assert x is t


def test_the_target_has_to_be_a_name() -> None:
    holder: list[Any] = [None]
    with pytest.raises(TraceError, match="plain name"):
        with Trace() as holder[0]:
            pass


def test_extra_overrides_captured() -> None:
    model = "here"
    with Trace(run=False) as t:
        x = model
        model = model + "!"
    assert t.block.function()({"model": "there"}) == {"x": "there", "model": "there!"}


def test_unresolved_name_is_a_name_error() -> None:
    with pytest.raises(NameError, match="missing"):
        with Trace():
            missing
    with pytest.raises(NameError, match="later"):
        with Trace():
            print(later)
            later = 1


def test_a_name_local_to_the_frame_is_not_taken_from_its_globals() -> None:
    source = "x = 1\ndef f():\n    with trace():\n        x = x + 1\nf()"
    for manager in (Trace, nullcontext):
        with pytest.raises(NameError):
            exec_cell(source, trace=manager)


# Rewrites


def test_save_works_on_any_object_anywhere() -> None:
    with Trace() as t:
        a = [1].save()
        b = (2).save() + 1
        for i in range(2):
            (lambda v: v.save())(i)
        c = {"k": "v".save().save()}
    assert t.saved == [[1], 2, 0, 1, "v", "v"]
    assert (a, b, c) == ([1], 3, {"k": "v"})


def test_save_with_arguments_is_left_alone() -> None:
    class Figure:
        def save(self, path: str = "", **_: Any) -> str:
            return path

    with Trace() as t:
        x = Figure().save("p"), Figure().save(path="q")
    assert (x, t.saved) == (("p", "q"), [])


def test_backward_and_grad() -> None:
    log: list[Any] = []

    class Backward:
        def __init__(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            self.loss = loss
            log.append((loss, args, kwargs))

        def __enter__(self) -> Any:
            return self

        def __getitem__(self, of: Any) -> Any:
            return f"d{self.loss}/d{of}"

        def __setitem__(self, of: Any, grad: Any) -> None:
            log.append((of, grad))

        def __exit__(self, *_: Any) -> None:
            log.append("left")

    class Plain:
        grad = "plain"

    with Trace(__backward__=Backward) as t:
        l1, l2, h, plain = "L", "M", "h", Plain()
        with l1.backward(1, retain_graph=True):
            g = h.grad.save()
            with l2.backward() as grads:
                inner = [v.grad for v in "ab"]
                mine = grads["z"]
            again = (lambda: h.grad)()
            h.grad = 3
        outside = plain.grad
    assert (g, inner, mine, again, outside) == ("dL/dh", ["dM/da", "dM/db"], "dM/dz", "dL/dh", "plain")
    assert log == [("L", (1,), {"retain_graph": True}), ("M", (), {}), "left", ("h", 3), "left"]
    assert t.saved == ["dL/dh"]
    assert not any(name.startswith("__") for name in t.result)


def test_with_goes_through_steps() -> None:
    class Tracer:
        iter = {0: "ab", 1: "cd"}

        def all(self) -> str:
            return "xyz"

    tracer, log = Tracer(), []
    with Trace(__steps__=iter) as t, tracer.iter[0] as step:
        log.append(step)
        with tracer.iter[1]:
            with nullcontext(1) as one, tracer.all() as inner, nullcontext(step) as outer:
                log.append((one, inner, outer).save())
    assert log == ["a", *2 * [(1, i, "a") for i in "xyz"], "b", *2 * [(1, i, "b") for i in "xyz"]]
    assert t.saved == [entry for entry in log if isinstance(entry, tuple)]
    assert not any(name.startswith("__") for name in t.result) and (step, inner, outer) == ("b", "z", "b")


def test_with_of_a_manager_of_ones_own_is_not_taken_for_steps() -> None:
    class Locks:
        def all(self) -> Any:
            return nullcontext(7)

    with pytest.raises(TraceError, match=r"manager = x\.all\(\)"):
        with Trace(__steps__=steps_of):
            with Locks().all():
                pass
    with Trace(__steps__=steps_of):
        manager = Locks().all()
        with manager as seven:
            found = seven
    assert found == 7


ESCAPES = {
    "return": "def f():\n    with trace():\n        return 1\nf()",
    "yield": "def f():\n    with trace():\n        yield 1\nlist(f())",
    "yield ": "def f():\n    with trace():\n        yield from []\nlist(f())",
    "await": "async def f():\n    with trace():\n        await g()\nf().send(None)",
    "async with": "async def f():\n    with trace():\n        async with g(): pass\nf().send(None)",
    "async for": "async def f():\n    with trace():\n        [x async for x in g()]\nf().send(None)",
    "break": "for i in range(3):\n    with trace():\n        break",
    "continue": "for i in range(3):\n    with trace():\n        continue",
    "break ": "for i in range(3):\n    with trace():\n        for j in []: pass\n        else: break",
    "break  ": "def f():\n    with trace():\n        for i in a:\n            with t.iter[:], b: break\nf()",
    "import *": "with trace():\n    from math import *",
}


@pytest.mark.parametrize(("word", "source"), ESCAPES.items(), ids=[*map(str, ESCAPES)])
def test_leaving_the_block_is_refused_with_its_line(word: str, source: str) -> None:
    line = 2 if word == "import *" else 4 if word in ("break ", "break  ") else 3
    with pytest.raises(TraceError, match=rf">:{line}: `{word.strip().replace('*', '.')}"):
        exec_cell(source, trace=Trace)


@pytest.mark.parametrize("call", ["locals()", "globals()", "vars()", "dir()"])
def test_names_of_all_variables_are_refused(call: str) -> None:
    """In a trace they would lack the caller's: `locals().get("scale", 1.0)` was 1.0."""
    with pytest.raises(TraceError, match=rf">:3: `{re.escape(call)}` in a trace would show"):
        exec_cell(f"scale = 2.0\nwith trace():\n    x = 'scale' in {call}\n", trace=Trace)
    exec_cell("with trace():\n    x = dir(3)\n    def f(): return locals()\n    y = f()\n", trace=Trace)


# Which statement


def test_items_after_ours_are_part_of_the_body() -> None:
    log = []

    class Log:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> str:
            log.append(self.name)
            return self.name

        def __exit__(self, *_: Any) -> None:
            log.append(f"/{self.name}")

    with Log("a") as a, Trace(run=False) as t, Log(a + "b") as b, Log("c"):
        x = a + b
    assert log == ["a", "/a"]
    assert t.block.captured.keys() == {"Log", "a"}
    assert t.block.function()({}) == {"b": "ab", "x": "aab"}
    assert log == ["a", "/a", "ab", "c", "/c", "/ab"]


def test_context_expressions_of_any_form() -> None:
    made, flag, holder = Trace(), True, {"k": [Trace()]}
    with made:
        a = 1
    with made if flag else nullcontext():
        b = 2
    with holder["k"][0] as t:
        c = 3
    with (lambda: Trace())() as u: d = 4  # fmt: skip  # noqa: E701
    assert (a, b, c, d) == (1, 2, 3, 4)
    assert t.block.code is not u.block.code


def test_a_call_of_enter_is_no_with_statement() -> None:
    with pytest.raises(TraceError, match="entered by a `with` statement"):
        Trace().__enter__()


@pytest.mark.parametrize("command", ["-c", "-"])
def test_no_source_points_at_run(command: str) -> None:
    code = "import sys\nfrom midstream.trace.block import capture\n" + textwrap.dedent(
        """
        class T:
            def __enter__(self): capture(sys._getframe(1))
            def __exit__(self, *a): pass
        try:
            with T(): x = 1
        except Exception as e: print(type(e).__name__, e)
        """
    )
    done = run_python("-c", code) if command == "-c" else run_python("-", stdin=code)
    if command == "-c" and sys.version_info >= (3, 13):
        assert done == ""  # Python keeps the source of -c from 3.13 on
        return
    assert done.startswith("SourceUnavailableError") and "model.run(fn, prompt)" in done


def test_exec_without_source() -> None:
    with pytest.raises(SourceUnavailableError, match=r"model\.run"):
        exec("with trace(): pass", {"trace": Trace})


def test_a_file_edited_after_it_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    source = "def f(trace):\n    with trace():\n        x = 1\n    with trace():\n        y = 3\n    return x, y\n"

    def load(text: str) -> Any:
        path.write_text(text)
        names: dict[str, Any] = {}
        exec(compile(text, str(path), "exec"), names)
        return names["f"]

    old = load(source)
    assert old(Trace) == (1, 3)
    new = load(source.replace("x = 1", "x = 17"))  # loaded again
    assert new(Trace) == (17, 3)
    assert old(Trace) == (1, 3)  # found before the edit
    fresh = load(source.replace("y", "z"))
    for other in (source, "\n" + source, "x = 1\n"):
        path.write_text(other + "#" * len(other))
        with pytest.raises(SourceUnavailableError, match="edited after it was loaded"):
            fresh(Trace)


SCRIPT = """
import sys
from bare_trace import Trace as T

start = 1
for n in range(2):
    with T() as t:
        start += 1
        here = (lambda: start)()
    with T(): one_line = here
async def f():
    with T() as t:
        y = start
    return y
try:
    f().send(None)
except StopIteration as e:
    print(start, here, one_line, e.value, sys.gettrace())
"""


@pytest.mark.parametrize("flags", [[], ["-X", "no_debug_ranges"]], ids=["", "no_debug_ranges"])
def test_script(tmp_path: Path, flags: list[str]) -> None:
    script = tmp_path / "script.py"
    lines = SCRIPT if not flags else SCRIPT.replace("with T(): one_line", "with T():\n        one_line")
    script.write_text(lines)
    assert run_python(*flags, str(script)).split() == ["3", "3", "3", "3", "None"]


# Errors


def test_an_error_shows_the_users_line_and_keeps_the_names() -> None:
    with pytest.raises(ZeroDivisionError) as info:
        with Trace() as t:
            a = 1
            b = a + 1
            c = (
                b / (a - 1)  # here
            )
    frame = traceback.extract_tb(info.value.__traceback__)[-1]
    assert (frame.filename, frame.name) == (__file__, "test_an_error_shows_the_users_line_and_keeps_the_names")
    assert frame.line == "b / (a - 1)  # here"
    assert locals_at(info.value, t.block.code) == {"a": 1, "b": 2}
    assert locals_at(ValueError(), t.block.code) == {}
    assert "c" not in locals()


def test_an_error_in_a_nested_function() -> None:
    with pytest.raises(KeyError) as info:
        with Trace() as t:
            x = 1

            def fail() -> None:
                x = 2
                raise KeyError("k")

            fail()
    assert locals_at(info.value, t.block.code).keys() == {"x", "fail"}
    assert locals_at(info.value, t.block.code)["x"] == 1


# Shipping


def blocks_in_a_loop(n: int) -> list[Block]:
    found, weight = [], list(range(1000))
    for i in range(n):
        with Trace(run=False) as t:
            y = i + weight[1]
            name = "a text that is part of the code " * 3
        found.append(t.block)
    return found


def test_invokes_of_a_loop_share_one_code_object() -> None:
    blocks = blocks_in_a_loop(64)
    assert len({id(block.code) for block in blocks}) == 1
    assert [block.function()({})["y"] for block in blocks] == list(range(1, 65))
    one, all_ = (len(cloudpickle.dumps(b)) for b in (blocks[:1], blocks))
    assert all_ < one + 64 * 120
    back = pickle.loads(cloudpickle.dumps(blocks))
    assert len({id(block.code) for block in back}) == 1
    assert [block.function()({})["y"] for block in back] == list(range(1, 65))


def test_round_trip_to_a_process_without_the_file(tmp_path: Path) -> None:
    factor = 7
    names = exec_cell("""
        def fetch(trace, g):
            with trace(run=False) as t:
                x = g(2)
                y = 1 / (x - x)
            return t.block
    """)
    block = names["fetch"](Trace, lambda v: v * factor)
    (tmp_path / "block").write_bytes(cloudpickle.dumps(block))
    code = f"""
    import pickle, traceback
    from midstream.trace.block import locals_at
    block = pickle.load(open({str(tmp_path / "block")!r}, "rb"))
    try:
        block.function()({{}})
    except ZeroDivisionError as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        print(frame.lineno, frame.name, locals_at(e, block.code))
    """
    assert run_python("-c", textwrap.dedent(code)).strip() == "5 fetch {'x': 14}"


def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks_in_a_loop(1)
    data = ship([[BlockProgram(block, {})]]).programs
    assert unship(data, id)[0][0].block.function()({})["y"] == 1
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    with pytest.raises(TraceError, match=r"Python 3\.\d+ and this process runs 3\.99"):
        unship(data, id)


def test_runs_in_a_greenlet() -> None:
    with Trace(run=False) as t:
        x = [park(i) for i in range(3)]
    body = greenlet.greenlet(t.block.function())
    main = greenlet.getcurrent()
    parked = [body.switch({"park": main.switch})]
    while not body.dead:
        parked.append(body.switch(parked[-1] * 10 if isinstance(parked[-1], int) else None))
    assert parked == [0, 1, 2, {"x": [0, 10, 20]}]


# Invokes of one trace


def test_invokes_inside_a_compiled_block() -> None:
    v = 2
    with Outer() as tracer:
        names = []
        for i in range(3):
            with tracer.invoke(i), nullcontext(i) as n:
                x = n * v
                names.append(x.save())
        with tracer.invoke("b") as inv:
            y = inv
    assert names == []
    runs = [b.function() for b in tracer.blocks]
    assert [run({"__save__": lambda x: -x, "inv": 5}).get("x") for run in runs] == [0, 2, 4, None]
    assert names == [0, -2, -4]
    assert runs[3]({"inv": 5}) == {"y": 5}
    assert tracer.blocks[0].code is tracer.blocks[2].code
    assert [b.code.co_filename for b in tracer.blocks] == [__file__] * 4
    assert "__save__" not in tracer.blocks[0].captured


def test_a_name_of_one_invoke_is_read_by_another() -> None:
    with Outer() as tracer:
        with tracer.invoke("a"):
            h = 5
        with tracer.invoke("b"):
            x = h + 1

            class Reader:
                got = h

            y = (lambda: [h for _ in range(2)])(), Reader.got
    first, second = tracer.blocks
    assert link(tracer.blocks)
    first, second = pickle.loads(cloudpickle.dumps([first, second]))
    shared: dict[str, Any] = {}
    with pytest.raises(NameError, match=r"'h'.*barrier"):
        second.function()({}, shared)
    first.function()({}, shared)
    result = second.function()({}, shared)
    assert (result["x"], result["y"]) == (6, ([5, 5], 5))


def test_a_lent_name_is_seen_while_the_other_invoke_runs() -> None:
    with Outer() as tracer:
        with tracer.invoke("a"):
            h = 1
            pause()
            h = 2
            pause()
        with tracer.invoke("b"):
            x = h
    assert link(tracer.blocks)
    main, shared = greenlet.getcurrent(), {}
    body = greenlet.greenlet(lambda: tracer.blocks[0].function()({"pause": main.switch}, shared))
    seen = []
    for _ in range(2):
        body.switch()
        seen.append(tracer.blocks[1].function()({}, shared)["x"])
    assert seen == [1, 2]


def test_invokes_that_bind_the_same_name_do_not_meet() -> None:
    with Outer() as tracer:
        for i in range(3):
            with tracer.invoke(i):
                h = i
                x = h
    assert not link(tracer.blocks)
    assert [b.function()({}, {}) for b in tracer.blocks] == [{"h": i, "x": i} for i in range(3)]


def test_the_nearest_invoke_above_lends() -> None:
    with Outer() as tracer:
        for i in range(3):
            with tracer.invoke(i):
                h = i
        with tracer.invoke():
            x = h
        with tracer.invoke():
            h = 9
    assert link(tracer.blocks)
    shared: dict[str, Any] = {}
    results = [b.function()({}, shared) for b in tracer.blocks]
    assert results[3] == {"x": 2}


def test_a_second_run_of_a_cell_does_not_read_the_first_runs_values() -> None:
    source = """
    with outer as tracer:
        with tracer.invoke("a"):
            h = 5
        with tracer.invoke("b"):
            x = h
    """
    outer = Outer()
    exec_cell(source, outer=outer, h="of the first run", x=None)
    assert link(outer.blocks)
    assert [b.captured for b in outer.blocks] == [{}, {}]


def test_a_second_run_begins_as_the_first_where_a_name_was_not_saved() -> None:
    h = w = Unsaved("h")
    with Trace() as t:
        if t:
            h = 1
    assert t.block.captured == {} and h == 1
    h = Unsaved("h")
    with Trace(run=False) as reads:
        y = w
    with Trace(run=False) as binds:
        w = 2
    blocks = [reads.block, binds.block]
    assert link(blocks) and blocks[0].borrows == {"w": 1}
    shared: dict[str, Any] = {}
    blocks[1].function()({}, shared)
    assert blocks[0].function()({}, shared) == {"y": 2}
    with Trace(run=False) as alone:
        y = h
    with pytest.raises(UnsavedError):
        alone.block.function()({})["y"].mean()


def test_a_captured_name_is_not_taken_from_a_sibling() -> None:
    v = 1
    with Outer() as tracer:
        with tracer.invoke("a"):
            v = v + 1
        with tracer.invoke("b"):
            x = v
    assert not link(tracer.blocks)
    assert [b.function()({}) for b in tracer.blocks] == [{"v": 2}, {"x": 1}]


# Skipping


def test_the_body_does_not_run_in_place() -> None:
    ran = []
    with Trace(run=False):
        ran.append(1)
    with Trace(run=False): ran.append(2)  # fmt: skip  # noqa: E701
    with Trace(run=False):
        try:
            ran.append(3)
        except:  # noqa: E722
            ran.append(4)
        finally:
            ran.append(5)
    with Trace(run=False):
        while True:
            ran.append(6)
    with Trace(run=False):
        with Trace():
            ran.append(7)
    assert ran == []


def test_in_a_generator_with_the_with_in_a_try() -> None:
    def generate() -> Any:
        for i in range(3):
            try:
                with Trace():
                    assert i < 2, "i is 2"
                    x = i
            except AssertionError:
                x = "failed"
            yield x

    assert list(generate()) == [0, 1, "failed"]


def test_an_error_of_the_users_own_in_the_header_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        with Trace(run=False) as t:
            pass
        with nullcontext(1 / 0):
            pass
    assert t.block.assigned == frozenset()
    assert not skipped(ZeroDivisionError()) and not skipped(None)


def test_a_tracer_that_was_set_sees_the_lines_around() -> None:
    seen: list[str] = []
    me = sys._getframe()
    lines = Path(__file__).read_text().splitlines()

    def tracer(frame: FrameType, event: str, arg: Any) -> Any:
        if frame is me and event == "line":
            seen.append(lines[frame.f_lineno - 1].strip())
        return tracer

    before = sys.gettrace()
    me.f_trace = tracer
    sys.settrace(tracer)
    try:
        x = 1
        with Trace():
            y = x
            z = y
        after = z
        restored = sys.gettrace()
        local = me.f_trace
    finally:
        sys.settrace(before)
        me.f_trace = None
    assert restored is tracer and local is tracer and after == 1
    assert {"with Trace():", "after = z"} <= set(seen) and not {"y = x", "z = y"} & set(seen)


def test_no_tracer_is_left_behind() -> None:
    before = sys.gettrace()
    with Trace():
        x = 1
    assert (sys.gettrace(), x) == (before, 1)
    with Trace():
        pass
    assert sys.gettrace() is before


# Pushing


def test_push_into_function_frames() -> None:
    a, b, c = 1, 2, 3

    def closure() -> int:
        return b

    push(sys._getframe(), {"a": 10, "b": 20})
    assert (a, b, c, closure()) == (10, 20, 3, 20)


def test_push_into_module_and_class_frames() -> None:
    names = exec_cell(
        "push(sys._getframe(), {'a': 1})\nclass A:\n    push(sys._getframe(), {'b': 2})", push=push, sys=sys
    )
    assert (names["a"], names["A"].b) == (1, 2)


def test_skip_block_is_no_exception_that_users_catch() -> None:
    assert not issubclass(SkipBlock, Exception)
