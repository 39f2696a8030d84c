"""Recordings of bodies that fill the caller's containers, without an engine."""

from __future__ import annotations

from types import FrameType
from typing import Any

import pytest
from recorded import LENGTH, MODEL, checked

from midstream.client.tracing import BlockContext
from midstream.lowering.taping import lower_trace
from midstream.lowering.tiers import TapedCode
from midstream.runtime.request import Tier
from midstream.trace.block import Block
from midstream.trace.code import LEFT, BlockProgram
from midstream.trace.shipping import ship


class Named:
    """The model, as blocks name it."""

    def __midstream_reference__(self) -> Any:
        return ("model",)


class Kept(BlockContext):
    """`with Kept(programs):`, whose block becomes a program."""

    def __init__(self, programs: list[BlockProgram], *saved: str) -> None:
        super().__init__()
        self._programs, self._names = programs, saved

    def _captured(self, block: Block, frame: FrameType) -> None:
        self._programs.append(BlockProgram(block, {}, [*self._names]))


@pytest.mark.parametrize("saved", [(), ("xs",)])
@pytest.mark.parametrize("layers", [(1, 2), (2, 1), (1, 1)])
def test_two_invokes_append_to_one_list_from_different_layers(saved, layers):
    """Seen failing with KeyError, as each recording kept the list itself, into which the other one put its values."""
    model: Any = Named()
    programs: list[BlockProgram] = []
    xs, first, second = ["before"], *layers
    with Kept(programs, *saved):
        xs.append(model.layers_output[first].save())
    with Kept(programs, *saved):
        xs.append(model.layers_output[second].save())
    each = [[program] for program in programs]
    lowering = lower_trace(each, ship(each), MODEL, [LENGTH, LENGTH], [1, 1])
    assert lowering.tier is Tier.BEHIND and not any(one.reason for one in lowering.each)


def test_a_recording_has_the_containers_as_its_own_run_left_them():
    """The second recording fills the same list. Seen failing with both values in it, as the caller's list then had."""
    model: Any = Named()
    programs: list[BlockProgram] = []
    xs = ["before"]
    d = {"x": xs}
    with Kept(programs):
        d["x"].append(model.layers_output[1][-1].save())
    (found,) = TapedCode.of([programs], ship([programs]), MODEL).lowered([LENGTH], [1])
    values = found.recordings[-1].outcome.values
    assert found.tier is Tier.CLIENT and len(values["d"]["x"]) == 2
    heap, _ = values[LEFT]
    (number,) = heap
    assert programs[0].block.callers.objects[number] is xs and len(heap[number][2]) == 2


def axis_put_back(model):
    last = model.layers_output[2][-1].unsqueeze(0)
    last[0] *= 2


def axis_put_back_and_the_last(model):
    last = model.layers_output[2][-1:].squeeze(0).unsqueeze(0)
    last[-1] += 1.0
    return last


@pytest.mark.parametrize("body", [axis_put_back, axis_put_back_and_the_last])
def test_a_row_whose_axis_has_been_put_back_is_written(body):
    """Seen failing with TypeError: 'int' object is not subscriptable."""
    assert checked(body).tier is not Tier.FORWARD


PLACE = 2


def test_equal_blocks_of_several_requests_are_one_plan():
    """Seen failing where the copies of their variables were compared by which equal texts in them are one object."""
    model: Any = Named()
    programs: list[BlockProgram] = []
    for _ in range(5):
        with Kept(programs):
            model.layers_output[PLACE][:] += 0.5
    each = [[program] for program in programs]
    lowering = lower_trace(each, ship(each), MODEL, [LENGTH] * 5, [3] * 5)
    assert lowering.tier is Tier.PLAN, [one.reason for one in lowering.each]
