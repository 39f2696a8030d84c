"""The field "midstream" of requests to vLLM's server, and of their responses.

    {"model": ..., "prompt": ..., "midstream": {"plan": [{"kind": "steer", "site": "resid_post", ...}], "answers": [" Paris"]}}
    {"choices": [...], "midstream": {"captures": [{"handle": ..., "site": ..., ...}], "answers": {" Paris": -1.2}}}

`vllm_xargs={"midstream": JSON}` is another place for the field. All senders are untrusted: the field is data, and limited in size.

vLLM's handlers of requests (`answering`) read the field, and put a `ServedRequest` into `vllm_xargs` in place of the field. vLLM copies it
into the SamplingParams of each prompt of the request, and calls `AsyncLLM.generate` (`running`) with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import cached_property
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from midstream.engine.admission import (
    as_client_error,
    json_size,
    misspelt_key,
    misspelt_key_error,
    on_a_thread,
)
from midstream.engine.launch import may_load_adapters
from midstream.errors import CaptureError, ChannelError, EngineClosedError, MidstreamError, PlanError, about
from midstream.plan import fields
from midstream.plan.fields import nearest
from midstream.plan.probes import Probe, ScoreChunk, Scores, chunks_of, stopping
from midstream.plan.selections import Selection, made
from midstream.plan.strangers import check_strangers
from midstream.plan.values import Plan, Span
from midstream.plan.vectors import Named, RecordedRun
from midstream.plan.wire import MAX_STRANGERS_BYTES
from midstream.requests.arguments import MAX_ANSWERS, MissingSpace, answers_of, spaces_warning
from midstream.requests.invokes import Invoke, without_destinations
from midstream.runtime.request import Envelope, packed
from midstream.sae import SAE
from midstream.serve.capture_store import MAX_INLINE_BYTES, CaptureStore
from midstream.serve.gate import RequestRefused, error_response, owner_of
from midstream.serve.monitors import Monitors
from midstream.settings import NAME
from midstream.vllm.stream import RunningRequest
from midstream.vllm.vllm_model import VLLM

MAX_RECEIVING_BYTES = 256 << 20  # of all bodies that are being received
_FIELDS = ("plan", "answers", "inline")
_ANSWERS = f"{NAME}.answers"
MAX_SCORES = 1 << 16  # numbers that the probes of one request may return
_LONGEST_ANSWER = 256
_DRAIN_SECONDS = 0.05  # between two checks for running requests
ADMIN_KEY = "MIDSTREAM_ADMIN_KEY"  # an environment variable of the server
NO_ADMIN = (
    f"Administration needs the key of {ADMIN_KEY}, the server's environment variable, in the header X-Midstream-Admin."
)
Generate = Callable[..., AsyncGenerator[Any]]
T = TypeVar("T")
_SERVERS_FAULT = (EngineClosedError, ChannelError, CaptureError)
_DONE = "data: [DONE]\n\n"


class Server:
    """The state that the routes and the requests of one server share.

    Attributes:
        model: the server's engine. `model.plan` is the engine-wide plan.
        captures: the rows that wait for download.
        saes: sparse autoencoders by name.
        monitors: what the engine-wide plan's probes have found.
        owners: the owner of each named vector, SAE and run, by `("vectors" | "saes" | "runs", name)`.
        recording: the owner of each run that is being recorded, by its name.
        planned: how many prompts have run with a plan, including the engine-wide plan.
        running: how many prompts with a plan or of `midstream.Remote` run now. A sweep counts as one.
        receiving: bytes of each API key's bodies that are being received.
        sweeps: how many sweeps of each API key run now.
        is_draining: whether the server is ending, and refuses new requests.
    """

    def __init__(self, engine: Any, captures: CaptureStore) -> None:
        self.model = VLLM.attached(engine)
        self.captures = captures
        self.saes: dict[str, SAE] = {}
        self.monitors = Monitors()
        self.model.connection.note_scores = self.monitors.note
        self.owners: dict[tuple[str, str], bytes] = {}
        self.recording: dict[str, bytes] = {}
        self.planned = self.running = 0
        self.receiving: Counter[bytes] = Counter()
        self.sweeps: Counter[bytes] = Counter()
        self.is_draining = False

    @staticmethod
    def of(engine: Any) -> Server | None:
        """The server of a front end's engine; None before it is ready."""
        return getattr(engine, "midstream_server", None)

    @property
    def gauges(self) -> dict[str, int]:
        """Counts of the objects that the front end holds, and of prompts with a plan."""
        held = {"vectors": len(self.model.vectors), "saes": len(self.saes), "runs": len(self.model.runs.handles)}
        return {
            **self.captures.gauges,
            **held,
            "planned_prompts": self.planned,
            "running_prompts": self.running,
            "sweeps": self.sweeps.total(),
        }

    @cached_property
    def longest_prompt_bytes(self) -> int:
        """A prompt that takes more bytes than this, as text or as token ids in msgpack, is too long for the model."""
        longest_token = max(map(len, self.model.tokenizer.get_vocab()), default=1)
        return (
            self.model.vllm_config.model_config.max_model_len * max(4 * longest_token, 9) + 64
        )  # 4 bytes at most for a character

    @contextlib.contextmanager
    def counting_prompts(self, prompts: int = 1) -> Iterator[None]:
        """Count prompts that run in the block. The engine is ended only after them."""
        self.running += prompts
        try:
            yield
        finally:
            self.running -= prompts

    async def read(self, given: Any, owner: bytes, may_be_final: bool = False) -> ServedRequest:
        """Read a request's field on another thread, with the checks that need no prompt. Raises PlanError."""
        return await on_a_thread(json_size(given), self._read, given, owner, may_be_final)

    async def run_carried(
        self, given: Any, generate: Generate, prompt: Any, params: Any, request_id: str, rest: Any
    ) -> AsyncGenerator[Any]:
        """The outputs of a prompt on a route whose responses have no place for midstream's field. Raises PlanError."""
        served = await self.read(given, b"")
        with _refusing():
            if served.plan.readings or served.answers:
                raise PlanError(
                    "This route returns no captures, no scores and no answers. Use /v1/completions, /v1/chat/completions or /v1/responses."
                )
        async with contextlib.aclosing(served.run(generate, prompt, params, request_id, rest)) as outputs:
            async for output in outputs:
                yield output

    def read_plan(self, given: Any, may_be_final: bool = False) -> Plan:
        """A stranger's plan, as data. It may refer to the server's runs by name or id. Raises PlanError.

        The planner checks it against the model with the prompt of each request.
        """
        runs = {key: run for run in self.model.runs.handles for key in (run.name, run.id)}
        plan = Plan.from_wire(
            {"interventions": given} if isinstance(given, list) else given,
            trusted=False,
            named_runs=runs,
            saes=dict(self.saes),
            may_be_final=may_be_final,
        )
        check_strangers(plan, self.model.num_layers, self.model.device_type)
        return plan

    def set_plan(self, plan: Plan) -> None:
        """Set the engine-wide plan. Raises PlanError for a plan that the model cannot carry out, for captures, and for probes whose scores
        a histogram cannot show.
        """
        with about(f"{NAME}.plan"):
            self.model.planner.check(plan)
            if plan.captures:
                raise PlanError("The engine-wide plan may have no captures: no client would get the rows.")
            Monitors.check(plan.probes)
        self.model.plan = plan
        self.model.connection.watched = plan.probes

    def check_probe_names(self, plan: Plan) -> None:
        """Raise PlanError if a request's probe has the name of one of the engine-wide plan."""
        taken = {probe.name for probe in self.model.plan.probes}
        for probe in plan.probes:
            if probe.name in taken:
                raise fields.refuse("Probe.name", f"{probe.name!r}, as a probe of the server's", "another name")

    def _read(self, given: Any, owner: bytes, may_be_final: bool) -> ServedRequest:
        with _refusing(NAME):
            content = _content(given)
        with _refusing():
            given = _loaded(f"{NAME}.plan", content.get("plan"))
            plan = Plan() if given is None else self.read_plan(given, may_be_final)
            packed(without_destinations(plan.held[0]))  # both are cached, so that the event loop need not make them
        with _refusing(_ANSWERS):
            answers = content.get("answers", [])
            if not isinstance(answers, list) or len(answers) > MAX_ANSWERS:
                raise fields.refuse(_ANSWERS, fields.shown(answers), f"a list of up to {MAX_ANSWERS} answers")
            for answer in answers:
                if type(answer) not in (str, int) or len(str(answer)) > _LONGEST_ANSWER:
                    allowed = f"texts of one token, and token ids, of up to {_LONGEST_ANSWER} characters"
                    raise fields.refuse(_ANSWERS, fields.shown(answer), allowed)
        with _refusing(f"{NAME}.inline"):
            if not isinstance(inline := content.get("inline", False), bool):
                raise fields.refuse(f"{NAME}.inline", fields.shown(inline), "true or false")
        return ServedRequest(self, plan, answers, inline, owner)


