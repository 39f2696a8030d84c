"""Bodies that fill the caller's containers and objects, as traces and as plain Python.

Each body is a name, the lines before the trace, and its own lines. `H(3)` is the output of layer 3, and `save` marks a value.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import textwrap
from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

HEAD = """
import argparse, collections, dataclasses, functools, itertools, random, string, uuid
from collections import Counter, OrderedDict, UserDict, UserList, ChainMap, defaultdict, deque
from types import SimpleNamespace

class Slots:
    __slots__ = ("rows", "last")

class Base:
    __slots__ = ("first",)

class Both(Base):
    def __init__(self):
        self.first, self.rest = [], {}

class Rows(list):
    pass

class Lens(torch.nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        self.rows, self.n, self.weight = [], 0, torch.nn.Parameter(torch.ones(2), requires_grad=False)
        if depth:
            self.inner = Lens(depth - 1)

class Probe:
    shared = []
    count = 0
    def __init__(self):
        self.found, self.calls = [], 0
    def keep(self, value):
        self.found.append(value)
        self.calls += 1

@dataclasses.dataclass
class Pair:
    left: object
    right: object

@dataclasses.dataclass(frozen=True)
class Frozen:
    rows: list
"""

BODIES: dict[str, tuple[str, str]] = {
    "a list": ("xs = []", "xs.append(save(H(3)))"),
    "a list that had values": (
        "old = torch.ones(3); xs = [old, 'a', (old, 2)]; same = xs[2]",
        "xs.append(save(H(3))); xs.insert(0, 5)",
    ),
    "an item replaced": ("xs = [1, 2, 3]", "xs[1] = save(H(3)); del xs[0]"),
    "a list that is cut": ("xs = [[1], [2], [3]]; inner = xs[2]", "xs[:2] = [save(H(3))]"),
    "a list sorted and reversed": (
        "xs = [3, 1, 2]; ys = [3, 1, 2]",
        "xs.sort(); xs.append(save(H(3))); ys.reverse(); ys.append(save(H(4)))",
    ),
    "a list in a dict with an alias": ("inner = []; d = {'x': inner}", "d['x'].append(save(H(3)))"),
    "an alias three deep": (
        "inner = []; d = {'x': ({'y': [inner]},)}; mid = d['x'][0]",
        "d['x'][0]['y'][0].append(save(H(3)))",
    ),
    "a list that takes an alias": ("inner = [1]; xs = []", "xs.append(inner); xs.append(save(H(3))); inner.append(2)"),
    "two names of one list": ("xs = []; ys = xs", "xs.append(save(H(3))); ys.append(save(H(4)))"),
    "an alias that leaves": ("inner = []; d = {'x': inner}", "d.pop('x').append(save(H(3))); d['y'] = save(H(4))"),
    "an alias that moves": ("inner = []; a = {'x': inner}; b = {}", "b['y'] = a.pop('x'); b['y'].append(save(H(3)))"),
    "a list in itself": ("xs = []; xs.append(xs)", "xs.append(save(H(3)))"),
    "two lists in each other": ("a = []; b = [a]; a.append(b)", "a.append(save(H(3))); b.append(save(H(4)))"),
    "Counter": ("c = Counter(a=1, b=2)", "c['b'] += 1; c['n'] = save(H(3)); c['z'] += 2"),
    "Counter.update": ("c = Counter('aab')", "c.update('abc'); c['h'] = save(H(3)); c.subtract('b')"),
    "defaultdict": ("d = defaultdict(list)", "d[3].append(save(H(3))); d[4].append(save(H(4))); d[3].append(1)"),
    "a nested defaultdict": (
        "d = defaultdict(lambda: defaultdict(list))",
        "d[3]['x'].append(save(H(3))); d[3]['y'].append(0)",
    ),
    "OrderedDict": (
        "d = OrderedDict(a=1, b=2, c=3)",
        "d.move_to_end('a'); d['h'] = save(H(3)); d.move_to_end('h', last=False)",
    ),
    "deleted keys": ("d = {'a': 1, 'b': 2, 'c': [3]}", "del d['a']; d['h'] = save(H(3)); d.pop('c')"),
    "a cleared dict": ("d = {'a': 1}; inner = d", "d.clear(); d['h'] = save(H(3))"),
    "reordered keys": ("d = {'a': 1, 'b': 2}", "d['a'] = d.pop('a'); d['h'] = save(H(3)); d['b'] = d.pop('b')"),
    "tuples as keys": ("d = {('a', 1): 0}", "d['b', 2] = save(H(3)); d[('a', 1)] = 5"),
    "a cleared list": ("xs = [1, 2]", "xs.clear(); xs.append(save(H(3)))"),
    "deque": ("q = deque([1, 2, 3], maxlen=3)", "q.append(save(H(3))); q.rotate(1)"),
    "a set": ("s = {1, 2}", "s.discard(1); s.add('x'); s.add(save(H(3)))"),
    "a set of texts": ("s = {'a', 'b'}; xs = []", "s.add(save('c')); xs.append(save(H(3)))"),
    "a frozenset in a list": ("xs = [frozenset({1})]", "xs.append(frozenset({2, 3})); xs.append(save(H(3)))"),
    "lists in a tuple": ("t = ([], {'x': []}); a, b = t", "t[0].append(save(H(3))); t[1]['x'].append(save(H(4)))"),
    "a named tuple": (
        "P = collections.namedtuple('P', 'a b'); p = P([], {})",
        "p.a.append(save(H(3))); p.b['x'] = save(H(4))",
    ),
    "UserDict": ("d = UserDict(a=1)", "d['h'] = save(H(3)); del d['a']"),
    "UserList": ("xs = UserList([1])", "xs.append(save(H(3))); xs.insert(0, 5)"),
    "ChainMap": ("a = {}; m = ChainMap(a, {'b': 1})", "m['h'] = save(H(3))"),
    "SimpleNamespace": (
        "n = SimpleNamespace(rows=[], k=0)",
        "n.rows.append(save(H(3))); n.k += 1; n.h = save(H(4)); del n.k",
    ),
    "slots": ("s = Slots(); s.rows = []; rows = s.rows", "s.rows.append(save(H(3))); s.last = save(H(4))"),
    "slots of a base class": (
        "s = Both(); first = s.first",
        "s.first.append(save(H(3))); s.rest['x'] = save(H(4)); s.more = 3",
    ),
    "an object": ("p = Probe(); found = p.found", "p.keep(save(H(3)))"),
    "a bound method": ("xs = []; keep = xs.append", "keep(save(H(3)))"),
    "a bound method beside its list": ("xs = []; keep = xs.append", "keep(save(H(3))); xs.append(save(H(4)))"),
    "a method of an object": ("p = Probe(); keep = p.keep", "keep(save(H(3)))"),
    "a method of a dict": ("d = {}; put = d.__setitem__", "put('h', save(H(3)))"),
    "a partial": ("d = {}; put = functools.partial(d.__setitem__, 'h')", "put(save(H(3)))"),
    "a partial of a list": ("xs = []; put = functools.partial(lambda into, v: into.append(v), xs)", "put(save(H(3)))"),
    "a closure": (
        "xs = []; n = 0\ndef keep(v):\n    xs.append(v)",
        "keep(save(H(3))); keep(save(H(4)))",
    ),
    "a closure that counts": (
        "xs = []; n = 0\ndef keep(v):\n    nonlocal n\n    n += 1\n    xs.append(v)",
        "keep(save(H(3))); keep(save(H(4)))",
    ),
    "a torch module": (
        "m = Lens(); rows = m.inner.rows",
        "m.inner.rows.append(save(H(3))); m.last = save(H(4)); m.n += 1",
    ),
    "a default": ("def keep(v, into=[]):\n    into.append(v)\nthere = keep.__defaults__[0]", "keep(save(H(3)))"),
    "an attribute of a function": (
        "def keep(v):\n    keep.rows.append(v)\nkeep.rows = []\nrows = keep.rows",
        "keep(save(H(3)))",
    ),
    "a list of a class": ("class C:\n    rows = []\nrows = C.rows", "C.rows.append(save(H(3)))"),
    "an attribute of a class": ("class C:\n    last = None\n    n = 0\nc = C()", "C.last = save(H(3)); C.n += 1"),
    "a class by its object": ("class C:\n    rows = []\nc = C(); rows = C.rows", "c.rows.append(save(H(3)))"),
    "a list of a base class": (
        "class A:\n    rows = []\nclass B(A):\n    pass\nb = B(); rows = A.rows",
        "b.rows.append(save(H(3)))",
    ),
    "a list of an exception's class": (
        "class E(Exception):\n    rows = []\nrows = E.rows",
        "E.rows.append(save(H(3)))",
    ),
    "a tuple with attributes": (
        "class T(tuple):\n    pass\nt = T(([], 1)); t.rows = []; rows = t.rows",
        "v = save(H(3)); t[0].append(v); t.rows.append(v); t.n = 1",
    ),
    "a list subclass": ("xs = Rows([1]); xs.name = 'a'", "xs.append(save(H(3))); xs.name = 'b'"),
    "a dataclass": ("p = Pair([], None); left = p.left", "p.left.append(save(H(3))); p.right = save(H(4))"),
    "a frozen dataclass": ("f = Frozen([]); rows = f.rows", "f.rows.append(save(H(3)))"),
    "a new object": ("xs = []", "xs.append(Pair(save(H(3)), [1]))"),
    "a new object with an alias": (
        "xs = []; ys = [0]",
        "xs.append(Pair(save(H(3)), ys)); ys.append(1); xs.append(xs[0])",
    ),
    "a new dict with an alias": ("xs = []; ys = [0]", "xs.append({'h': save(H(3)), 'y': ys, 'xs': xs})"),
    "a new defaultdict": ("xs = []", "d = defaultdict(list); d[1].append(save(H(3))); xs.append(d)"),
    "new containers": ("xs = []", "xs += [deque([save(H(3))], maxlen=2), OrderedDict(a=1), Counter('aa'), {1, 2}]"),
    "new lists in each other": ("xs = []", "a = [save(H(3))]; b = [a]; a.append(b); xs.append(a); xs.append(b)"),
    "a new namespace": (
        "n = SimpleNamespace(inner=SimpleNamespace(rows=[])); rows = n.inner.rows",
        "n.inner = SimpleNamespace(rows=[save(H(3))])",
    ),
    "a cached property": (
        "class C:\n    @functools.cached_property\n    def rows(self):\n        return []\nc = C(); xs = []",
        "c.rows.append(save(H(3))); xs.append(c.rows)",
    ),
    "a single dispatch": (
        "@functools.singledispatch\ndef keep(v):\n    xs.append(v)\nxs = []",
        "keep(save(H(3)))",
    ),
    "a wrapped function": (
        "def twice(f):\n    @functools.wraps(f)\n    def g(*a):\n        f(*a)\n        f(*a)\n    return g\n"
        "xs = []\n@twice\ndef keep(v):\n    xs.append(v)",
        "keep(save(H(3)))",
    ),
    "a new tuple": ("xs = []; ys = []", "xs.append(('pair', save(H(3)), ys))"),
    "the caller's tensor": ("v = torch.arange(3.0); xs = []; ys = [v]", "xs.append(v); xs.append(save(H(3)))"),
    "the caller's object in a new list": ("p = Probe(); xs = []", "xs.append([p, save(H(3))])"),
    "a value under a name, too": ("xs = []", "got = save(H(3)); xs.append(got)"),
    "a name of an inner list": ("d = {'x': []}", "got = d['x']; got.append(save(H(3)))"),
    "a saved pair with an alias": ("d = {}", "pair = save((d, save(H(3)))); d['h'] = pair[1]"),
    "one list saved by itself": ("xs = []; ys = [xs]", "save(xs); xs.append(H(3) + 0)"),
    "many values": (
        "xs = list(range(20000)); d = {i: [i] for i in range(300)}",
        "xs.append(save(H(3))); d[7].append(save(H(4)))",
    ),
    "several steps of a loop": (
        "xs = []; d = {}",
        "for i in range(2, 6):\n    v = save(H(i)); xs.append(v); d[i] = [v]",
    ),
    "an augmented list": ("d = {'x': [0]}; inner = d['x']", "d['x'] += [save(H(3))]"),
    "a swap": ("a = [1]; b = [2]; d = {'a': a, 'b': b}", "d['a'], d['b'] = d['b'], d['a']; d['a'].append(save(H(3)))"),
    "argparse.Namespace": ("n = argparse.Namespace(k=0)", "n.k += 1; n.h = save(H(3))"),
    "nothing changes": ("xs = [1]; d = {'x': xs}", "got = save(H(3)); len(xs), d"),
}
_numbers = itertools.count()


def made(before: str, body: str) -> ModuleType:
    """A module with `traced(model, save, prompt)` and `plain(h, save)`. Each returns its variables at the end."""
    lines = [HEAD, "def variables(given):", "    return {n: v for n, v in given.items() if n not in NOT_COMPARED}", ""]
    lines += ["def traced(model, save, prompt):", textwrap.indent(before, "    ")]
    lines += [
        "    with model.trace(prompt):",
        textwrap.indent(body.replace("H(", "model.layers_output.__getitem__("), " " * 8),
    ]
    lines += ["    return variables(locals())", ""]
    lines += [
        "def plain(h, save):",
        textwrap.indent(before, "    "),
        textwrap.indent(body.replace("H(", "h.__getitem__("), "    "),
    ]
    lines += ["    return variables(locals())", ""]
    text, module = "\n".join(lines), ModuleType("__main__")
    file = f"/container_bodies/{next(_numbers)}.py"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    vars(module).update(torch=torch, NOT_COMPARED=("model", "save", "prompt", "h", "i"))
    exec(compile(text, file, "exec", dont_inherit=True), vars(module))
    return module


def differences(expected: Any, found: Any) -> list[str]:
    """Where two graphs of objects differ: in types, values, order or identity."""
    wrong: list[str] = []
    theirs: dict[int, Any] = {}
    mine: dict[int, Any] = {}
    held: list[Any] = []

    def compare(a: Any, b: Any, at: str) -> None:
        held.extend((a, b))
        if type(a).__name__ != type(b).__name__:
            wrong.append(f"{at}: {type(a).__name__}, not {type(b).__name__}")
        elif isinstance(a, (int, float, str, type(None), range)):
            if a != b:
                wrong.append(f"{at}: {a!r}, not {b!r}")
        elif isinstance(a, type) and a.__module__ != "__main__":
            return
        elif id(a) in theirs or id(b) in mine:
            if theirs.get(id(a)) is not b or mine.get(id(b)) is not a:
                wrong.append(f"{at}: another object than at another place")
        else:
            if not isinstance(a, (tuple, frozenset)):
                theirs[id(a)], mine[id(b)] = b, a
            if isinstance(a, torch.Tensor):
                if a.shape != b.shape or (a - b.detach()).abs().max() > 1e-3 * a.abs().max():
                    wrong.append(f"{at}: another tensor")
                return
            parts = [_parts(each) for each in (a, b)]
            if [key for key, _ in parts[0]] != [key for key, _ in parts[1]]:
                wrong.append(f"{at}: {[key for key, _ in parts[0]]}, not {[key for key, _ in parts[1]]}")
                return
            for (key, one), (_, other) in zip(*parts, strict=True):
                compare(one, other, f"{at}.{key}")

    compare(expected, found, "")
    return wrong


def _parts(value: Any) -> list[tuple[Any, Any]]:
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        parts += [(f"key {i}", key) for i, key in enumerate(value)]
        parts += [(str(key) if not isinstance(key, torch.Tensor) else "", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple, deque)):
        parts += enumerate(value)
    elif isinstance(value, (set, frozenset)):
        parts += [
            (i, each) for i, each in enumerate(sorted(value, key=lambda each: (type(each).__name__, str(each)[:9])))
        ]
    elif isinstance(value, MethodType) or hasattr(value, "__self__"):
        parts += [("self", value.__self__)]
    elif isinstance(value, FunctionType) and value.__code__.co_filename == functools.__file__:
        return [("wrapped", value.__wrapped__)]
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [*enumerate(cells), *enumerate(value.__defaults__ or ()), *vars(value).items()]
    elif isinstance(value, functools.partial):
        parts += [("func", value.func), *enumerate(value.args)]
    if isinstance(value, type):
        hidden = (FunctionType, functools.cached_property)
        return [(n, v) for n, v in vars(value).items() if not (n.startswith("__") or isinstance(v, hidden))]
    if isinstance(value, deque):
        parts.append(("maxlen", value.maxlen))
    parts += sorted((n, v) for n, v in getattr(value, "__dict__", {}).items() if not n.startswith("_backward"))
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        parts += [(n, getattr(value, n)) for n in names if n != "__dict__" and hasattr(value, n)]
    return parts
