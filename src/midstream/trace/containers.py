"""The caller's containers and objects that a trace can reach, and how the trace leaves them.

    callers = Callers(block.captured)       # numbers them; pickled with the block
    entry = callers.states()                # in the engine, before the block runs on copies of them
    changes = Changes(callers, entry, saves)
    left = changes.left(values)             # plain data: the new contents by number
    put_back(left, callers)                 # in the caller's process: gives the caller's own objects these contents

A changed container comes back if it has a saved value in it. Its new content names the caller's other objects by their numbers. So each
of them keeps its identity, wherever the caller or the trace has put it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
    SimpleNamespace,
)
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from cloudpickle.cloudpickle import _extract_code_globals
from torch import nn

from midstream.errors import ChannelError, UnsendableError
from midstream.trace.saves import (
    ORIGINALS,
    Saves,
    closure_of,
    is_callers,
    is_imported,
    is_installed,
    is_written_by_caller,
    pickles_by_default,
)

_CONTAINERS = (list, dict, deque, set)
_LAYOUTS = (
    object,
    tuple,
    *_CONTAINERS,
    OrderedDict,
    defaultdict,
)  # classes in C whose instances have no other state than what is read here
_HEAP_TYPE = 1 << 9  # the flag of a class that is written in Python
_MOST_OBJECTS = 10_000  # that are numbered
_HASHED_BYTES = 1 << 20  # larger arrays are not checked for changes
_INNER = "[]"  # follows a container's name in the name of an object that is in the container
# Values that never change, and contain no others.
_ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, range, slice, type, CodeType, EllipsisType, NotImplementedType)
    + (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, property, staticmethod, classmethod)
)
_VALUES = _ATOMS - {type}
# Containers of these classes are made anew by name.
_MADE = {kind.__name__: kind for kind in (list, dict, deque, set, OrderedDict, defaultdict, Counter)}
_MADE_KINDS = frozenset(_MADE.values())
# The classes that a server may name as the factory of a defaultdict.
FACTORIES: dict[str, type] = {
    each.__name__: each for each in (list, tuple, set, frozenset, deque, dict, int, float, str)
}
# The types of a class's variables that are code.
_IN_CLASSES = (
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    type(functools.lru_cache(len)),
)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every torch module
_OWN = __name__.partition(".")[0]
T = TypeVar("T")


# Looking into objects. None of this runs an object's own code.


def is_container(value: Any) -> bool:
    """Whether it is a list, dict, deque or set."""
    return issubclass(type(value), _CONTAINERS)


def items_of(value: Any) -> list[Any] | None:
    """The values in a container or tuple; of a dict, first its keys. None for other objects."""
    kind = type(value)
    if issubclass(kind, dict):
        base = _dict_base(kind)
        return [*base.keys(value), *base.values(value)]
    for base in (list, tuple, deque, set, frozenset):
        if issubclass(kind, base):
            return [*base.__iter__(value)]
    return None


def contents(container: Any) -> Iterator[Any]:
    """The values in a container, at any depth of containers and tuples; at most 10,000."""
    seen, rest, remaining = {id(container)}, [container], _MOST_OBJECTS
    while rest:
        for each in reversed(items_of(rest.pop()) or ()):
            yield each
            if (remaining := remaining - 1) == 0:
                return
            if (is_container(each) or issubclass(type(each), tuple)) and id(each) not in seen:
                seen.add(id(each))
                rest.append(each)


def _dict_base(kind: type) -> Any:
    return OrderedDict if issubclass(kind, OrderedDict) else dict


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, a class or a Python module of the caller's, or the variables of a function; None for other objects."""
    kind = type(value)
    if kind in _MADE_KINDS:
        return {"default_factory": value.default_factory} if kind is defaultdict else None  # type: ignore[attr-defined]
    if kind is FunctionType:
        return None if is_imported(value) or is_installed(value.__code__.co_filename) else _variables(value)
    if issubclass(kind, type):
        return _without_code(value, _IN_CLASSES) if _has_variables(value) else None
    if kind is ModuleType:
        return _without_code(value, (FunctionType, type, ModuleType)) if _is_callers_module(value) else None
    if not (_has_own_state(kind) or issubclass(kind, _CONTAINERS)):
        return None
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # it has none
        found |= object.__getattribute__(value, "__dict__")
    for name, member in _members(kind).items():
        with contextlib.suppress(AttributeError):  # it has no value
            found[name] = member.__get__(value)
    return {n: v for n, v in found.items() if n not in _OF_MODULES} if issubclass(kind, nn.Module) else found


