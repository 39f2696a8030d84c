"""What a trace needs of the pipeline that its model is one stage of. The engine has it; transformers has one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from midstream.trace.body import Body
    from midstream.trace.remote import Place
    from midstream.trace.visit import Key


class Fetch(Protocol):
    """A value that was asked for of another stage; `done` once it is here or will never be."""

    @property
    def done(self) -> bool: ...


class Stages(Protocol):
    """This stage among the others; see `ranks.stages`."""

    @property
    def index(self) -> int: ...

    @property
    def modules(self) -> Mapping[str, str]: ...

    def of(self, key: Key) -> int: ...

    def has(self, key: Key) -> bool: ...

    def begin_of(self, stage: int) -> int: ...

    def children_of(self, path: str) -> list[str]: ...

    def class_of(self, path: str) -> type[nn.Module]: ...

    def width_of(self, key: Key) -> int | None: ...

    def publish(self, body: Body, number: int, key: Key, value: Any) -> None: ...

    def refuse(self, body: Body, number: int, error: Exception) -> None: ...

    def silence(self, body: Body) -> None: ...

    def waive(self, stage: int, body: str, number: int) -> None: ...

    def fetch(self, place: Place) -> Any: ...

    def received(self, fetch: Any) -> Any: ...

    def wait_any(self, fetches: Iterable[Any]) -> None: ...
