"""The operands of edits: vectors, names of vectors that the engine holds, and recorded runs.

Named vectors come from safetensors files, which contain numbers and no code:

    vectors = load_vectors("calm.safetensors")
    model.set_vectors(vectors)
    model.generate(prompts, plan=Steer("resid_post", layers=14, vector="calm", scale=2.0))
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.sites import LAYER_SITES

DIGEST_BYTES = 16


def digest(*parts: bytes) -> str:
    """The blake2b hash of the concatenated parts: 16 bytes in hexadecimal. It identifies vectors, plans and KV blocks."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(part)
    return found.hexdigest()


class ByDigest:
    """Base of values that are equal if their digests are."""

    @property
    def digest(self) -> str:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, eq=False, repr=False)
class Vector(ByDigest):
    """A vector of float32. Vectors are equal if all their bits are.

    Attributes:
        data: `[hidden]`, little-endian float32, read-only; a copy of the given tensor (of any float or integer type, on any device), numpy
            array or list. Raises PlanError for NaN, infinity, and any other shape.
        field: its name in messages.
    """

    data: np.ndarray
    field: str = "vector"

    def __post_init__(self) -> None:
        fields.settle(self, data=_finite_float32(self.field, self.data))

    @classmethod
    def known(cls, data: np.ndarray, digest: str) -> Vector:
        """A vector with checked numbers, read-only float32 `[hidden]`, of this digest."""
        made = object.__new__(cls)
        made.__dict__.update(data=data, digest=digest)
        return made

    @cached_property
    def digest(self) -> str:
        return digest(self.data.tobytes())

    @property
    def width(self) -> int:
        return self.data.size

    def __repr__(self) -> str:
        return f"Vector([{self.width}], norm {np.linalg.norm(self.data):.4g}, {self.digest[:8]})"

    def __reduce__(self) -> Any:
        return Vector, (self.data, self.field)


@dataclass(frozen=True)
class Named:
    """A vector that the engine holds under a name.

    Attributes:
        digest: the `Vector.digest` of the engine's vector; None if it is unknown. It keys the prefix cache, so the engine sets it
            (`values.with_digests`) and ignores a given one.
    """

    name: str
    digest: str | None = None

    def __post_init__(self) -> None:
        fields.name("a named vector's name", self.name)
        if self.name == "zeros":
            raise PlanError(
                "A vector cannot be named 'zeros': Patch.source='zeros' means the value 0. Give it another name."
            )
        given = self.digest
        if given is not None and not (
            isinstance(given, str) and re.fullmatch(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}", given)
        ):
            raise fields.refuse("Named.digest", fields.shown(given), f"{2 * DIGEST_BYTES} hexadecimal digits or None")


@dataclass(frozen=True)
class Zeros:
    """The value 0, as a source of `Patch`."""


def as_vector_or_name(
    field: str, value: Any, shape: Callable[[np.ndarray, str], np.ndarray] | None = None
) -> Vector | Named:
    """A vector in any form that users may give: numbers `[hidden]`, or a name. `shape` checks and changes the numbers; with it, booleans
    are 1 and 0.
    """
    if isinstance(value, Named):
        return value
    if isinstance(value, str) and value:
        return Named(value)
    if value is None or isinstance(value, str):
        raise fields.refuse(field, fields.shown(value), "numbers of shape [hidden], or a name")
    if shape is None:
        return as_vector(field, value)
    data = value.data if isinstance(value, Vector) else _finite_float32(field, value, booleans=True)
    shaped = shape(data, field)
    return value if isinstance(value, Vector) and shaped is data else Vector(shaped, field)


def as_unit(vector: np.ndarray, field: str) -> np.ndarray:
    """The vector at length 1, float32; itself if its length is 1 up to rounding. Raises PlanError for zero."""
    exact = vector.astype(np.float64)
    length = float(np.linalg.norm(exact))
    if length == 0.0:
        raise fields.refuse(field, "zero", "a vector with a direction")
    return vector if abs(length - 1.0) < 1e-6 else (exact / length).astype(np.float32)


def as_mask(mask: np.ndarray, field: str) -> np.ndarray:
    """The mask itself. Raises PlanError for numbers outside of 0 to 1."""
    if mask.min() < 0 or mask.max() > 1:
        raise fields.refuse(field, f"from {mask.min():g} to {mask.max():g}", "numbers from 0 to 1")
    return mask