async def adapter_of(request: Request, name: str | None) -> Any:
    """vLLM's LoRARequest of the adapter that a request names as its model; None for the model itself.

    Raises RequestRefused, with status 404, for a name that the server does not have, as vLLM's routes do.
    """
    models = request.app.state.openai_serving_models
    if name is None or models.is_base_model(name):
        return None
    if (found := models.lora_requests.get(name)) is not None:
        return found
    if may_load_adapters():
        found = await models.resolve_lora(name)
        if hasattr(found, "lora_int_id"):
            return found
        if found.error.code != 404:
            raise RequestRefused(found.error.code, found.error.message, "model")
    there = [*(base.name for base in models.base_model_paths), *models.lora_requests]
    raise RequestRefused(404, f"The model `{name}` does not exist: {nearest(name, there)}", "model")


def server_of(request: Request) -> Server:
    """The server that a request to one of midstream's routes came to."""
    return request.app.state.midstream  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def received(request: Request, limit: int, too_large: str) -> AsyncIterator[bytearray]:
    """A request's body, which counts as being received until the block ends.

    Raises RequestRefused if the body is over `limit`, if no part of it comes for a while (see `Gate`), or if the bodies of this API key
    would take more room than they leave for others.
    """
    receiving, owner, data = server_of(request).receiving, owner_of(request.headers), bytearray()
    try:
        async for part in request.stream():
            data += part
            receiving[owner] += len(part)
            if len(data) > limit:
                raise RequestRefused(413, too_large.format(f"over {limit >> 20} MiB"))
            if receiving[owner] > MAX_RECEIVING_BYTES - receiving.total():
                raise RequestRefused(503, "The server is receiving too much at once. Try again later.")
        yield data
    finally:
        receiving[owner] -= len(data)
        if not receiving[owner]:
            del receiving[owner]


