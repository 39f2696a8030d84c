"""Runs bodies of traces on midstream and on `PlainForward`, and compares values, errors and tokens.

A body is a function in a file. Each run loads the file anew, so no run sees what another has changed. The loaded module cannot be imported
by its name, so an engine gets copies of its functions and values, as from a notebook.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from plain_forward import PlainForward
from plain_run import Ran
from random_bodies import HEAD, source

import midstream

TOLERANCE = 2e-4  # of a tensor's largest value, in float32
NOISE = 1e-5  # of the weights, which shows how much a body's results depend on rounding
TIE = 1e-4  # of the largest logit: a smaller distance between two tokens may come out either way
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PARIS, EIFFEL, THREE = "The capital of France is", "The Eiffel Tower is in the city of", "One two three"
LONG = " ".join([EIFFEL, "Paris.", PARIS, "Paris.", THREE, "four five six."] * 6)  # several blocks of the KV cache
ONE = [815]  # a prompt of one token
PROMPTS = [PARIS, EIFFEL, THREE, LONG, ONE]
# A block has copies of the names that it uses from outside, so a helper that binds one anew is refused there; in a function it is not.
REBINDS = "changed_in_place__replaced_global"
_numbers = itertools.count()


@dataclass(frozen=True)
class Body:
    """A function in a file."""

    path: Path
    name: str = "body"

    def fresh(self, save: Callable[[Any], Any]) -> Callable[..., Any]:
        """The function in a new module, in which `save` is the given one."""
        module = ModuleType(f"loaded_body_{next(_numbers)}")
        vars(module).update(save=save, __file__=str(self.path))
        code = compile(self.path.read_text(), str(self.path), "exec", dont_inherit=True)
        sys.modules[module.__name__] = module  # dataclasses look for it there
        try:
            exec(code, vars(module))
        finally:
            del sys.modules[module.__name__]
        return getattr(module, self.name)  # type: ignore[no-any-return]


# Running a body on midstream.


def one(model: Any, body: Body, prompt: Any, max_tokens: int) -> Ran:
    """By `model.run`, which does not tell the tokens."""
    try:
        return Ran(model.run(body.fresh(midstream.save), prompt, max_tokens=max_tokens, **GREEDY))
    except Exception as error:
        return Ran(error=error)


def inlined(model: Any, body: Body, prompt: Any, max_tokens: int) -> Ran:
    """By a with-block that has the body's own statements, which end with its only `return`."""
    text = body.path.read_text()
    (function,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == body.name)
    first, last = function.body[0], function.body[-1]
    lines = text.splitlines()[first.lineno - 1 : last.lineno - 1]
    block = [*(f"    {line}" for line in lines), f"        value = ({ast.get_source_segment(text, last.value)}).save()"]
    head = [
        "def inlined(model, prompt, params):",
        "    value = None",
        "    with model.trace(prompt, **params) as tracer:",
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"{body.name}.py")
        path.write_text("\n".join([text, *head, *block, "    return tracer, value", ""]))
        try:
            run = Body(path, "inlined").fresh(midstream.save)
            tracer, value = run(model, prompt, {"max_tokens": max_tokens, **GREEDY})
        except Exception as error:
            return Ran(error=error)
    return Ran(value, tokens=list(tracer.outputs[0].outputs[0].token_ids))


def several(model: Any, body: Body, prompts: Sequence[Any], max_tokens: int) -> list[Ran]:
    """In one batch, by `model.run`."""
    return [Ran(v) for v in model.run(body.fresh(midstream.save), list(prompts), max_tokens=max_tokens, **GREEDY)]


def traced(model: Any, body: Body, prompt: Any, max_tokens: int) -> Ran:
    """By a with-block that calls the body."""
    fn = body.fresh(midstream.save)
    try:
        with model.trace(prompt, max_tokens=max_tokens, **GREEDY) as tracer:
            value = fn(model, tracer).save()  # noqa: F841
    except Exception as error:
        return Ran(error=error)
    output = tracer.outputs[0]
    return Ran(output.saves.get("value"), tokens=list(output.outputs[0].token_ids))


