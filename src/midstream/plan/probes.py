"""Probes: scores of each token, computed from its row while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from midstream.plan import fields
from midstream.plan.captures import Reading
from midstream.plan.program import Program
from midstream.plan.steps import INPUT, Ref
from midstream.plan.vectors import Named, Vector, as_vector, as_vector_or_name

if TYPE_CHECKING:
    from midstream.plan.building import StepWriter

MAX_PROBES = 64  # of a plan
MAX_CLASSES = 64
ACTIVATIONS = ("sigmoid", "softmax", "tanh", "relu")
AGGREGATES = ("last", "max", "mean", "ema")
_WEIGHTS = f"numbers of shape [hidden] or [hidden, C], C from 1 to {MAX_CLASSES}"


@fields.explained
@dataclass(frozen=True)
class Probe(Reading):
    """A linear probe: `score = activation(h . weight + bias)`, computed in float32 for each selected token, and returned with the output.

    The model reads a token in the step that computes the next one, so a token's score comes with the next token. The last token of a
    request that ends by itself is never read and has no score. Linear probes of activations: Alain and Bengio 2016 (arXiv:1610.01644); of
    the truth of statements: Marks and Tegmark 2023 (arXiv:2310.06824).

    Args:
        site: one of `midstream.sites.LAYER_SITES`.
        layer: counted from 0, or from the end: -1.
        weight: `[hidden]` for one score a token; `[hidden, C]` for C of them, at most 64; or the name of a vector that the engine holds,
            or C names.
        program: computes the scores in place of `weight`, `bias` and `activation`: a `midstream.plan.program.Program` of the site's width.
            Its result is the scores, float32 `[C]`; a second result, int32 `[C]`, may say which feature each score belongs to.
        name: of its scores, which no other probe of the plan has: `output.scores[name]`, float32 `[tokens, C]`.
        bias: a number, or C of them.
        activation: None, `"sigmoid"`, `"softmax"` (over the C scores), `"tanh"` or `"relu"`.
        positions: the tokens to score, as in `Capture`. Prompt tokens that it selects are computed again if the prefix cache has them.
        when: `"before"` or `"after"` the edits of the same site.
        stop_above, stop_below: end the request at the first token whose aggregated score is above, or below, this number, with the
            `stop_reason` `"probe:NAME"`. A generated token is then the last one of the output; at a token of the prompt the output is
            empty. Only for one score a token.
        aggregate: what is compared with `stop_above` and `stop_below`: the `"last"` score, or the `"max"`, the `"mean"` or the exponential
            moving average `"ema"` of all scores so far.
        decay: of the moving average, from 0 to 1: `ema = decay * ema + (1 - decay) * score`, beginning with the first score.

    Raises:
        PlanError: the value of a field is not allowed.
    """

    kind: ClassVar[str] = "probe"
    layer_field: ClassVar[str] = "layer"
    function: ClassVar[str | None] = "program"
    operands: ClassVar[tuple[str, ...]] = ("weight",)

    site: str
    _: KW_ONLY
    layer: int
    weight: Any = None
    program: Program | None = None
    name: str
    bias: Any = 0.0
    activation: str | None = None
    positions: Any = "all_generated"
    when: str = "before"
    stop_above: float | None = None
    stop_below: float | None = None
    aggregate: str = "last"
    decay: float = 0.9

    def __post_init__(self) -> None:
        if self.program is None:
            fields.settle(self, weight=_columns(self.weight))
        else:
            self._check_program()
        classes = self.classes
        bias = self._biases()
        if len(bias) not in (1, classes):
            raise fields.refuse("Probe.bias", f"{len(bias)} numbers", f"a number, or {classes}, as the weight has")
        if self.activation is not None:
            fields.one_of("Probe.activation", self.activation, ACTIVATIONS)
        if self.activation == "softmax" and classes == 1:
            raise fields.refuse("Probe.activation", "'softmax' of one score, which is always 1", "'sigmoid'")
        bounds = {
            field: fields.number(f"Probe.{field}", bound)
            for field in ("stop_above", "stop_below")
            if (bound := getattr(self, field)) is not None
        }
        if bounds and classes > 1:
            field = next(iter(bounds))
            raise fields.refuse(
                f"Probe.{field}", f"a bound of {classes} scores", "None for more than one score a token"
            )
        self.settle(
            name=fields.name("Probe.name", self.name),
            bias=tuple(bias) if len(bias) > 1 else bias[0],
            aggregate=fields.one_of("Probe.aggregate", self.aggregate, AGGREGATES),
            decay=fields.number("Probe.decay", self.decay, 0.0, 1.0),
            **bounds,
        )

    @property
    def classes(self) -> int:
        """How many scores a token has."""
        if self.program is not None:
            return int(self.program.checked.parts[0].shape[0])
        return len(self.weight) if isinstance(self.weight, tuple) else 1

    @property
    def has_indices(self) -> bool:
        """Whether it also says which feature each score belongs to: see `Scores.indices`."""
        return self.program is not None and len(self.program.results) == 2

    @property
    def words(self) -> int:
        """How many numbers of 4 bytes it returns for a token: the scores, and the indices if it has them."""
        return self.classes * (1 + self.has_indices)

    def _biases(self) -> list[float]:
        try:
            with np.errstate(over="ignore"):
                given = np.atleast_1d(np.asarray(self.bias, np.float32))
        except (TypeError, ValueError) as error:
            raise fields.refuse("Probe.bias", fields.shown(self.bias), "a number, or one for each score") from error
        return as_vector("Probe.bias", given).data.tolist()  # type: ignore[no-any-return]

    def _check_program(self) -> None:
        program = self.program
        for name, none in (("weight", None), ("bias", 0.0), ("activation", None)):
            if getattr(self, name) is not none and getattr(self, name) != none:
                raise fields.refuse(f"Probe.{name}", fields.shown(getattr(self, name)), "none beside a program")
        parts = program.checked.parts if isinstance(program, Program) and program.is_read else ()
        dtypes, shapes = [str(part.dtype) for part in parts], {part.shape for part in parts}
        is_right = (
            isinstance(program, Program)
            and not program.inputs
            and dtypes in (["torch.float32"], ["torch.float32", "torch.int32"])
            and all(len(shape) == 1 and 0 < shape[0] <= MAX_CLASSES for shape in shapes)
        )
        if not is_right or len(shapes) > 1:
            allowed = (
                f"one of one input with the results float32 [C], or float32 [C] and int32 [C]; C up to {MAX_CLASSES}"
            )
            raise fields.refuse("Probe.program", fields.shown(program), allowed)

    @property
    def stops(self) -> bool:
        """Whether it may end the request."""
        return self.stop_above is not None or self.stop_below is not None

    def stops_at(self, score: float) -> bool:
        """Whether an aggregated score ends the request."""
        above, below = self.stop_above, self.stop_below
        return (above is not None and score > above) or (below is not None and score < below)

    @property
    def runs_program(self) -> bool:
        return True

    def program_for(self, dtype: str, width: Callable[[str, int], int], vector: Callable[[Named], Any]) -> Program:
        if self.program is not None:
            return self.program
        from midstream.plan.building import StepWriter  # imports torch, unlike this module

        writer = StepWriter(width(self.site, self.layer), dtype)
        return writer.program(self.written(writer, INPUT, vector), keeps=True)

    def written(self, writer: StepWriter, h: Ref, vector: Callable[[Named], Any]) -> Ref:
        """The scores `[rows, C]` of an input, float32. `vector`: as of `program_for`."""
        import torch

        if self.program is not None:
            return writer.inlined(self.program, writer.cast(h, self.program.dtype))[0]
        columns = self.weight if isinstance(self.weight, tuple) else (self.weight,)
        data = [vector(column) if isinstance(column, Named) else column.data for column in columns]
        weight_CH = torch.stack([torch.as_tensor(np.array(each), dtype=torch.float32) for each in data])
        # Also a bias of zero is a constant, so that probes with and without a bias run together.
        bias_C = torch.from_numpy(np.broadcast_to(np.float32(self.bias), (self.classes,)).copy())
        step = writer.step
        scores = writer.product(writer.cast(h, "float32"), weight_CH.T)
        scores = step("add.Tensor", scores, writer.constant(bias_C))
        if self.activation == "softmax":
            return step("_softmax.default", scores, 1, False)
        return scores if self.activation is None else step(f"{self.activation}.default", scores)


def _columns(weight: Any) -> tuple[Vector | Named, ...] | Named:
    """A probe's weight: a vector or a name for each score, or a single name."""
    if weight is None or isinstance(weight, (str, Named, Vector)):
        one = as_vector_or_name("Probe.weight", weight)
        return one if isinstance(one, Named) else (one,)
    if isinstance(weight, (tuple, list)) and weight and all(isinstance(one, (str, Named, Vector)) for one in weight):
        columns = tuple(as_vector_or_name("Probe.weight", one) for one in weight)
        widths = {column.width for column in columns if isinstance(column, Vector)}
        if len(widths) > 1 or len(columns) > MAX_CLASSES:
            raise fields.refuse(
                "Probe.weight",
                f"{len(columns)} columns of widths {fields.ranges(widths)}" if widths else f"{len(columns)} names",
                _WEIGHTS,
            )
        return columns
    if not hasattr(weight, "ndim"):
        try:
            with np.errstate(over="ignore"):
                weight = np.asarray(weight, np.float32)
        except (TypeError, ValueError) as error:
            raise fields.refuse("Probe.weight", fields.shown(weight), f"{_WEIGHTS}, or a name") from error
    if weight.ndim == 1:
        return (as_vector("Probe.weight", weight),)
    if weight.ndim != 2 or not 0 < weight.shape[1] <= MAX_CLASSES:
        raise fields.refuse("Probe.weight", f"of shape {list(weight.shape)}", _WEIGHTS)
    return tuple(as_vector("Probe.weight", weight[:, column]) for column in range(weight.shape[1]))