async def receive_body(request: Request, limit: int, too_large: str) -> bytes:
    """A request's body. Raises RequestRefused as `received` does."""
    async with received(request, limit, too_large) as data:
        return bytes(data)


class _Route(APIRoute):
    """A route that answers errors in OpenAI's form. The type of a midstream error is its class, and `param` its `field`, or else "body"."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        route = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await route(request)
            except RequestRefused as error:
                return error_response(*error.args)
            except ClientDisconnect:  # before the body had come; the answer is not read
                return error_response(400, "The client left.")
            except _SERVERS_FAULT as error:
                return error_response(500, str(error), kind=type(error).__name__)
            except MidstreamError as error:
                own = (each.__name__ for each in type(error).__mro__ if each.__module__ == MidstreamError.__module__)
                return error_response(400, str(error), error.field or "body", next(own))

        return answer


def new_router() -> APIRouter:
    """A router for routes under /v1/midstream, whose errors are answered."""
    return APIRouter(prefix=f"/v1/{NAME}", tags=[NAME], route_class=_Route)


def check_there(what: str, name: str, there: Collection[str]) -> None:
    """Raise RequestRefused if there is no vector, SAE or run of this name. `what`: "vectors", "saes" or "runs"."""
    if name not in there:
        raise RequestRefused(404, f"There is no {_called(what, name)}: {nearest(name, there)}.", "name")


def check_theirs(request: Request, what: str, name: str, there: Collection[str]) -> None:
    """Raise RequestRefused for a client that may not delete or replace a vector, an SAE or a run."""
    check_there(what, name, there)
    if server_of(request).owners.get((what, name)) != owner_of(request.headers) and not is_admin(request):
        raise RequestRefused(403, f"The {_called(what, name)} is another API key's. {NO_ADMIN}", "name")
    values = server_of(request).model.plan.values()
    used = {value.name for value in values if isinstance(value, Named if what == "vectors" else RecordedRun)}
    if what != "saes" and name in used:  # a plan has its own copy of what it needs from an SAE
        raise RequestRefused(409, f"The engine-wide plan uses the {_called(what, name)}.", "name")


def check_free(request: Request, what: str, name: str, there: Collection[str], replace: bool, field: str) -> None:
    """Raise RequestRefused if a name is taken; with `replace`, only if the client may not replace the object that has it."""
    if name not in there:
        return
    if not replace:
        text = f"The {_called(what, name)} is there already: delete it first, or use another name."
        raise RequestRefused(409, text, field)
    check_theirs(request, what, name, there)


def _called(what: str, name: str) -> str:
    return f"{'SAE' if what == 'saes' else what[:-1]} {name!r}"


def add_owned(
    request: Request,
    what: str,
    there: MutableMapping[str, T],
    new: Mapping[str, T],
    size: Callable[[T], int],
    most: int,
    most_bytes: int,
) -> None:
    """Add vectors or SAEs of this client to those that are `there`. Raises RequestRefused over the limits, which count uploaded ones."""
    owners, owner = server_of(request).owners, owner_of(request.headers)
    uploaded = {name: there[name] for kind, name in owners if kind == what and name in there}
    before = {name: each for name, each in uploaded.items() if owners[what, name] == owner}
    called = "SAEs" if what == "saes" else what
    for unit, limit, measure in ((called, most, lambda _: 1), (f"bytes of {called}", most_bytes, size)):
        own, together, held = (
            sum(map(measure, each.values())) for each in ({**before, **new}, {**uploaded, **new}, before)
        )
        check_quota(unit, own, together, limit, held)
    there.update(new)
    owners |= dict.fromkeys(((what, name) for name in new), owner)


def delete_owned(request: Request, what: str, name: str, there: MutableMapping[str, Any]) -> dict[str, str]:
    """Delete a vector or an SAE. Raises RequestRefused as `check_theirs` does."""
    check_theirs(request, what, name, there)
    del there[name]
    server_of(request).owners.pop((what, name), None)
    return {"deleted": name}


def check_admin(request: Request) -> None:
    """Raise RequestRefused for a client that is no administrator."""
    if not is_admin(request):
        raise RequestRefused(403, NO_ADMIN)


def is_admin(request: Request) -> bool:
    expected, given = os.environ.get(ADMIN_KEY, ""), request.headers.get("x-midstream-admin", "")
    return bool(expected) and secrets.compare_digest(expected.encode(), given.encode())


def check_quota(what: str, own: int, together: int, most: int, before: int = 0) -> None:
    """Raise RequestRefused for a key that would hold more than all keys together would leave free.

    Args:
        own: how many the key would hold.
        together: how many all keys would hold.
        most: the limit for all keys together.
        before: how many the key holds now. It may always replace these.
    """
    if own > before and own > (room := most - together):
        raise RequestRefused(
            413,
            f"With these, this API key would hold {own} of {most} {what}, and leave {max(room, 0)}. A key may hold no more than it leaves "
            "for others. Delete some first.",
        )


# A list in a body. The first wrong item ends the reading: an error for each of a million items would take gigabytes.
Listed = Annotated[list[T], Field(fail_fast=True)]


class SpanOfText(BaseModel):
    """The data of a `midstream.Span`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    span: str = Field(max_length=4096)
    occurrence: int = 0