def together(model: Any, bodies: Sequence[Body], prompts: Sequence[Any], max_tokens: int) -> list[Ran]:
    """Different bodies in one batch, by a with-block with an invoke for each, and last the last prompt without a body."""
    fns = [body.fresh(midstream.save) for body in bodies]
    with model.trace(max_tokens=max_tokens, **GREEDY) as tracer:
        for fn, prompt in zip(fns, prompts, strict=True):
            with tracer.invoke(prompt):
                value = fn(model, tracer).save()  # noqa: F841
        with tracer.invoke(prompts[-1]):
            pass
    return [Ran(each.saves.get("value"), tokens=list(each.outputs[0].token_ids)) for each in tracer.outputs]


# Comparing.


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The parts of a nested value with their places, and a text for each container: its type and size."""
    if isinstance(value, (torch.Tensor, str, bytes, int, float, type(None))):
        yield place, value
    elif isinstance(value, (np.ndarray, np.generic)):
        yield place, torch.as_tensor(value)
    elif isinstance(value, dict):
        yield place, f"{type(value).__name__} of {[*value]}"
        for key, each in value.items():
            yield from leaves(each, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple, deque)):
        yield place, f"{type(value).__name__} of {len(value)}"
        for i, each in enumerate(value):
            yield from leaves(each, f"{place}[{i}]")
    elif isinstance(value, (set, frozenset)):
        yield place, f"{type(value).__name__} of {sorted(value)}"
    elif hasattr(value, "__dict__"):
        yield place, type(value).__name__
        for name, each in vars(value).items():
            yield from leaves(each, f"{place}.{name}")
    else:
        yield place, repr(value)


def distance(expected: Any, found: Any) -> float:
    """How far two leaves are apart, relative to the expected one."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if expected.shape != found.shape or expected.is_floating_point() != found.is_floating_point():
            return math.inf
        if not expected.is_floating_point():
            return 0.0 if torch.equal(expected.long(), found.long()) else math.inf
        if expected.dtype != found.dtype:
            return math.inf
        if not expected.numel():
            return 0.0
        error = (found.double() - expected.double()).abs().max().item()
        return error / max(expected.abs().max().item(), 1.0) if math.isfinite(error) else math.inf
    if type(expected) is not type(found):
        return math.inf
    if isinstance(expected, float):
        return abs(found - expected) / max(abs(expected), 1.0)
    if isinstance(expected, str):  # texts may have formatted numbers in them
        numbers = [re.findall(r"-?\d+\.\d+", text) for text in (expected, found)]
        rest = [re.sub(r"-?\d+\.\d+", "", text) for text in (expected, found)]
        if rest[0] != rest[1] or len(numbers[0]) != len(numbers[1]):
            return math.inf
        return max((distance(float(a), float(b)) for a, b in zip(*numbers, strict=True)), default=0.0)
    return 0.0 if expected == found else math.inf


def distances(expected: Ran, found: Ran) -> dict[str, float]:
    """The distance of each part of two results that differs. Tokens count if both have them."""
    if expected.error is not None or found.error is not None:
        return {} if same_error(expected.error, found.error) else {"error": math.inf}
    theirs, mine = dict(leaves(expected.value)), dict(leaves(found.value))
    if theirs.keys() != mine.keys():
        return {"structure": math.inf}
    by_place = {place: distance(theirs[place], mine[place]) for place in theirs}
    if found.tokens and found.tokens != expected.tokens:
        by_place["tokens"] = math.inf
    return {place: far for place, far in by_place.items() if far > 0}


def same_error(expected: BaseException | None, found: BaseException | None) -> bool:
    """Whether midstream's error names the type of the expected one, and has its text if that is a body's own."""
    if expected is None or found is None:
        return expected is found
    name, text = type(expected).__name__, f"{type(found).__name__}: {found}"
    return re.search(rf"\b{name}\b", text) is not None and ("own: " not in str(expected) or str(expected) in text)