def check_names(probes: Sequence[Probe]) -> None:
    """Raise PlanError for too many probes, or for two with one name."""
    if len(probes) > MAX_PROBES:
        raise fields.refuse("the plan", f"{len(probes)} probes", f"up to {MAX_PROBES}")
    names = [probe.name for probe in probes]
    for name in names:
        if names.count(name) > 1:
            raise fields.refuse("Probe.name", f"{name!r} of two probes", "a name of its own for each probe")


def stopping(probes: Sequence[Probe], stop_reason: Any) -> str | None:
    """The name of the probe that ended a sample; None if none has. A string in `stop` may also begin with "probe:"."""
    names = [probe.name for probe in probes if probe.stops]
    return next((name for name in names if stop_reason == STOPPED_BY_PROBE + name), None)


def rows_end(probes: Sequence[Probe], sample: Any, chunks: Sequence[ScoreChunk], otherwise: int) -> int:
    """The position at which a sample's rows end: the one after the last token scored by the probe that ended it; `otherwise` if no probe
    ended it.
    """
    name = stopping(probes, sample.stop_reason)
    return max((1 + int(np.frombuffer(at, np.int64)[-1]) for of, at, _ in chunks if of == name), default=otherwise)


class ScorePlace(NamedTuple):
    """Where a probe's scores lie in a row of scores.

    Attributes:
        offset: in elements of the model's dtype.
        words: how many numbers of 4 bytes there are.
    """

    name: str
    offset: int
    words: int