class SelectorOfRows(BaseModel):
    """The data of a `midstream.plan.selections.Selector`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    selector: str = Field(max_length=256)
    options: dict[str, Any] = {}


def read_place(place: Any) -> Any:
    """A place in a prompt as the client's methods take it: a `Span` for a `SpanOfText`. Raises PlanError for an unknown selector."""
    if isinstance(place, SelectorOfRows):
        return made("positions", place.selector, place.options)
    return Span(place.span, place.occurrence) if isinstance(place, SpanOfText) else place


def openapi_body(path: str, body: type[BaseModel]) -> dict[str, Any]:
    """The body of `POST path` for `openapi_extra`, for routes that read it themselves."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = body.model_json_schema(ref_template=place + "/$defs/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _content(given: Any) -> dict[str, Any]:
    """The field as a dict with some of the keys "plan", "answers" and "inline". Raises PlanError."""
    given = _loaded(NAME, given)
    if isinstance(given, list) or (isinstance(given, dict) and "interventions" in given):
        return {"plan": given}
    if not isinstance(given, dict):
        raise fields.refuse(NAME, fields.shown(given), f"an object with {', '.join(map(repr, _FIELDS))}")
    for key in given:
        if key not in _FIELDS:
            raise PlanError(f"{NAME} has an unknown key {fields.shown(key)}: {fields.nearest(key, _FIELDS)}")
    return given


def _loaded(place: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    if len(given) > MAX_STRANGERS_BYTES:
        raise fields.refuse(place, "over 4 MiB", "up to 4 MiB; vectors are shortest in base64, or as names")
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{place} is not JSON: {error}.") from error


@contextlib.contextmanager
def _refusing(field: str = f"{NAME}.plan") -> Iterator[None]:
    """Turn errors of the request into errors that vLLM's server answers with 400. Their field is `field`, or a part of it."""
    try:
        with about(field):
            yield
    except _SERVERS_FAULT:
        raise
    except MidstreamError as error:
        error.field = (error.field or field).replace(".interventions", "")  # the plan may be the list itself
        raise as_client_error(error) from error


