"""Where the residual stream enters and leaves a block: as one tensor, or as two whose sum it is.

What decides is the next consumer. A block may return several tensors of the stream's shape; those that the next block
takes, and uses together, are the stream. StableLM returns a second tensor that nobody takes, and Command-R one that is
taken and ignored: summing would count it twice.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from midstream.arch.probe import Call, Leaf, Probe
from midstream.errors import ArchitectureError
from midstream.sites import Binding, Ref, follow

PREFERRED = ("hidden_states", "hidden_state", "x", "inputs")


@dataclass(frozen=True)
class Layout:
    """The leaves of a block's call that hold the stream; `*_second` is None for a single stream."""

    entering: Ref
    entering_second: Ref | None
    leaving: Ref
    leaving_second: Ref | None

    @property
    def dual(self) -> bool:
        return self.leaving_second is not None


def stream_leaves(found: list[Leaf], like: Leaf) -> list[Leaf]:
    """The leaves that have the stream's width and number of tokens, those named as hidden states first."""
    wide = [
        leaf
        for leaf in found
        if leaf.floating and leaf.shape[-1:] == like.shape[-1:] and leaf.tensor.numel() == like.tensor.numel()
    ]
    return sorted(wide, key=lambda leaf: leaf.name not in PREFERRED)


def stream_of(call: Call) -> Leaf:
    """The first floating tensor with a token axis that a block returns: it has the stream's shape."""
    leaf = next((leaf for leaf in call.outputs if leaf.floating and len(leaf.shape) > 1), None)
    if leaf is None:
        raise ArchitectureError(
            f"{call.path} ({type(call.module).__name__}) returned {describe(call.outputs)}; expected the hidden "
            f"states, a floating tensor [tokens, hidden], as the output or its first element"
        )
    if not any(other.shape == leaf.shape for other in call.inputs if other.floating):
        raise ArchitectureError(
            f"{call.path} ({type(call.module).__name__}) was called with {describe(call.inputs)} and returned "
            f"{describe(call.outputs)}; expected a floating argument of the same shape as the hidden states that it "
            f"returns, {list(leaf.shape)}"
        )
    return leaf


def find_layout(probe: Probe, blocks: list[Call]) -> Layout:
    """The layout that all blocks share, taken from how one hands over to the next.

    By majority, since a model may change one of two streams between some of its blocks.
    """
    for block in blocks:
        stream_of(block)
    seen = Counter(layout for pair in pairwise(blocks) if (layout := _handover(probe, *pair)) is not None)
    return seen.most_common(1)[0][0] if seen else _alone(probe, blocks[0])


def _handover(probe: Probe, block: Call, following: Call) -> Layout | None:
    passed = [(out, into) for out in block.outputs if out.floating for into in following.inputs if into.same(out)]
    if not passed:
        return None
    like = stream_of(block)
    streams = [(out, into) for out, into in passed if out.shape == like.shape]
    check_shapes(block, following)
    streams = list({out.ref: (out, into) for out, into in reversed(streams)}.values())[::-1]
    if not streams:
        return None
    (first, into_first), *rest = streams
    if rest and _used_together(probe, following, into_first, rest[0][1]):
        second, into_second = rest[0]
        return Layout(into_first.ref, into_second.ref, first.ref, second.ref)
    return Layout(into_first.ref, None, first.ref, None)


def check_shapes(block: Call, following: Call) -> None:
    """Raises if a block hands two floating tensors of different shapes to the next."""
    passed = [out for out in block.outputs if out.floating and any(leaf.same(out) for leaf in following.inputs)]
    if len(block.outputs) == 2 and len({out.shape for out in passed}) > 1:
        raise ArchitectureError(
            f"{block.path} hands two streams of different shapes to {following.path}: {describe(block.outputs)}; "
            f"expected hidden states and residual of one shape"
        )


def _used_together(probe: Probe, block: Call, hidden: Leaf, residual: Leaf) -> bool:
    """Whether the first module of a block to take the hidden states takes the residual with them.

    If no module takes the hidden states, the block adds the two by hand.
    """
    for call in probe.within(block):
        if any(leaf.same(hidden) for leaf in call.inputs):
            return any(leaf.same(residual) for leaf in call.inputs)
    return True


def _alone(probe: Probe, block: Call) -> Layout:
    """The layout of a stage's only block, or of blocks between which the stream is changed."""
    like = stream_of(block)
    leaving = [leaf for leaf in block.outputs if leaf.floating and leaf.shape == like.shape]
    entering = stream_leaves(block.inputs, like)
    second = _residual_argument(block)
    fused = any(_takes_two(call, like) for call in probe.within(block, direct=True))
    if len(leaving) == 2 and second is not None and fused:
        first = next(leaf for leaf in entering if leaf.ref != second)
        return Layout(first.ref, second, leaving[0].ref, leaving[1].ref)
    return Layout(entering[0].ref, None, like.ref, None)


def _residual_argument(block: Call) -> Ref | None:
    """The argument called residual, which is None for the first block of a model."""
    args, kwargs = block.tree
    names = list(inspect.signature(type(block.module).forward).parameters)[1:]
    for position, name in enumerate(names):
        if "residual" in name:
            return (0, position) if position < len(args) else (1, name) if name in kwargs else None
    return None


def _takes_two(call: Call, like: Leaf) -> bool:
    wide = stream_leaves(call.inputs, like)
    return len(wide) > 1 and not wide[0].same(wide[1])


def bind_streams(block: Call, index: int, layout: Layout) -> dict[tuple[str, int | None], Binding]:
    """`resid_pre` and `resid_post` of one block, checked against what was seen of its call."""
    like = stream_of(block)
    first = next((leaf for leaf in block.inputs if leaf.ref == layout.entering), None)
    if first is None or first.shape != like.shape:
        raise ArchitectureError(
            f"{block.path} was called with {describe(block.inputs)}; expected hidden states of shape "
            f"{list(like.shape)} at {spell(layout.entering)}, as in the other layers"
        )
    leaving = {leaf.ref: leaf for leaf in block.outputs if leaf.floating}
    for ref in filter(lambda ref: ref is not None, (layout.leaving, layout.leaving_second)):
        if ref not in leaving or leaving[ref].shape != like.shape:
            raise ArchitectureError(
                f"{block.path} returned {describe(block.outputs)}; expected a floating tensor of shape "
                f"{list(like.shape)} at {ref}, as in the other layers"
            )
    second = layout.entering_second if _present(block, layout.entering_second) else None
    return {
        ("resid_pre", index): Binding(block.path, "input", layout.entering, second),
        ("resid_post", index): Binding(block.path, "output", layout.leaving, layout.leaving_second),
    }


def _present(block: Call, ref: Ref | None) -> bool:
    """Whether the call has this argument at all, be it None."""
    if ref is None:
        return False
    try:
        follow(block.tree, ref)
    except (LookupError, TypeError):
        return False
    return True


def entering_leaf(block: Call, layout: Layout) -> Leaf:
    return next(leaf for leaf in block.inputs if leaf.ref == layout.entering)


def spell(ref: Ref) -> str:
    """An input leaf in words."""
    return f"argument {ref[1]!r}" if ref[0] == 1 else f"positional argument {ref[1]}"


def describe(found: list[Leaf]) -> str:
    """Tensors in words, for messages."""
    if not found:
        return "no tensor"
    return ", ".join(f"{leaf.name or 'tensor'}: {str(leaf.tensor.dtype)[6:]}{list(leaf.shape)}" for leaf in found)
