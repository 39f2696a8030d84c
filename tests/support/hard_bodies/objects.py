"""Bodies with classes: operators, descriptors, properties, data classes, enums."""

import abc
import dataclasses
import enum
import functools
import types
import typing

import torch


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


V, W = normal(1, 256), normal(2, 256)


class Vector:
    """Adds, in place or not, and counts how often."""

    count = 0

    def __init__(self, data):
        self.data = data

    def __add__(self, other):
        type(self).count += 1
        return other + self.data

    __radd__ = __add__

    def __iadd__(self, other):
        self.data += other
        return self

    def __matmul__(self, other):
        return (self.data @ other) / 256

    def __neg__(self):
        return Vector(-self.data)

    def __bool__(self):
        return bool(self.count)


def an_own_add(model, tracer):
    model.layers_output[2] = Vector(V.clone()) + model.layers_output[2]
    model.layers_output[3] = (-Vector(W.clone())) + model.layers_output[3]
    return Vector.count, model.layers_output[5]


def an_own_iadd(model, tracer):
    v = same = Vector(V.clone())
    v += W
    model.layers_output[3] += same.data
    return same is v, model.layers_output[5]


def an_own_bool(model, tracer):
    v = Vector(V.clone())
    v and model.steer([2], V)
    v + W
    v and model.steer([3], V)
    return bool(v), model.layers_output[5]


def an_own_matmul(model, tracer):
    model.layers_output[3] += (Vector(V.clone()) @ W) * W
    return model.layers_output[5]


class Normed:
    """A descriptor that gives unit vectors, and counts its reads."""

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner):
        instance.reads += 1
        value = getattr(instance, self.name)
        return value / value.norm()

    def __set__(self, instance, value):
        setattr(instance, self.name, value * 2)


class Steering:
    vector = Normed()

    def __init__(self, vector):
        self.reads = 0
        self.vector = vector

    @property
    def scaled(self):
        return self.reads * self.vector

    @staticmethod
    def half(v):
        return v / 2

    @classmethod
    def of(cls, *vectors):
        return cls(sum(vectors))

    def __call__(self, model, layer):
        model.layers_output[layer] += self.scaled


def a_descriptor(model, tracer):
    s = Steering(V)
    model.layers_output[2] += 5 * s.vector
    s.vector = W
    s(model, 3)
    return s.reads, model.layers_output[5]


def methods_of_the_class(model, tracer):
    s = Steering.of(V, W)
    model.layers_output[2] += s.vector
    model.layers_output[3] += Steering.half(s.scaled)
    return s.reads, model.layers_output[5]


class Cached:
    made = 0

    @functools.cached_property
    def vector(self):
        self.made += 1
        return self.made * V


def a_cached_property(model, tracer):
    cached = Cached()
    model.layers_output[2] += cached.vector
    model.layers_output[3] += cached.vector
    del cached.vector
    model.layers_output[4] += cached.vector
    return cached.made, model.layers_output[5]


class Base(abc.ABC):
    def __init_subclass__(cls, factor=1, **rest):
        super().__init_subclass__(**rest)
        cls.factor = factor

    @abc.abstractmethod
    def vector(self): ...

    def apply(self, model, layer):
        model.layers_output[layer] += self.factor * self.vector()


class Left(Base, factor=2):
    def vector(self):
        return V


class Right(Base, factor=-1):
    def vector(self):
        return W


class Both(Left, Right):
    factor = 3

    def vector(self):
        return super().vector() + Right.vector(self)


def subclasses(model, tracer):
    for layer, kind in enumerate((Left, Right, Both), 1):
        kind().apply(model, layer)
    return [each.__name__ for each in Both.__mro__[:3]], model.layers_output[5]


class Lazy:
    def __getattr__(self, name):
        if not name.startswith("layer"):
            raise AttributeError(name)
        found = int(name[5:]) * 0.1 * V
        setattr(self, name, found)
        return found

    def __getitem__(self, key):
        return getattr(self, f"layer{key}")

    def __contains__(self, key):
        return f"layer{key}" in vars(self)

    def __len__(self):
        return len(vars(self))


def attributes_on_demand(model, tracer):
    lazy = Lazy()
    model.layers_output[2] += lazy.layer3
    3 in lazy and model.steer([3], lazy[3])
    4 in lazy and model.steer([4], lazy[4])
    return len(lazy), hasattr(lazy, "other"), model.layers_output[5]


class Stack(list):
    def append(self, value):
        super().append(value * 2)


def a_list_of_its_own_kind(model, tracer):
    stack = Stack()
    stack.append(V)
    stack += [W]
    for layer, v in enumerate(stack, 2):
        model.layers_output[layer] += v
    return model.layers_output[5]


class Site(enum.Enum):
    EARLY = 1
    LATE = 4

    def write(self, model, v):
        model.layers_output[self.value] += v


def members_of_an_enum(model, tracer):
    for site in Site:
        site.write(model, V * site.value)
    return [site.name for site in Site], model.layers_output[5]


@dataclasses.dataclass
class Task:
    layer: int
    vector: torch.Tensor
    scale: float = 1.0
    seen: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.vector = self.vector * self.scale

    def run(self, model):
        model.layers_output[self.layer] += self.vector
        self.seen.append(self.layer)


class Pair(typing.NamedTuple):
    early: torch.Tensor
    late: torch.Tensor


def dataclasses_and_named_tuples(model, tracer):
    first = Task(2, V, 0.5)
    second = dataclasses.replace(first, layer=3, seen=[])
    for task in (first, second):
        task.run(model)
    pair = Pair(second.vector, model.layers_output[5])
    return first.seen, pair._replace(early=pair.early * 2), pair


def a_namespace(model, tracer):
    space = types.SimpleNamespace(layer=2, v=V.clone())
    space.v *= space.layer
    space.layer += 1
    model.layers_output[space.layer] += space.v
    return vars(space)["layer"], model.layers_output[5]


def a_class_made_in_the_body(model, tracer):
    class Local:
        total = torch.zeros(256)

        def __enter__(self):
            self.total += V
            return self

        def __exit__(self, *_):
            type(self).total = -self.total

    with Local() as local:
        model.layers_output[2] += local.total
    model.layers_output[3] += Local.total
    return model.layers_output[5]