class Oracle:
    """The bundled model on plain transformers, and the same with noise in its weights."""

    def __init__(self) -> None:
        self.plain = PlainForward(midstream.demo_model())

    @cached_property
    def noisy(self) -> PlainForward:
        return PlainForward(midstream.demo_model(), NOISE)

    def run(self, body: Body, prompt: Any, max_tokens: int, as_vllm: bool = True) -> Ran:
        return self.plain.run(body.fresh(self.plain.save), prompt, max_tokens, as_vllm)

    def can_share(
        self, body: Body, prompts: Sequence[Any], max_tokens: int, expected: list[Ran], as_vllm: bool
    ) -> bool:
        """Whether no prompt's run raises, nor changes anything in the body's module that another prompt's run could see."""
        fn = body.fresh(self.plain.save)
        before = _versions(fn)
        again = [self.plain.run(fn, prompt, max_tokens, as_vllm) for prompt in [*prompts, prompts[0]]]
        pairs = zip([*expected, expected[0]], again, strict=True)
        is_same = all(theirs.error is None and not distances(theirs, mine) for theirs, mine in pairs)
        return is_same and _versions(fn) == before

    def why_wrong(self, body: Body, prompt: Any, max_tokens: int, expected: Ran, found: Ran, as_vllm: bool) -> str:
        """The parts of `found` that differ by more than rounding explains; empty if there are none."""
        far = {place: value for place, value in distances(expected, found).items() if value > TOLERANCE}
        if not far or not _is_finite(expected) or any(map(_is_tie, expected.logits)):
            return ""
        again = self.noisy.run(body.fresh(self.noisy.save), prompt, max_tokens, as_vllm)
        slack = distances(expected, again)
        if math.inf in slack.values():  # rounding decides what this body does
            return ""
        wrong = {place: value for place, value in far.items() if value > 5 * slack.get(place, 0.0)}
        if not wrong:
            return ""
        told = {place: _told(expected, found, place) for place in [*wrong][:4]}
        return f"{body.path}, {body.name} on {prompt!r} with {max_tokens} tokens (expected, found): {told}"

    def compare(
        self,
        bodies: Sequence[Body],
        prompts: Sequence[Any],
        max_tokens: int,
        expected: Sequence[Ran],
        found: Sequence[Ran],
        as_vllm: bool,
    ) -> None:
        """Assert that each of `found` is as expected."""
        each = zip(bodies, prompts, expected, found, strict=True)
        wrong = [self.why_wrong(body, prompt, max_tokens, a, b, as_vllm) for body, prompt, a, b in each]
        assert not any(wrong), "\n".join(filter(None, wrong))


def _told(expected: Ran, found: Ran, place: str) -> tuple[Any, Any]:
    if place == "error":
        return expected.error, found.error
    if place == "tokens":
        return expected.tokens, found.tokens
    if place == "structure":
        return expected.value, found.value
    theirs, mine = dict(leaves(expected.value))[place], dict(leaves(found.value))[place]
    if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor) and theirs.numel() > 8:
        return (
            f"{theirs.dtype} {list(theirs.shape)}",
            f"{mine.dtype} {list(mine.shape)}, {distance(theirs, mine):.1e} away",
        )
    return theirs, mine