def _most_scores(probes: Sequence[Probe], prompt_length: int, max_tokens: int) -> int:
    """The most scores that one choice can have."""
    rows = ((probe, Selection.of(probe.positions, prompt_length)) for probe in probes)
    return sum(probe.words * (found.prompt.size + max_tokens * bool(found.generated)) for probe, found in rows)


class _ScoredChoice:
    """The scores of one choice.

    Attributes:
        chunks: the scores that have come so far.
    """

    def __init__(self) -> None:
        self.chunks: Sequence[ScoreChunk] = ()
        self._sent = 0

    def new(self, probes: Sequence[Probe]) -> dict[str, Any]:
        """The scores that have come since the last call, without probes that have no new ones."""
        fresh, self._sent = self.chunks[self._sent :], len(self.chunks)
        data = _scores_data(probes, fresh) if fresh else {}
        return {name: each for name, each in data.items() if each["positions"]}

    def all(self, probes: Sequence[Probe]) -> dict[str, Any]:
        return _scores_data(probes, self.chunks)


def _scores_data(probes: Sequence[Probe], chunks: Sequence[ScoreChunk]) -> dict[str, Any]:
    """Scores as JSON: `{name: {"positions": [...], "scores": [[...], ...], "indices": [[...], ...]}}`, with `indices` only if the
    probe says which features its scores belong to. A number that JSON lacks is null."""
    scores = Scores(probes, chunks)
    indices = scores.indices
    return {
        name: {
            "positions": positions,
            "scores": [[x if math.isfinite(x) else None for x in row] for row in scores[name].tolist()],
            **({"indices": indices[name].tolist()} if name in indices else {}),
        }
        for name, positions in scores.positions.items()
    }


