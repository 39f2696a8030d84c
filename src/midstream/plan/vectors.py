"""What edits add, write or project on: vectors given with the plan, and names of vectors that the engine holds.

Named vectors come from safetensors files, which hold numbers and nothing that runs:

    vectors = load_vectors("calm.safetensors")
    model.set_vectors(vectors)
    model.generate(prompts, plan=Steer("resid_post", layers=14, vector="calm", scale=2.0))
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields

DIGEST_BYTES = 16


def digest(data: bytes) -> str:
    """blake2b of 16 bytes, in hexadecimal: what vectors, plans and KV blocks are told apart by."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, eq=False, repr=False)
class Vector:
    """A vector of float32, by value: equal if all bits are.

    Attributes:
        data: `[hidden]`, little-endian float32, read-only; a copy of what was given (a tensor of any float or whole-number type on
            any device, a numpy array, a list). Raises PlanError for NaN, infinity, any other shape.
        field: what to call it in messages.
    """

    data: np.ndarray
    field: str = "vector"

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", fields.finite_float32(self.field, self.data))

    @cached_property
    def digest(self) -> str:
        return digest(self.data.tobytes())

    @property
    def width(self) -> int:
        return self.data.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Vector([{self.width}], norm {np.linalg.norm(self.data):.4g}, {self.digest[:8]})"

    def __reduce__(self) -> Any:
        return Vector, (self.data, self.field)


@dataclass(frozen=True)
class Named:
    """A vector that the engine holds under a name.

    Attributes:
        digest: the `Vector.digest` of what the engine has under that name, once somebody looked. It keys the prefix cache, so an
            engine sets it itself (`values.with_digests`) and trusts nobody's.
    """

    name: str
    digest: str | None = None

    def __post_init__(self) -> None:
        fields.text("a named vector's name", self.name)
        if self.name == "zeros":
            raise PlanError(
                "A vector cannot be named 'zeros': Patch.source='zeros' means the value 0. Give it another name."
            )
        given = self.digest
        if given is not None and not (isinstance(given, str) and _is_digest(given)):
            raise fields.refuse("Named.digest", fields.shown(given), f"{2 * DIGEST_BYTES} hexadecimal digits or None")


def _is_digest(given: str) -> bool:
    return len(given) == 2 * DIGEST_BYTES and set(given) <= set("0123456789abcdef")


@dataclass(frozen=True)
class Zeros:
    """The value 0, as a source of `Patch`."""


def as_vector_or_name(
    field: str, value: Any, shape: Callable[[np.ndarray, str], np.ndarray] | None = None
) -> Vector | Named:
    """What a user gives as a vector: numbers `[hidden]`, or a name. With `shape`, which checks the numbers, booleans are 1 and 0."""
    if isinstance(value, Named):
        return value
    if isinstance(value, str) and value:
        return Named(value)
    if value is None or isinstance(value, str):
        raise fields.refuse(field, fields.shown(value), "numbers of shape [hidden], or a name")
    if shape is None:
        return as_vector(field, value)
    data = value.data if isinstance(value, Vector) else fields.finite_float32(field, value, booleans=True)
    shaped = shape(data, field)
    return value if isinstance(value, Vector) and shaped is data else Vector(shaped, field)


def as_unit(vector: np.ndarray, field: str) -> np.ndarray:
    """The vector at length 1. Raises PlanError for zero."""
    unit = fields.unit(vector)
    if unit is None:
        raise fields.refuse(field, "zero", "a vector with a direction")
    return unit


def as_mask(mask: np.ndarray, field: str) -> np.ndarray:
    """The mask as it is. Raises PlanError for numbers beyond 0 and 1."""
    if mask.min() < 0 or mask.max() > 1:
        raise fields.refuse(field, f"from {mask.min():g} to {mask.max():g}", "numbers from 0 to 1")
    return mask


def is_zero(vector: object) -> bool:
    """Whether it is known to be all zeros; a name is not."""
    return isinstance(vector, Vector) and not vector.data.any()


def load_vectors(path: str | os.PathLike[str]) -> dict[str, Vector]:
    """The vectors of a safetensors file: every tensor in it, each of shape `[hidden]` and a floating dtype.

    Raises PlanError for a file that is none, or a tensor of another shape or dtype, or with NaN or infinity.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(path), "pt") as file:  # numpy has no bfloat16
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{os.fspath(path)!r} cannot be read as a safetensors file: {error}.") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise fields.refuse(f"{os.fspath(path)}: {name!r}", fields.shown(tensor), "a floating dtype")
        Named(name)
    return {name: Vector(tensor, f"{os.fspath(path)}: {name!r}") for name, tensor in tensors.items()}


def save_vectors(vectors: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write vectors `[hidden]` (Vector, tensor, array or list) as float32 to a safetensors file, whole or not at all."""
    from safetensors.numpy import save

    held = {Named(name).name: as_vector(f"vectors[{name!r}]", value).data for name, value in vectors.items()}
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(save(held))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def as_vector(field: str, value: Any) -> Vector:
    return value if isinstance(value, Vector) else Vector(value, field)