def _versions(fn: Callable[..., Any]) -> list[int]:
    """The versions of the tensors among a function's globals, which grow with every change in place."""
    values = {
        name: value for name, value in fn.__globals__.items() if isinstance(value, (torch.Tensor, list, tuple, dict))
    }
    values.pop("__builtins__")
    return [leaf._version for _, leaf in leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_finite(ran: Ran) -> bool:
    return all(bool(logits.isfinite().all()) for logits in ran.logits)


def _is_tie(logits_V: torch.Tensor) -> bool:
    first, second = logits_V.topk(2).values.tolist()
    return first - second < TIE * max(abs(first), 1.0)


FORMS = {"run": one, "trace": traced, "inline": inlined}


def check(oracle: Oracle, model: Any, body: Body, prompts: Sequence[Any], max_tokens: int, form: str = "run") -> None:
    """Assert that `model` gives for `body` what plain transformers gives.

    Args:
        form: "several" for all prompts in one batch, or a way to run one prompt from `FORMS`.
    """
    as_vllm = not isinstance(model, midstream.LanguageModel)
    expected = [oracle.run(body, prompt, max_tokens, as_vllm) for prompt in prompts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "several" and oracle.can_share(body, prompts, max_tokens, expected, as_vllm):
            found = several(model, body, prompts, max_tokens)
        else:
            found = [FORMS.get(form, one)(model, body, prompt, max_tokens) for prompt in prompts]
    oracle.compare([body] * len(prompts), prompts, max_tokens, expected, found, as_vllm)


def check_together(oracle: Oracle, model: Any, bodies: Sequence[Body], prompts: Sequence[Any], max_tokens: int) -> None:
    """The same for different bodies in one batch, and for a request without one beside them. Bodies that raise or overflow are left out."""
    as_vllm = not isinstance(model, midstream.LanguageModel)
    each = [
        (body, prompt, oracle.run(body, prompt, max_tokens, as_vllm))
        for body, prompt in zip(bodies, prompts, strict=True)
    ]
    each = [(body, prompt, ran) for body, prompt, ran in each if ran.error is None and _is_finite(ran)]
    bodies, prompts, expected = (list(column) for column in zip(*each, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        *found, neighbour = together(model, bodies, prompts, max_tokens)
    oracle.compare(bodies, prompts, max_tokens, expected, found, as_vllm)
    plain = oracle.plain.run(lambda model: None, prompts[-1], max_tokens)
    assert neighbour.tokens == plain.tokens, (
        f"the request without a body, {prompts[-1]!r}: {neighbour.tokens}, not {plain.tokens}"
    )


def random_body(directory: Path, seed: int) -> Body:
    path = directory / f"body_{seed}.py"
    path.write_text(source(seed))
    return Body(path)


def check_random(oracle: Oracle, model: Any, seeds: range, directory: Path, allowed: str = "$^") -> None:
    """Most bodies run alone, as a function or a with-block. Some run for several prompts, and the last ones in one batch.

    `allowed`: a regular expression for errors that do not count.
    """
    wrong: dict[int, str] = {}
    *alone, last = [seeds[:-8], seeds[-8:]]
    for seed in alone[0]:
        prompts = [PROMPTS[(seed + i) % len(PROMPTS)] for i in range(3 if seed % 6 == 5 else 1)]
        body = random_body(directory, seed)
        form = "several" if len(prompts) > 1 else ("run", "trace", "run", "inline")[seed % 4]
        if form == "inline" and re.search(r"renew|counted", source(seed).removeprefix(HEAD)):  # as REBINDS
            form = "trace"
        try:
            check(oracle, model, body, prompts, 1 + seed % 3, form)
        except Exception as error:
            wrong[seed] = str(error)
    try:
        bodies = [random_body(directory, seed) for seed in last]
        check_together(oracle, model, bodies, [PROMPTS[seed % len(PROMPTS)] for seed in last], 2)
    except Exception as error:
        wrong[last[0]] = f"together with those up to {last[-1]}: {error}"
    wrong = {seed: why for seed, why in wrong.items() if not re.search(allowed, why)}
    shown = [f"seed {seed}: {why}\n{source(seed).removeprefix(HEAD)}" for seed, why in list(wrong.items())[:4]]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(seeds)} bodies are wrong: {[*wrong]}", *shown])


HARD = Path(__file__).parent / "hard_bodies"


def hard_bodies() -> list[Body]:
    """The bodies of the files in `hard_bodies`: their functions of (model, tracer)."""
    found = []
    for path in sorted(HARD.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        found += [Body(path, fn.name) for fn in functions if [arg.arg for arg in fn.args.args] == ["model", "tracer"]]
    return found