def at_heads(vector: Any, heads: Sequence[int], head_dim: int, width: int, field: str) -> Vector:
    """The vector `[width]` that has these numbers at `heads`, and 0 at the other heads.

    Args:
        vector: `[head_dim]`, the same for each of the heads; or `[width]`, of which the other heads' numbers are left out.

    Raises:
        PlanError: it has another width.
    """
    given = np.asarray(vector, np.float32)
    if given.shape not in ((head_dim,), (width,)):
        raise fields.refuse(field, f"of shape {list(given.shape)}", head_widths(head_dim, width))
    found = np.zeros((width // head_dim, head_dim), np.float32)
    rows = list(heads)
    found[rows] = given if given.size == head_dim else given.reshape(found.shape)[rows]
    found.setflags(write=False)
    return Vector.known(found.reshape(-1), digest(found.tobytes()))


def head_widths(head_dim: int, width: int) -> str:
    """The widths that an operand of an edit with `head` may have, for messages."""
    return f"{head_dim}, the width of a head, or {width}, that of all heads side by side"


def is_zero(vector: object) -> bool:
    """Whether the vector is known to be zero; false for a name."""
    return isinstance(vector, Vector) and not vector.data.any()


def load_vectors(path: str | os.PathLike[str]) -> dict[str, Vector]:
    """The vectors of a safetensors file: every tensor in it, each of shape `[hidden]` and a floating dtype.

    Raises PlanError for any other file, and for a tensor of another shape or dtype, or with NaN or infinity.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(path), "pt") as file:  # numpy has no bfloat16
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{os.fspath(path)!r} cannot be read as a safetensors file: {error}.") from error
    return _vectors(tensors, os.fspath(path))


def read_vectors(data: bytes, place: str) -> dict[str, Vector]:
    """The vectors in the bytes of a safetensors file, as `load_vectors`; `place` names them in messages."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise PlanError(f"{place} is not a safetensors file: {error}.") from error
    return _vectors(tensors, place)


def _vectors(tensors: Mapping[str, Any], place: str) -> dict[str, Vector]:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise fields.refuse(f"{place}: {name!r}", fields.shown(tensor), "a floating dtype")
        Named(name)
    return {name: Vector(tensor, f"{place}: {name!r}") for name, tensor in tensors.items()}


def written_vectors(vectors: Mapping[str, Any]) -> bytes:
    """Vectors `[hidden]` (Vector, tensor, array or list) as the bytes of a safetensors file, float32."""
    from safetensors.numpy import save

    return save({Named(name).name: as_vector(f"vectors[{name!r}]", value).data for name, value in vectors.items()})


def save_vectors(vectors: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write vectors `[hidden]` (Vector, tensor, array or list) as float32 to a safetensors file, completely or not at all."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(written_vectors(vectors))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def as_vector(field: str, value: Any) -> Vector:
    return value if isinstance(value, Vector) else Vector(value, field)


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run, as `model.record(prompt, ...)` returns it; a source of `Patch`.

    Attributes:
        name: the user's name for it.
        id: unique over engines and time.
        prompt_token_ids: the prompt.
        sites, layers, positions: the run has a row for each combination; positions count from the prompt's start, ascending.
    """

    name: str
    id: str
    prompt_token_ids: tuple[int, ...]
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        fields.name("RecordedRun.name", self.name)
        fields.text("RecordedRun.id", self.id)
        if any(not isinstance(site, str) or site not in LAYER_SITES for site in self.sites):
            raise fields.refuse("RecordedRun.sites", fields.shown(self.sites), ", ".join(LAYER_SITES))
        for name in ("prompt_token_ids", "layers", "positions"):
            checked = tuple(fields.integer(f"RecordedRun.{name}", item, 0) for item in getattr(self, name))
            fields.settle(self, **{name: checked if name == "prompt_token_ids" else tuple(sorted(checked))})
        fields.settle(self, sites=tuple(self.sites))

    def __repr__(self) -> str:
        return f"RecordedRun({self.name!r}, {len(self.prompt_token_ids)} tokens, {list(self.sites)}, {len(self.layers)} layers)"


def _finite_float32(field: str, value: Any, *, booleans: bool = False) -> np.ndarray:
    """A tensor, an array or a list `[hidden]` or `[1, hidden]` as a read-only float32 copy `[hidden]`.

    Args:
        booleans: whether True and False count as 1 and 0, for masks.
    """
    allowed = "numbers of shape [hidden]"
    array = _array(field, value, allowed)
    if array.dtype.kind not in ("fiub" if booleans else "fiu"):
        raise fields.refuse(field, fields.shown(value), allowed)
    if array.ndim == 2 and array.shape[0] == 1:  # one captured row
        array = array[0]
    if array.ndim != 1 or not array.size:
        rows = ", such as x[0] or x.mean(0). For another vector at each layer, give a list with an intervention for each layer"
        hint = rows if array.ndim == 2 else ""
        raise fields.refuse(field, f"of shape {list(array.shape)}", f"shape [hidden]{hint}")
    for what, wrong in (("NaN", np.isnan(array)), ("infinity", np.isinf(array))):
        if wrong.any():
            raise fields.refuse(field, f"{what} at index {int(wrong.argmax())}", "finite numbers")
    with np.errstate(over="ignore"):
        found = array.astype("<f4")
    if not np.isfinite(found).all():
        index = int((~np.isfinite(found)).argmax())
        raise fields.refuse(field, f"{array[index]:g} at index {index}", "numbers that float32 can hold")
    found.setflags(write=False)
    return found


def _array(field: str, value: Any, allowed: str) -> np.ndarray:
    try:
        if hasattr(value, "detach"):  # a tensor; this check does not import torch
            value = value.detach().cpu()
            return np.asarray(value.double().numpy() if value.is_floating_point() else value.numpy())
        if isinstance(value, np.ndarray) or (isinstance(value, (list, tuple)) and len(value)):
            return np.asarray(value)
    except Exception as error:  # ragged lists, meta tensors and arrays of objects have errors of their own
        raise fields.refuse(field, fields.shown(value), allowed) from error
    raise fields.refuse(field, fields.shown(value), allowed)