def _once_for_class(find: Callable[[type], T]) -> Callable[[type], T]:
    found: WeakKeyDictionary[type, T] = WeakKeyDictionary()

    @functools.wraps(find)
    def known(kind: type) -> T:
        if kind not in found:
            found[kind] = find(kind)
        return found[kind]

    return known


@_once_for_class
def _members(kind: type) -> dict[str, Any]:
    """The descriptors of the slots of a class."""
    found = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    return {n: each for n, each in found.items() if type(each) is MemberDescriptorType and n != "__dict__"}


@_once_for_class
def _is_callers(kind: type) -> bool:
    """Whether a class is the caller's own, and its instances are nothing but their attributes and items."""
    return is_callers(kind) and _is_plain(kind)


@_once_for_class
def _has_variables(kind: type) -> bool:
    """Whether a class is the caller's own, and has variables that the caller may change."""
    return is_written_by_caller(kind) and not issubclass(kind, enum.Enum)


@_once_for_class
def _has_own_state(kind: type) -> bool:
    """Whether a class is the caller's, or one of Python's library that leaves pickling to Python, and its instances are nothing but their
    attributes and items.
    """
    if kind is SimpleNamespace or _is_callers(kind):
        return True
    return _module(kind) in sys.stdlib_module_names and pickles_by_default(kind) and _is_plain(kind)


def _is_plain(kind: type) -> bool:
    return all(base in _LAYOUTS or base.__flags__ & _HEAP_TYPE for base in kind.__mro__) and kind not in _LAYOUTS


def _module(kind: type) -> str:
    """The top-level package of a class's module."""
    return str(kind.__module__).partition(".")[0]


def _variables(function: FunctionType) -> dict[str, Any]:
    """The variables from outside that a function uses, its own attributes, and its defaults."""
    code, names = function.__code__, function.__globals__
    given = code.co_varnames[: code.co_argcount][-len(function.__defaults__ or ()) :]
    return {
        **dict(zip(given, function.__defaults__ or (), strict=False)),
        **(function.__kwdefaults__ or {}),
        **{name: names[name] for name in _extract_code_globals(code) if name in names},
        **closure_of(function),
        **vars(function),
    }


def _without_code(owner: Any, code: tuple[type, ...]) -> dict[str, Any]:
    """The variables of a class or a Python module, without those that are code."""
    hidden = ("__", "_abc_impl")
    return {n: v for n, v in vars(owner).items() if not (n.startswith(hidden) or issubclass(type(v), code))}