class ServedRequest:
    """One request with the field, for all of its prompts and choices."""

    def __init__(self, server: Server, plan: Plan, answers: list[Any], inline: bool, owner: bytes) -> None:
        self.plan, self.answers = plan, answers
        self._server, self._owner = server, owner
        self.inline = MAX_INLINE_BYTES if inline else 0  # bytes that may still be put inline
        self._captures: list[dict[str, Any]] = []
        self._graded: list[dict[str, float | None] | None] = []
        self._missing: list[Sequence[MissingSpace]] = []  # by prompt: see `InvokeResult.missing`
        self._most_scores = 0  # the most scores that all of its choices can have
        self._scored: dict[int, _ScoredChoice] = {}  # by the number of the choice
        self._stops: dict[int, str] = {}  # the choices that a probe has ended
        self._unfinished = 0  # prompts

    def __repr__(self) -> str:
        return f"<{self.plan}>"

    def run(self, generate: Generate, prompt: Any, params: Any, request_id: str, rest: Any) -> AsyncGenerator[Any]:
        """The outputs of one prompt. It checks everything before the stream begins, so that errors are answered with 400.

        Raises PlanError for a plan or an answer that this prompt or this model does not allow.
        """
        model, number = self._server.model, len(self._graded)
        with _refusing(_ANSWERS):
            if self.answers and (params.logprobs is not None or getattr(params, "logprob_token_ids", None)):
                raise PlanError("answers are graded by log-probabilities of their own: leave logprobs out.")
            given = [self.answers] if self.answers else []
            (answers,) = answers_of(given, 1, lambda: model.tokenizer, model.vocab_size)
        with _refusing():
            self._server.check_probe_names(self.plan)
            if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
                raise PlanError("A plan needs a prompt of tokens or text; this prompt has neither.")
            text = prompt if isinstance(prompt.get("prompt"), str) else prompt["prompt_token_ids"]
            invoke = Invoke(text, None, plan=self.plan, answers=answers)
            request = model.planned(invoke, dict(prompt), params)
            assert request.plan is not None
            probes, length = request.plan.plan.probes, len(prompt["prompt_token_ids"])
            self._most_scores += params.n * _most_scores(self.plan.probes, length, params.max_tokens or 0)
            if self._most_scores > MAX_SCORES:  # the server's event loop writes them as JSON
                allowed = f"up to {MAX_SCORES} over HTTP, all choices together: set a smaller max_tokens, or select fewer tokens"
                raise fields.refuse("the plan", f"probes with {self._most_scores} scores", allowed)
        self._graded.append(None)
        self._missing.append(())
        self._unfinished += 1
        self._server.planned += 1

        async def outputs() -> AsyncGenerator[Any]:
            with _refusing(), self._server.counting_prompts():
                async with model.connection.ready([request]) as (mailboxes,):
                    running = RunningRequest(request, *mailboxes, model.connection)
                    stream = generate(request.prompt, request.params, request_id, **rest)
                    async with contextlib.aclosing(running.outputs(stream)) as found:
                        async for output, result in found:
                            if probes:
                                self._note_scores(number * params.n, output, probes)
                            if result is not None:
                                if result.error is not None:
                                    raise result.error
                                self._missing[number] = result.missing
                                await self._finish(number, output)
                            yield output

        return outputs()

    def _note_scores(self, first: int, output: Any, probes: Sequence[Probe]) -> None:
        """Note the scores that have come for a prompt's choices, of which `first` is the first. `probes`: its own and the engine's."""
        for sample in output.outputs:
            choice = first + sample.index
            self._scored.setdefault(choice, _ScoredChoice()).chunks = chunks_of(sample)
            if stopping(probes, sample.stop_reason) is not None:
                self._stops[choice] = sample.stop_reason

    async def _finish(self, number: int, output: Any) -> None:
        if output.answers:
            values = output.answers.items()
            self._graded[number] = {str(answer): value if math.isfinite(value) else None for answer, value in values}
        samples = output.captures if isinstance(output.captures, list) else [output.captures]
        loop, put = asyncio.get_running_loop(), self._server.captures.put
        for sample, captured in enumerate(samples):
            if captured:
                choice = number * len(samples) + sample
                found = await loop.run_in_executor(None, put, self._owner, choice, captured, self.inline)
                self.inline -= sum(len(each["data"]) * 3 // 4 for each in found if "data" in each)  # from base64
                self._captures += found
        self._unfinished -= 1

    def answer(self) -> dict[str, Any]:
        """The response's field: `captures` and `scores` if the plan has any, and `answers`; for several prompts, a list of answers, and for
        several choices a list of scores. `stop_reason` if a probe has ended a choice. `warnings` about answers without their space.

        Empty if a prompt failed.
        """
        if self._unfinished:
            return {}
        for entry in self._captures:
            if entry["handle"] not in self._server.captures:  # the store had no room for all of them
                entry["handle"] = None
        in_order = sorted(self._captures, key=lambda entry: entry["choice"])  # prompts end in any order
        found: dict[str, Any] = {"captures": in_order} if self.plan.captures else {}
        if self.plan.probes:
            scores = [self._scored[choice].all(self.plan.probes) for choice in sorted(self._scored)]
            found["scores"] = scores[0] if len(scores) == 1 else scores
        if self._stops:
            stops = [self._stops.get(choice) for choice in sorted(self._scored)]
            found["stop_reason"] = stops[0] if len(stops) == 1 else stops
        if self.answers:
            found["answers"] = self._graded[0] if len(self._graded) == 1 else self._graded
        if (text := spaces_warning(self._missing)) is not None:
            found["warnings"] = [text]
        return found

    def _with_scores(self, event: str) -> str:
        """An event of a stream, with the scores that have come for its choice and were in no event before."""
        end = event.rfind("}")
        if not event.startswith("data: {") or end < 0:
            return event
        choice = next(iter(self._scored), 0)
        if len(self._scored) > 1:
            choices = json.loads(event[len("data: ") :]).get("choices") or [{}]
            choice = choices[0].get("index", -1)
        scored = self._scored.get(choice)
        new = scored.new(self.plan.probes) if scored is not None else {}
        return f"{event[:end]}, {json.dumps(NAME)}: {json.dumps({'scores': new})}{event[end:]}" if new else event

    def _end_of(self, choice: int, chunk: Mapping[str, Any]) -> dict[str, Any]:
        """The last event's entry for a choice that a probe has ended before its first token: vLLM sends no event for it."""
        end = {"index": choice, "finish_reason": "stop", "stop_reason": self._stops[choice], "logprobs": None}
        is_chat = str(chunk.get("object", "")).startswith("chat")
        return {**end, "delta": {}} if is_chat else {**end, "text": ""}

    async def streamed(self, events: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        """A stream's events, each with the scores that have come with its tokens. The field comes in one more event before `[DONE]`, or in
        the response of the last event.
        """
        chunk: dict[str, Any] = {}
        ended = set[int]()  # the choices whose end was in an event
        async for event in events:
            if isinstance(event, str):
                if event == _DONE:
                    choices = [self._end_of(choice, chunk) for choice in sorted(self._stops.keys() - ended)]
                    if (found := self.answer()) or choices:
                        yield f"data: {json.dumps({**chunk, 'choices': choices, NAME: found})}\n\n"
                elif event.startswith("data: {") and (not chunk or '"finish_reason":"' in event):
                    about = json.loads(event[len("data: ") :])
                    chunk = chunk or {
                        name: about[name] for name in ("id", "object", "created", "model") if name in about
                    }
                    ended |= {each["index"] for each in about.get("choices", ()) if each.get("finish_reason")}
                if self.plan.probes:
                    event = self._with_scores(event)
            elif self.plan.probes and getattr(event, "type", "") == "response.output_text.delta":
                if new := self._scored[0].new(self.plan.probes) if self._scored else {}:
                    setattr(event, NAME, {"scores": new})
            elif getattr(event, "type", "") == "response.completed" and (found := self.answer()):
                setattr(event.response, NAME, found)
            yield event


def answering(original: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of completions, chats or responses that reads the request's field, and adds the response's."""

    async def create(self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        extra, xargs = request.model_extra or {}, request.vllm_xargs or {}
        server = Server.of(self.engine_client)
        if server is None:
            return await original(self, request, raw_request, *args, **kwargs)
        is_watched = any(probe.stops for probe in server.model.plan.probes)
        if not (extra or xargs or is_watched):
            return await original(self, request, raw_request, *args, **kwargs)
        if (key := misspelt_key(extra)) is not None:
            raise as_client_error(misspelt_key_error("The request", key))
        given = extra.get(NAME, xargs.get(NAME))
        if given is None:
            if not is_watched or getattr(request, "use_beam_search", False) or getattr(request, "background", False):
                return await original(self, request, raw_request, *args, **kwargs)
            return await answered(
                self, request, raw_request, ServedRequest(server, Plan(), [], False, b""), *args, **kwargs
            )
        with _refusing(NAME):
            if NAME in extra and NAME in xargs:
                raise PlanError(f"The plan was given twice: as {NAME!r}, and in vllm_xargs.")
            if raw_request is not None and "/v1/" not in raw_request.scope["path"]:
                raise PlanError("Routes outside of /v1 take no plan: vLLM asks for no API key there.")
            for mode in ("use_beam_search", "background"):
                if getattr(request, mode, False):
                    raise PlanError(f"{mode} takes no plan: leave one of them out.")
        served = await server.read(given, owner_of(raw_request.headers if raw_request is not None else {}))
        extra.pop(NAME, None)
        return await answered(self, request, raw_request, served, *args, **kwargs)

    async def answered(
        self: Any, request: Any, raw_request: Any, served: ServedRequest, *args: Any, **kwargs: Any
    ) -> Any:
        request.vllm_xargs = {**(request.vllm_xargs or {}), NAME: served}
        response = await original(self, request, raw_request, *args, **kwargs)
        if hasattr(response, "__aiter__"):
            return served.streamed(response)
        if not hasattr(response, "error") and (found := served.answer()):
            setattr(response, NAME, found)
        return response

    return create


def running(original: Callable[..., Any]) -> Callable[..., Any]:
    """An `AsyncLLM.generate` that runs each request with the engine-wide plan, and then its own plan."""

    def generate(self: Any, prompt: Any, sampling_params: Any, request_id: str, **rest: Any) -> AsyncGenerator[Any]:
        given = (getattr(sampling_params, "extra_args", None) or {}).get(NAME)
        server = Server.of(self)
        if server is None or isinstance(given, Envelope) or (given is None and not server.model.plan):
            return original(self, prompt, sampling_params, request_id, **rest)  # type: ignore[no-any-return]

        def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]

        if given is None or isinstance(given, ServedRequest):
            served = given or ServedRequest(server, Plan(), [], False, b"")
            return served.run(stream, prompt, sampling_params, request_id, rest)
        return server.run_carried(given, stream, prompt, sampling_params, request_id, rest)

    return generate


def draining(original: Callable[..., None]) -> Callable[..., None]:
    """An `AsyncLLM.shutdown` that waits for running requests before it ends the engine, if it is given time.

    vLLM's own lets the engine end them, and then closes the connection to the engine, which may still carry the last outputs.
    """

    def shutdown(self: Any, timeout: float | None = None) -> None:
        server, begin = Server.of(self), time.monotonic()
        if server is not None and timeout and not self.errored and asyncio._get_running_loop() is None:
            server.is_draining = True
            while (server.running or self.output_processor.has_unfinished_requests()) and not self.errored:
                if time.monotonic() - begin >= timeout:
                    break
                time.sleep(_DRAIN_SECONDS)
            timeout = max(timeout - (time.monotonic() - begin), _DRAIN_SECONDS)
        original(self, timeout=timeout)

    return shutdown