class Aggregate:
    """The aggregated score of one request's tokens so far, as `Probe.aggregate` says."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._count, self.value = 0, 0.0

    def add(self, score: float) -> float:
        """Add a token's score. Returns the aggregated score."""
        self._count += 1
        if self._count == 1 or self._probe.aggregate == "last":
            self.value = score
        elif self._probe.aggregate == "max":
            self.value = max(self.value, score)
        elif self._probe.aggregate == "mean":
            self.value += (score - self.value) / self._count
        else:
            self.value = self._probe.decay * self.value + (1 - self._probe.decay) * score
        return self.value

    def first_stop(self, scores: Iterable[float]) -> int | None:
        """Add the scores up to the first that ends the request. Returns the index of that score; None if none ends it."""
        for number, score in enumerate(scores):
            if self._probe.stops_at(self.add(score)):
                return number
        return None


STOPPED_BY_PROBE = "probe:"  # the `stop_reason` of a request that a probe has ended, before the probe's name
# A probe's name, positions (int64), and their scores: float32 [tokens, C], or with indices [tokens, 2 C], the second half int32.
ScoreChunk = tuple[str, bytes, bytes]


class ProbeStop(NamedTuple):
    """The end of a request by a probe: the position of the token at which it ends, and the `stop_reason`."""

    position: int
    reason: str


