"""Final edits act after all other edits at their site, and limit where a plan may have other edits.

    model.plan = Plan([Clamp("resid_post", direction=d, low=0, high=0)], final="later")

The class of a final edit derives from the class of its kind and has a higher `order`. So a final edit has the fields, checks and arithmetic
of its kind, and equals no edit that is not final. In the wire form, it has the key `final`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.ops.edit import Edit, changed
from midstream.sites import Point, comes_before

Final = Literal["later", "all"]
FINALS: tuple[Final, ...] = ("later", "all")
_AFTER_ALL = 1 << 20  # more than the order of any kind
# A point; and whether the edit acts on the attention that computes the point's value, not on the value itself.
_Place = tuple[Point, bool]


class _FinalEdit:
    """The first base of every class of final edits; the second is the class of the kind."""

    final: ClassVar[Final]

    def effect(self) -> tuple[Any, ...]:
        return self.final, *super().effect()  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"final {super().__repr__()}"

    def __reduce__(self) -> Any:
        return made_final, (not_final(cast("Edit", self)), self.final)


@functools.cache
def _class_of(kind: type[Edit], final: Final) -> type[Edit]:
    given = {"final": final, "order": kind.order + _AFTER_ALL, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_FinalEdit, kind), given)


def made_final(edit: Edit, final: Final) -> Edit:
    """The edit as a final one."""
    return _of_class(edit, _class_of(type(not_final(edit)), final))  # type: ignore[arg-type]


def not_final(edit: Edit) -> Edit:
    """The edit as one that is not final."""
    return edit if edit.final is None else _of_class(edit, type(edit).__mro__[2])


def _of_class(edit: Edit, kind: type[Edit]) -> Edit:
    made = object.__new__(kind)
    made.__dict__.update(edit.__dict__)
    return made


def check_final(edits: Sequence[Edit], num_layers: int) -> None:
    """Raise PlanError if an edit could undo what final edits do, or if the final edits allow no other edits.

    An edit may act on values that the model computes before all values that final edits change or read. It may also act at a site and
    layer where all final edits that may have acted before act again. It may act nowhere else: later values carry the changes of final
    edits, and attention carries them on from earlier positions, so the rule does not depend on positions and phases.

    Args:
        edits: all edits of one plan.
    """
    final, others = list[Edit](), list[Edit]()
    for edit in edits:
        (others if edit.final is None else final).append(edit)
    if not (final and others):
        return
    if any(edit.final == "all" for edit in final):
        raise PlanError(
            "The engine-wide plan is final, and allows no edits of requests. Captures and probes are allowed.",
            field=others[0].label("site"),
        )
    acts: dict[_Place, set[Hashable]] = {}
    for edit in final:
        plain = not_final(edit)
        does = changed(plain, layer=0) if plain.layer_field == "layer" else plain.at(())
        for place in _places(edit, num_layers):
            acts.setdefault(place, set()).add(does)
        for point in edit.further:  # an edit there, or later, would act after the final edit has read the value
            acts.setdefault((point, True), set()).add(object())
    for place, other in {place: edit for edit in others for place in _places(edit, num_layers)}.items():
        again = acts.get(place, set())
        undone = next((each for each, does in acts.items() if not (_is_before(place, each) or does <= again)), None)
        if undone is not None:
            (site, layer), _ = place
            raise PlanError(
                f"{type(other).__name__} at {site} of layer {layer} could undo the final edits of the engine-wide plan at {undone[0][0]} "
                f"of layer {undone[0][1]}. A request may edit values that the model computes before all final edits, and the sites and "
                "layers where all of them act again.",
                field=other.label("site"),
            )


def _places(edit: Edit, num_layers: int) -> Iterator[_Place]:
    for layer in edit.layers_in(num_layers):
        yield (edit.site, layer), edit.at_attention


def _is_before(one: _Place, other: _Place) -> bool:
    """Whether every model computes `one` before `other`."""
    if one[0] == other[0]:
        return one[1] and not other[1]
    return comes_before(one[0], other[0])


def checked_final(place: str, given: Any) -> Final:
    """A value of the field `final`. Raises PlanError."""
    return fields.one_of(place, given, FINALS)  # type: ignore[return-value]
