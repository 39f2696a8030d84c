"""What each random body begins with: values and helpers that its templates use. `random_bodies.py` puts this text before the body."""

# ruff: noqa: F401 (a body may use any of them)

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import operator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


VA, VB, VC = normal(1, 256), normal(2, 256), normal(3, 256)
BANK, ENCODER, DECODER = normal(4, 3, 256), normal(5, 256, 8) / 16, normal(6, 8, 256) / 3
ARRAY = VB.numpy()
TABLE = {"a": [normal(7, 256), 2], "b": (normal(8, 256), "text")}
PAIRS = ((1, normal(9, 256)), (2, normal(10, 256)))
FLAG, COUNT, NAMES, CALLS = False, 0, ["x", "y"], []


class OwnError(Exception):
    pass


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass
class Found:
    value: object
    notes: list = dataclasses.field(default_factory=list)


def check(ok, text="not ok"):
    if not ok:
        raise OwnError(text)
    return ok


def unit(v):
    return v / (v.norm() + 1)


def unit_(v):
    v /= v.norm() + 1


def scale_(v, k=2.0):
    v *= k
    return v


def renew(k):
    global VC
    VC = VC * k


def counted(by=1):
    global COUNT
    COUNT += by
    return COUNT


@functools.lru_cache(maxsize=8)
def cached(n):
    CALLS.append(n)
    return n if n < 2 else cached(n - 1) + cached(n - 2)


def add(m, layer, v, k=1.0):
    m.layers_output[layer] += k * v


def replace(m, layer, fn):
    m.layers_output[layer] = fn(m.layers_output[layer])


@contextlib.contextmanager
def grown(v, k):
    v *= k
    yield v
    v += 1


class Swallow:
    def __init__(self, *kinds, then=None):
        self.kinds, self.then = kinds, then

    def __enter__(self):
        return self.then

    def __exit__(self, kind, error, tb):
        if self.then is not None:
            self.then.add_(1)
        return kind is not None and issubclass(kind, self.kinds)


class Box:
    made = 0

    def __init__(self, v):
        type(self).made += 1
        self.v = v

    def __add__(self, other):
        return self.v + other

    __radd__ = __add__

    def __iadd__(self, other):
        self.v += other
        return self

    def __call__(self, k):
        return self.v.mul_(k)

    def __getitem__(self, key):
        return self.v[key]

    def __setitem__(self, key, value):
        self.v[key] = value

    def __bool__(self):
        return self.made > 1

    @property
    def twice(self):
        self.v *= 2
        return self.v