def _is_callers_module(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not is_installed(file) and module.__name__.partition(".")[0] != _OWN


def _takes(owner: Any, name: str, known: Collection[str]) -> bool:
    """Whether an attribute of the caller's object can come back. `known`: the names of its attributes before the trace.

    Functions, modules and classes get no new attributes, because these could stand in the way of the caller's code.
    """
    kind = type(owner)
    if name.startswith("__") and name.endswith("__"):
        return False
    if name in known:
        return True
    if kind is FunctionType:
        return name in owner.__code__.co_freevars
    if kind is ModuleType or issubclass(kind, type) or attributes_of(owner) is None or kind in _MADE_KINDS:
        return False
    is_of_torch = issubclass(kind, nn.Module) and name in _OF_MODULES
    return not is_of_torch and (name in _members(kind) or bool(kind.__dictoffset__))


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    if type(owner) is FunctionType:
        if name in owner.__code__.co_freevars and owner.__closure__ is not None:
            owner.__closure__[owner.__code__.co_freevars.index(name)].cell_contents = value
        elif name in owner.__globals__ and name in _extract_code_globals(owner.__code__):
            owner.__globals__[name] = value
        else:
            vars(owner)[name] = value
    elif issubclass(type(owner), type):
        type.__setattr__(owner, name, value)
    elif (member := _members(type(owner)).get(name)) is not None:
        member.__set__(owner, value)
    else:  # not by `setattr`, which runs the setters of properties
        object.__getattribute__(owner, "__dict__")[name] = value


def _delete_attribute(owner: Any, name: str) -> None:
    if issubclass(type(owner), type):
        type.__delattr__(owner, name)
    elif (member := _members(type(owner)).get(name)) is not None:
        member.__delete__(owner)
    else:
        object.__getattribute__(owner, "__dict__").pop(name, None)


def _parts(name: str, value: Any, with_atoms: bool = False) -> Iterator[tuple[str, Any]]:
    """The objects that an object leads to, with their names. Without `with_atoms`, skips the items of a container that has only values
    such as numbers and texts.
    """
    kind, inner = type(value), name if name.endswith(_INNER) else f"{name}{_INNER}"
    if issubclass(kind, (MethodType, BuiltinFunctionType, MethodWrapperType)):
        yield inner, value.__self__
    elif kind is FunctionType and is_installed(value.__code__.co_filename):  # it may wrap the caller's functions
        around = [*closure_of(value).values(), *vars(value).values()]
        around += [each for part in around if type(part) is MappingProxyType for each in part.values()]
        yield from ((name, each) for each in around if type(each) is FunctionType)
    elif issubclass(kind, functools.partial):
        yield from ((inner, each) for each in (value.func, *value.args, *value.keywords.values()))
    else:
        items = items_of(value)
        if items is not None and (with_atoms or not _ATOMS.issuperset(map(type, items))):
            yield from ((inner, each) for each in items)
        yield from ((f"{name}.{each}", part) for each, part in (attributes_of(value) or {}).items())
        for base in value.__mro__ if issubclass(kind, type) else kind.__mro__:
            if base is not value and _has_variables(base):
                yield f"{name}.{base.__name__}", base
        if issubclass(kind, nn.Module):
            yield from ((f"{name}.{each}", part) for each, part in value._modules.items())


def _is_atom(value: Any) -> bool:
    kind = type(value)
    if kind in _VALUES or issubclass(kind, np.generic) or _module(kind) == _OWN:
        return True
    if kind is ModuleType:
        return not _is_callers_module(value)
    if kind is FunctionType:
        return is_imported(value)
    return issubclass(kind, type) and not _has_variables(value)


def _passes_on(value: Any) -> bool:
    """Whether it is only a way to other objects, and never changes itself."""
    if type(value) is FunctionType:
        return is_installed(value.__code__.co_filename)
    if issubclass(type(value), tuple):
        return not type(value).__dictoffset__  # it has no attributes
    kinds = (frozenset, MethodType, BuiltinFunctionType, MethodWrapperType, functools.partial)
    return issubclass(type(value), kinds)


def _reach(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and all that they lead to; at most 10,000 objects."""
    rest, seen = deque(values), set[int]()
    while rest and len(seen) < _MOST_OBJECTS:
        value = rest.popleft()
        yield value
        if not _is_atom(value) and id(value) not in seen:
            seen.add(id(value))
            rest.extend(part for _, part in _parts("", value, with_atoms=True))


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def all_is_saved(container: Any, saves: Saves) -> bool:
    """Whether a container has a saved value in it, and all of its tensors were saved."""
    every = list(contents(container)) if saves and is_container(container) else []
    saved = [value for value in every if saves.has(value) and saves.saved_for(value) is value]
    return bool(saved) and sum(map(_is_tensor, saved)) == sum(map(_is_tensor, every))


# States, which show changes.


def _state(value: Any) -> tuple[list[Any] | None, dict[str, Any] | None, Any]:
    """An object's items and attributes. If it has neither, a version, which differs once the object has changed."""
    items = None if issubclass(type(value), tuple) else items_of(value)
    attributes = attributes_of(value)
    return items, attributes, _version(value) if items is None and attributes is None else None


def _version(value: Any) -> Any:
    """Differs once a tensor, an array or an object of Python's library has changed. None if that is not known."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        # A trainable parameter is the caller's own on `LanguageModel`.
        is_unknown = value.is_inference() or (value.requires_grad and value.is_leaf)
        own = object.__getattribute__(value, "__dict__")
        return 0 if is_unknown else value._version, tuple(own), tuple(own.values())
    if issubclass(kind, np.ndarray) and not value.dtype.hasobject:
        return hash(value.tobytes()) if value.nbytes <= _HASHED_BYTES else None
    if issubclass(kind, np.ndarray) or _module(kind) in sys.stdlib_module_names or is_written_by_caller(kind):
        with contextlib.suppress(Exception):  # it cannot be pickled
            once, again = (_copied(value.__reduce_ex__(4)) for _ in range(2))
            return once if _same_version(once, again) else None  # some objects make new parts each time
    return None


def _copied(value: Any, depth: int = 8) -> Any:
    """A copy of lists, tuples, dicts and sets as tuples, so that it stays as it is when the object changes."""
    kind = type(value)
    if depth == 0 or kind not in (list, tuple, dict, set) or len(value) > _MOST_OBJECTS:
        return value
    items = (part for item in value.items() for part in item) if kind is dict else value
    return kind.__name__, tuple(_copied(each, depth - 1) for each in items)


def _differs(now: Any, before: Any) -> bool:
    items, attributes, version = now
    if items is not None and not _same_items(items, before[0]):
        return True
    if attributes is not None:
        old = before[1]
        return attributes.keys() != old.keys() or not _same_items(attributes.values(), old.values())
    return not _same_version(version, before[2])


def _same_items(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _same_version(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_same_version, one, other))
    return one is other or (type(one) in _ATOMS and type(one) is type(other) and bool(one == other))


# The caller's objects.


class Callers:
    """The caller's objects that code can reach from `values`, with numbers.

    Attributes:
        names: the name of each object: `found`, `self.found`, or `found[]` for an object in `found`.
        objects: the objects.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values: Mapping[str, Any] | None = values
        self._versions: dict[int, Any] = {}
        self.find()

    def find(self) -> None:
        """Number the objects that the values lead to now."""
        names, objects = list[str](), list[Any]()
        seen, rest = set[int](), deque((self._values or {}).items())
        while rest and len(seen) < _MOST_OBJECTS:
            name, value = rest.popleft()
            if _is_atom(value) or id(value) in seen:
                continue
            seen.add(id(value))
            if not _passes_on(value):
                names.append(name)
                objects.append(value)
            rest.extend(_parts(name, value))
        self.names, self.objects = names, objects

    def __getstate__(self) -> Any:
        if self._values is not None:
            self.find()
        return self.names, self.objects

    def __setstate__(self, state: Any) -> None:
        self._values, (self.names, self.objects) = None, state
        self._versions = {id(each): _version(each) for each in self.objects if _is_leaf(each)}

    @property
    def are_copies(self) -> bool:
        return self._values is None

    @property
    def named(self) -> dict[str, Any]:
        """The containers and the objects with attributes that have names of their own."""
        pairs = zip(self.names, self.objects, strict=True)
        return {name: each for name, each in pairs if not (name.endswith(_INNER) or _is_leaf(each))}

    def states(self) -> list[Any]:
        """The present state of each object."""
        return [_state(each) for each in self.objects]

    def changed(self, before: Sequence[Any]) -> list[int]:
        """The numbers of the objects that have changed."""
        return [i for i, each in enumerate(self.objects) if _differs(_state(each), before[i])]

    def group(self, number: int) -> str:
        """The name of an object, or of the one that it is in."""
        return self.names[number].removesuffix(_INNER)

    def numbers(self) -> dict[int, int]:
        """The number of each object by its id. Leaves that may differ from the caller's own are left out."""
        found = {id(each): number for number, each in enumerate(self.objects)}
        for key, version in self._versions.items():
            each = self.objects[found[key]]
            if version is None and not _is_tensor(each):
                del found[key]  # it may have changed
            elif not _same_version(_version(each), version):
                del found[key]
        return found


def _is_leaf(value: Any) -> bool:
    return not is_container(value) and attributes_of(value) is None


class Changes:
    """How a trace has changed the caller's objects.

    Args:
        entry: the states when the trace's code began.
        exempt: ids of objects that come back in another way.

    Attributes:
        mutated: the names of objects that have changed and do not come back.
        filled: the containers that come back, by name.
        bound: the saved values of attributes that the trace has set, as `owner.name`.
    """

    def __init__(self, callers: Callers, entry: Sequence[Any], saves: Saves, exempt: Collection[int] = ()) -> None:
        self._callers, self._saves = callers, saves
        self.mutated: list[str] = []
        self.filled: dict[str, Any] = {}
        self.bound: dict[str, Any] = {}
        self._attributes: dict[
            int, tuple[dict[str, Any], list[str]]
        ] = {}  # set and deleted ones, by the owner's number
        self._kept: list[int] = []  # numbers of the containers that come back
        groups: dict[str, list[int]] = {}
        for number in callers.changed(entry):
            if id(callers.objects[number]) not in exempt:
                groups.setdefault(callers.group(number), []).append(number)
        if not groups:
            return
        members: dict[str, list[int]] = {name: [] for name in groups}
        for number in range(len(callers.objects)):
            if (name := callers.group(number)) in members:
                members[name].append(number)
        self.mutated = [name for name in groups if not self._has_saved(map(callers.objects.__getitem__, members[name]))]
        if self.mutated and len(self.mutated) < len(groups):  # objects in one that comes back also come back
            back = [callers.objects[number] for name in members.keys() - self.mutated for number in members[name]]
            inside = set(map(id, _reach(filter(is_container, back))))
            self.mutated = [
                name for name in self.mutated if any(id(callers.objects[each]) not in inside for each in groups[name])
            ]
        leaves = set[int]()
        for name in [name for name in groups if name not in self.mutated]:
            for number in members[name]:
                self._keep(number, number in groups[name], entry[number][1] or {})
            leaves |= {id(callers.objects[number]) for number in groups[name] if _is_leaf(callers.objects[number])}
        for number, value in enumerate(callers.objects if leaves else ()):
            self._replace(number, value, leaves)

    def _has_saved(self, values: Iterable[Any]) -> bool:
        return bool(self._saves) and any(self._saves.has(each) for each in _reach(values))

    def _keep(self, number: int, has_changed: bool, before: Mapping[str, Any]) -> None:
        """Bring an object back. `before`: its attributes when the code began."""
        value, name = self._callers.objects[number], self._callers.names[number]
        if is_container(value):
            if has_changed:
                self._kept.append(number)
            if not name.endswith(_INNER):
                self.filled[name] = value
        attributes = attributes_of(value) or {}
        changed = {n: v for n, v in attributes.items() if n not in before or v is not before[n]}
        gone = [each for each in before if each not in attributes and _takes(value, each, before)]
        for each, new in list(changed.items()):
            if not _takes(value, each, before):
                self.mutated.append(f"{name}.{each}")
                del changed[each]
            elif self._saves.has(new):
                self.bound[f"{name}.{each}"] = self._saves.saved_for(new)
            elif any(map(_is_tensor, _reach([new]))) and not self._has_saved([new]):
                self.mutated.append(f"{name}.{each}")
                del changed[each]
        if changed or gone:
            self._attributes[number] = changed, gone

    def _replace(self, number: int, value: Any, leaves: Collection[int]) -> None:
        """Bring an object back if it holds one of the `leaves`: tensors and other objects that have changed."""
        if is_container(value) and any(id(each) in leaves for each in _reach(items_of(value) or ())):
            self._kept.append(number)
        found = {name: each for name, each in (attributes_of(value) or {}).items() if id(each) in leaves}
        if found:
            changed, gone = self._attributes.get(number, ({}, []))
            self._attributes[number] = {**changed, **found}, gone

    def left(self, values: Mapping[str, Any]) -> Any:
        """The new contents of the caller's objects as plain data, with the values by name that contain any of these objects.

        None if they contain none of the caller's objects, or if the code has run on the caller's own objects.
        """
        if not self._callers.are_copies:
            return None
        writer = _Writer(self._callers.numbers(), len(self._callers.objects))
        for number in dict.fromkeys([*self._kept, *self._attributes]):
            value = self._callers.objects[number]
            attributes, gone = self._attributes.get(number, ({}, []))
            writer.write(number, value if number in self._kept else None, attributes, gone)
        names = {name: writer.code(value, (name,)) for name, value in values.items() if not _is_tensor(value)}
        writer.finish()
        return (writer.heap, names) if writer.has_callers else None


# Plain data. In it, a tuple is a code, ("=", number) or ("()", class, items), and every other value stands for itself.


class _Writer:
    """Writes objects as plain data.

    A new object's number follows from the first place that refers to it: the number of the object there, and the index, key or attribute.
    So it does not depend on how many other new objects there are, and pipeline stages that are a step apart number an object alike.

    Attributes:
        heap: number -> (name of the kind, its class, items, attributes, names of deleted attributes).
        has_callers: whether there is any of the caller's objects in it.
    """

    def __init__(self, numbers: Mapping[int, int], count: int) -> None:
        self._numbers, self._count = dict(numbers), count
        self._rest = deque[Any]()  # new objects, without numbers of the caller's
        self._new: dict[int, Any] = {}
        self.heap: dict[int, Any] = {}
        self.has_callers = False

    def code(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _VALUES:
            return value
        if (number := self._numbers.get(id(value))) is not None:
            self.has_callers = self.has_callers or number < self._count
            return "=", number
        if issubclass(kind, (tuple, frozenset)):
            return self._frozen(value, place)
        is_object = _has_own_state(kind) and not (_is_atom(value) or issubclass(kind, nn.Module))
        if kind in _MADE_KINDS or is_object:
            number = self._numbers[id(value)] = self._number(place)
            self._new[number] = value
            self._rest.append((number, value))
            return "=", number
        return value

    def _number(self, place: tuple[Any, ...]) -> int:
        digest = hashlib.blake2b(repr(place).encode(), digest_size=6).digest()
        number = self._count + int.from_bytes(digest, "big")
        return number if number not in self._new else self._number((*place, None))

    def _frozen(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind, items = type(value), items_of(value) or []
        codes = [self.code(item, (*place, i)) for i, item in enumerate(items)]
        if kind is frozenset:
            return "{}", None, frozenset(codes)
        if kind is not tuple and _same_items(codes, items):
            return value
        return "()", None if kind is tuple else ORIGINALS.get(kind, kind), tuple(codes)

    def write(
        self, number: int, value: Any, attributes: Mapping[str, Any], gone: Sequence[str] = (), is_new: bool = False
    ) -> None:
        self.has_callers = self.has_callers or not is_new
        kind = type(value)
        items: Any = None
        if issubclass(kind, dict):
            items = {}
            for i, (key, each) in enumerate(_dict_base(kind).items(value)):
                place = key if type(key) in (str, bytes, int, float, bool, type(None)) else ("key", i)
                items[self.code(key, (number, "key", i))] = self.code(each, (number, "at", place))
        elif value is not None and is_container(value):
            codes = [self.code(each, (number, "at", i)) for i, each in enumerate(items_of(value) or ())]
            items = set(codes) if issubclass(kind, set) else codes
        name = next((name for name, known in _MADE.items() if kind is known), "")
        if is_new and kind is deque:
            attributes = {"maxlen": value.maxlen}
        parts = {each: self.code(part, (number, "attribute", each)) for each, part in attributes.items()}
        factory: Any = parts.get("default_factory")
        if issubclass(kind, defaultdict) and factory in FACTORIES.values():
            parts["default_factory"] = "class", factory.__name__  # a server sends no classes
        self.heap[number] = name, ORIGINALS.get(kind, kind) if is_new and not name else None, items, parts, [*gone]

    def finish(self) -> None:
        """Write the new objects that are referred to."""
        while self._rest:
            number, value = self._rest.popleft()
            self.write(number, value, attributes_of(value) or {}, is_new=True)


def put_back(left: Any, callers: Callers) -> dict[str, Any]:
    """Give the caller's objects the contents that a trace has left. Returns the values by name that contain any of them.

    Raises ChannelError, before it changes any object, for data that do not fit the objects: a server may have made them up.
    """
    heap, names, objects = _checked(left, callers.objects)

    def value(code: Any) -> Any:
        if type(code) is not tuple:
            return code
        if code[0] == "=":
            return objects[code[1]]
        if code[0] == "class":
            return FACTORIES[code[1]]
        if isinstance(code[1], UnsendableError):  # in place of the class of a named tuple
            return code[1]
        items = map(value, code[2])
        if code[0] == "{}":
            return frozenset(items)
        return tuple(items) if code[1] is None else tuple.__new__(code[1], items)

    # Dicts and sets last, since they ask their keys for hashes.
    for number in sorted(heap, key=lambda each: isinstance(heap[each][2], (dict, set))):
        name, _, items, attributes, gone = heap[number]
        there = objects[number]
        if isinstance(
            there, UnsendableError
        ):  # a server does not send classes; this is the error in place of an object
            continue
        for each, code in attributes.items():
            if (name, each) != ("deque", "maxlen"):
                _set_attribute(there, each, value(code))
        for each in gone:
            _delete_attribute(there, each)
        if items is not None:
            _fill(there, items, value)
    return {name: value(code) for name, code in names.items()}


def _checked(left: Any, own: Sequence[Any]) -> tuple[dict[int, Any], dict[str, Any], dict[int, Any]]:
    """The parts of what a trace has left, and the objects by number: the caller's `own`, and new ones, which are still empty."""

    def require(fits: Any, what: str) -> None:
        if not fits:
            raise ChannelError(
                f"What this trace left in its variables came back malformed, so they stay as they were: {what}."
            )

    def is_code(code: Any, as_key: bool = False) -> bool:
        if type(code) is not tuple:
            return True
        if len(code) == 2 and type(code[0]) is str and code[0] == "=":
            return (
                type(code[1]) is int and code[1] in objects and not (as_key and type(objects[code[1]]).__hash__ is None)
            )
        if len(code) != 3 or type(code[0]) is not str or code[0] not in ("()", "{}"):
            return False
        is_set, kind = code[0] == "{}", code[1]
        is_tuple = (
            kind is None or isinstance(kind, UnsendableError) or (isinstance(kind, type) and issubclass(kind, tuple))
        )
        return (
            is_tuple
            and type(code[2]) is (frozenset if is_set else tuple)
            and all(is_code(c, as_key or is_set) for c in code[2])
        )

    require(type(left) is tuple and list(map(type, left)) == [dict, dict], "not two dicts")
    heap, names = left
    objects: dict[int, Any] = dict(enumerate(own))
    shape = [str, dict, list]
    for number, entry in heap.items():
        require(type(number) is int and number >= 0, "an object's number")
        require(type(entry) is tuple and len(entry) == 5, "an object's parts")
        name, kind, items, attributes, gone = entry
        require([type(name), type(attributes), type(gone)] == shape, "an object's parts")
        require(all(type(each) is str for each in (*attributes, *gone)), "an attribute's name")
        if number >= len(own):
            is_class = not name and isinstance(kind, (type, UnsendableError))
            require(is_class or name in _MADE, f"a new object of kind {name!r}")
            longest = attributes.get("maxlen") if name == "deque" else None
            require(longest is None or (type(longest) is int and 0 <= longest <= sys.maxsize), "a deque's length")
            objects[number] = _made(name, kind, longest)
    for number, (name, _, items, attributes, gone) in heap.items():
        there = objects[number]
        if isinstance(there, UnsendableError):
            continue
        if items is not None:
            base = next((base for base in (dict, set) if issubclass(type(there), base)), list)
            require(is_container(there) and type(items) is base, f"the items of a {type(there).__name__}")
            require(all(map(is_code, items.values() if type(items) is dict else items)), "a reference to an object")
            require(type(items) is list or all(is_code(key, as_key=True) for key in items), "a key")
        known, is_new = attributes_of(there) or {}, number >= len(own)
        for each, code in attributes.items():
            may = (is_new and (not name or (name, each) == ("deque", "maxlen"))) or _takes(there, each, known)
            require(may, f"the attribute {each!r} of a {type(there).__name__}")
            is_factory = each == "default_factory" and isinstance(there, defaultdict)
            names_class = type(code) is tuple and len(code) == 2 and type(code[1]) is str and code[1] in FACTORIES
            require((is_factory and names_class and code[0] == "class") or is_code(code), f"the value of {each!r}")
        for each in gone:
            require(each in known and _takes(there, each, known), f"the deleted attribute {each!r}")
    for each, code in names.items():
        require(type(each) is str and is_code(code), "a saved value")
    return heap, names, objects


def _made(name: str, kind: Any, longest: int | None) -> Any:
    if name == "deque":
        return deque(maxlen=longest)
    if name or isinstance(kind, UnsendableError):
        return _MADE[name]() if name else kind
    bases = (OrderedDict, defaultdict, *_CONTAINERS, SimpleNamespace)
    base: Any = next((base for base in bases if issubclass(kind, base)), object)
    return base.__new__(kind)


def _fill(there: Any, items: Any, value: Any) -> None:
    """Replace the content of a container. If a key raises an error, the container stays as it was."""
    kind = type(there)
    if issubclass(kind, dict):
        base = _dict_base(kind)
        new = base((value(key), value(each)) for key, each in items.items())
        base.clear(there)
        for key, each in new.items():
            base.__setitem__(there, key, each)
    elif issubclass(kind, set):
        found = {value(each) for each in items}
        set.clear(there)
        set.update(there, found)
    elif issubclass(kind, list):
        list.__setitem__(there, slice(None), [value(each) for each in items])
    else:
        rows = [value(each) for each in items]
        deque.clear(there)
        deque.extend(there, rows)