def chunks_of(sample: Any) -> Sequence[ScoreChunk]:
    """The scores that have come with a sample of vLLM's output: see `engine.launch.putting_scores`."""
    return sample.midstream  # type: ignore[no-any-return]


class Scores(Mapping[str, Any]):
    """The scores of one output: `scores[name]` is a tensor, float32 `[tokens, C]`, and `scores.positions[name]` has the tokens' positions.
    If a program also says which feature each score belongs to, such as a feature of a sparse autoencoder, `scores.indices[name]` has the
    features' numbers, int64 `[tokens, C]`.

    Args:
        probes: of the request's plan.
        chunks: the scores that have come.
    """

    def __init__(self, probes: Sequence[Probe] = (), chunks: Sequence[ScoreChunk] = ()) -> None:
        self._probes = {probe.name: probe for probe in probes}
        self._chunks = tuple(chunks)

    def __getitem__(self, name: str) -> Any:
        import torch

        return torch.from_numpy(self._words(name)[:, : self._probe(name).classes].copy())

    def _words(self, name: str) -> np.ndarray:
        """float32 `[tokens, Probe.words]`."""
        probe = self._probe(name)
        data = b"".join(scores for at, _, scores in self._chunks if at == name)
        return np.frombuffer(data, np.float32).reshape(-1, probe.words)

    def __iter__(self) -> Any:
        return iter(self._probes)

    def __len__(self) -> int:
        return len(self._probes)

    @property
    def positions(self) -> dict[str, list[int]]:
        """The positions of the scored tokens: those of the prompt from 0, then the generated ones."""
        each = {name: b"".join(at for of, at, _ in self._chunks if of == name) for name in self._probes}
        return {name: np.frombuffer(data, np.int64).tolist() for name, data in each.items()}

    @property
    def indices(self) -> dict[str, Any]:
        """The features that the scores belong to, int64 `[tokens, C]`, for the probes that return them."""
        import torch

        named = [probe for probe in self._probes.values() if probe.has_indices]
        return {
            probe.name: torch.from_numpy(self._words(probe.name).view(np.int32)[:, probe.classes :].astype(np.int64))
            for probe in named
        }

    def aggregated(self, name: str) -> float:
        """The aggregated score of all tokens, as the probe's `aggregate` says; NaN if no token was scored. Only for one score a token."""
        probe, scores = self._probe(name), self[name]
        if probe.classes > 1:
            raise fields.refuse("the probe", f"{name!r}, with {probe.classes} scores a token", "one score a token")
        aggregate = Aggregate(probe)
        return [aggregate.add(score) for score in scores[:, 0].tolist()][-1] if len(scores) else float("nan")

    def _probe(self, name: str) -> Probe:
        if name not in self._probes:
            raise KeyError(f"The plan has no probe {name!r}: {fields.nearest(name, self._probes)}")
        return self._probes[name]

    def __repr__(self) -> str:
        return f"Scores({', '.join(f'{name}: {len(at)} tokens' for name, at in self.positions.items())})"
