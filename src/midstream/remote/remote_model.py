"""`Remote`: traces and plans on a model that `midstream serve` runs on another machine. The client needs neither vLLM nor a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import metadata
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import quote

import httpx
import msgspec

from midstream import errors
from midstream.capture.consumers import Collected
from midstream.capture.sinks import RequestCapture, Sinks
from midstream.client.described import DescribedModel
from midstream.errors import ChannelError, MidstreamError, ParameterError, PlanError, RemoteError, about
from midstream.lowering import taping
from midstream.lowering.client_traces import Ending
from midstream.lowering.tiers import Lowering
from midstream.plan.fields import nearest
from midstream.plan.probes import rows_end
from midstream.plan.selections import Selector
from midstream.plan.strangers import check_strangers
from midstream.plan.values import Plan, RecordedRun, Span
from midstream.plan.vectors import read_vectors, written_vectors
from midstream.plan.wire import MAX_STRANGERS_BYTES
from midstream.remote.calls import MAX_PROMPTS, MAX_TOKENS, CallEntry, Progress, RemoteCall, as_msgpack
from midstream.requests.arguments import Answers, Prompt, answers_by_prompt, engine_params, in_turn, warn_of_second_bos
from midstream.requests.invokes import (
    Called,
    Invoke,
    InvokeResult,
    Item,
    OutputStream,
    PreparedPlan,
    has_destinations,
    with_whole_rows,
)
from midstream.requests.vectors_and_runs import RunInfo, RunRequest, Runs, Vectors, run_now
from midstream.runtime.request import Tier
from midstream.sae import SAE
from midstream.settings import NAME
from midstream.sweeps.cells import MLPS, Metric, SweepRequest
from midstream.sweeps.events import Event, Outline, decode_event
from midstream.sweeps.results import SweepResult
from midstream.trace.shipping import ShippedCode
from midstream.transport.data import MessageReader

API_KEY, ADMIN_KEY = "MIDSTREAM_API_KEY", "MIDSTREAM_ADMIN_KEY"  # environment variables
# While it computes, a server sends a sign of life every few seconds.
_TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)


class ServerConnection:
    """The routes of one server under /v1/midstream.

    Args:
        url: without the path.
        keys: the API key and the administrator's.
    """

    def __init__(self, url: str, *keys: str | None) -> None:
        self._clients: dict[int, httpx.Client] = {}  # by process: a fork must not share its parent's connections
        self.url = url.rstrip("/").removesuffix("/v1")
        names = ("Authorization", "X-Midstream-Admin")
        forms = ("Bearer {}", "{}")
        headers = {
            name: form.format(key) for name, form, key in zip(names, forms, keys, strict=True) if key is not None
        }
        headers["Accept-Encoding"] = "identity"  # a proxy that compresses would hold messages back
        self._settings: Any = {"headers": headers, "timeout": _TIMEOUT, "verify": httpx.create_ssl_context()}

    @property
    def _client(self) -> httpx.Client:
        process = os.getpid()
        if process not in self._clients:
            self._clients[process] = httpx.Client(**self._settings)
        return self._clients[process]

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request, and return the response. Raises the server's error in its own class, or RemoteError."""
        with self._response(method, path, **request) as response:
            response.read()
        return response

    def messages(self, call: RemoteCall, progress: Progress) -> Iterator[Item]:
        """The outputs of a call as they come. Closing the iterator ends the requests on the server."""
        reader, content = MessageReader(), msgspec.msgpack.encode(call)
        with self._response("POST", "generate", progress, content=content) as response:
            for data in response.iter_raw():
                yield from filter(None, map(progress.read, reader.feed(data)))
            progress.check_over()

    async def async_messages(self, call: RemoteCall, progress: Progress) -> AsyncIterator[Item]:
        """As `messages`."""
        reader, content = MessageReader(), msgspec.msgpack.encode(call)
        async with self._async_response("generate", progress, content=content) as response:
            async for data in response.aiter_raw():
                for item in filter(None, map(progress.read, reader.feed(data))):
                    yield item
            progress.check_over()

    async def events(self, route: str, asked: dict[str, Any], is_async: bool) -> AsyncGenerator[Event]:
        """The events of a sweep as they come. Without `is_async` it never waits on an event loop."""
        if is_async:
            async with self._async_response(route, json=asked) as response:
                async for line in response.aiter_lines():
                    if (event := _event(line)) is not None:
                        yield event
        else:
            with self._response("POST", route, json=asked) as response:
                for line in response.iter_lines():
                    if (event := _event(line)) is not None:
                        yield event

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, progress: Progress | None = None, **request: Any
    ) -> Iterator[httpx.Response]:
        """A block in which the response can be read. Raises the errors of `ask`."""
        with self._errors(progress), self._client.stream(method, self._at(path), **request) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield response

    @contextlib.asynccontextmanager
    async def _async_response(
        self, path: str, progress: Progress | None = None, **request: Any
    ) -> AsyncIterator[httpx.Response]:
        """As `_response`, with POST."""
        async with httpx.AsyncClient(**self._settings) as client:
            with self._errors(progress):
                async with client.stream("POST", self._at(path), **request) as response:
                    if response.is_error:
                        await response.aread()
                        raise _refusal(response)
                    yield response

    def close(self) -> None:
        self._client.close()

    def __del__(self) -> None:
        if (client := self._clients.get(os.getpid())) is not None:
            client.close()

    def _at(self, path: str) -> str:
        return f"{self.url}/v1/{NAME}/{path}"

    @contextlib.contextmanager
    def _errors(self, progress: Progress | None = None) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise RemoteError(
                f"No server can be reached at {self.url}: {error}. Start one by `midstream serve MODEL`."
            ) from error
        except (httpx.HTTPError, ChannelError) as error:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            if progress is None:
                raise RemoteError(f"The connection to {self.url} was lost ({reason}).") from error
            raise progress.lost_error(self.url, reason) from error


def _event(line: str) -> Event | None:
    """The event in a line of a sweep's stream; None if the line has no data. Raises the error that a line may have in place of an event."""
    if not line.startswith("data: "):
        return None
    try:
        return decode_event(line.removeprefix("data: "))
    except msgspec.MsgspecError:
        raise _error_of(json.loads(line.removeprefix("data: "))["error"], 500) from None


def _error_of(error: Mapping[str, Any], status: int) -> MidstreamError:
    """The server's error, in its own class or as a RemoteError."""
    cls = getattr(errors, str(error.get("type")), None)
    text, field = error["message"], error.get("param")
    if isinstance(cls, type) and issubclass(cls, MidstreamError):
        return cls(text, field=field)
    return RemoteError(f"{status}: {text}", field=field)


def _refusal(response: httpx.Response) -> MidstreamError:
    """The error of a response with an error status."""
    error: Any = {"message": response.text[:200]}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        given = response.json()["error"]
        error = given if isinstance(given, dict) and "message" in given else {"message": given}
    if response.status_code == 401:
        error["message"] = (
            f"The server wants its API key: Remote(url, api_key=...), or the environment variable {API_KEY}."
        )
    elif response.status_code == 404 and error.get("type") != "NotFoundError":
        error["message"] = "There is no midstream at this address. Start the server by `midstream serve MODEL`."
    return _error_of(error, response.status_code)


_AHEAD = 256  # outputs of a call that may wait for their reader


class CaptureForwarder:
    """Hands the captured rows of one request on to the consumers in its plan, after the server has sent all rows."""

    def __init__(self, plan: PreparedPlan, collected: Collected | None, sinks: Sinks) -> None:
        self._plan, self._collected, self._sinks = plan, collected, sinks
        self._captures: list[tuple[RequestCapture, int]] = []  # of each sample, with the position where its rows stop

    def take(self, result: InvokeResult) -> None:
        """Give the rows to the consumers."""
        if result.error is not None:
            return
        output = result.output
        captured = output.captures if isinstance(output.captures, list) else [output.captures]
        try:
            for sample, planes in zip(output.outputs, captured, strict=True):
                name = f"{sample.index}_{output.request_id}" if len(captured) > 1 else output.request_id
                capture = self._plan.capture(name, self._sinks, self._collected)
                stop = rows_end(
                    self._plan.plan.probes, sample, sample.scores, len(self._plan.prompt) + len(sample.token_ids) - 1
                )
                self._captures.append((capture, stop))
                capture.add(planes.rows())
                capture.end(stop)
        except MidstreamError as error:
            result.error = error

    async def delivered(self) -> None:
        """Wait until the consumers have taken the rows."""
        for capture, _ in self._captures:
            await capture.delivered()

    def discard(self) -> None:
        """Drop the rows: the caller no longer reads the outputs."""
        for capture, _ in self._captures:
            capture.discard()

    def finish(self, result: InvokeResult) -> None:
        """Wait for the consumers. Put the output's own captures on the output, or an error on the result."""
        try:
            captures = [capture.result(stop) for capture, stop in self._captures]
            result.output.captures = captures[0] if len(captures) == 1 else captures
        except MidstreamError as error:
            result.error, result.output.captures = result.error or error, None


class RemoteStream(OutputStream):
    """The outputs of requests on a server.

    Args:
        calls: the calls, each with the `Progress` that reads its results. They are sent one after the other.
        forwarders: for each call, the forwarders of its requests, by the requests' numbers.
    """

    def __init__(
        self,
        server: ServerConnection,
        calls: Sequence[tuple[RemoteCall, Progress]],
        forwarders: Sequence[dict[int, CaptureForwarder]],
    ) -> None:
        super().__init__()
        self._server, self._calls, self._forwarders = server, calls, forwarders

    def running(self) -> contextlib.AbstractAsyncContextManager[AsyncIterator[Item]]:
        return contextlib.aclosing(self._items())

    async def _items(self) -> AsyncGenerator[Item]:
        queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(_AHEAD)
        unfinished: set[CaptureForwarder] = set()

        async def deliver(item: Item, forwarder: CaptureForwarder) -> None:
            """Queue an output once the consumers have its rows. Other outputs do not wait for it."""
            assert item[2] is not None
            await forwarder.delivered()
            forwarder.finish(item[2])
            unfinished.discard(forwarder)
            await queue.put(item)

        async def read() -> None:
            before = 0
            async with asyncio.TaskGroup() as delivering:
                for (call, progress), forwarders in zip(self._calls, self._forwarders, strict=True):
                    messages: Any = self._server.async_messages(call, progress)
                    async with contextlib.aclosing(messages):
                        async for index, output, result in messages:
                            item = before + index, output, result
                            if result is not None and (forwarder := forwarders.get(index)) is not None:
                                unfinished.add(forwarder)
                                await asyncio.to_thread(forwarder.take, result)
                                delivering.create_task(deliver(item, forwarder))
                            else:
                                await queue.put(item)
                    before += len(call.asked)

            await queue.put(None)

        async def read_to_the_end() -> None:
            try:
                await read()
            except ExceptionGroup as group:
                await queue.put(group.exceptions[0])

        reading = asyncio.create_task(read_to_the_end())
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            for forwarder in unfinished:
                forwarder.discard()


class RemoteSweep:
    """A sweep that a server runs.

    Args:
        route: the last part of the request's path.
        asked: the body of the request.
        metric: grades the cells.

    Attributes:
        result: None until the server has begun.
    """

    def __init__(
        self, server: ServerConnection, route: str, asked: dict[str, Any], metric: Metric, is_async: bool
    ) -> None:
        self._server, self._route, self._ask, self._metric, self._is_async = server, route, asked, metric, is_async
        self.result: SweepResult | None = None

    async def events(self) -> AsyncGenerator[Event]:
        """The sweep's events as they come. Closing the generator ends the sweep on the server."""
        try:
            events_of_server = self._server.events(self._route, self._ask, self._is_async)
            async with contextlib.aclosing(events_of_server) as events:
                async for event in events:
                    if isinstance(event, Outline):
                        self.result = SweepResult(event, self._metric)
                    assert self.result is not None
                    yield self.result.take(event)
            if self.result is None or self.result.summary is None:
                raise RemoteError("The server ended the sweep early.")
        except MidstreamError as error:
            error.result = self.result  # type: ignore[attr-defined]
            raise


class RemoteRuns(Runs):
    """The recorded runs on a server, of all clients. It sends requests by `Remote._ask`."""

    async def _list(self) -> list[RunInfo]:
        runs = (await self._ask("GET", "runs")).json()["runs"]
        self._handles = {name: _handle(name, run) for name, run in runs.items()}
        fields, lists = ("id", "bytes", "leases"), ("sites", "layers", "positions")
        return [
            RunInfo(name, *(run[each] for each in fields), *(tuple(run[each]) for each in lists))
            for name, run in runs.items()
        ]

    async def add(self, run: RecordedRun) -> RecordedRun:
        """Add a run that the server has recorded. The server has already deleted an older run of the same name."""
        self._handles[run.name] = run
        return run

    async def _delete(self, run: RecordedRun) -> None:
        await self._ask("DELETE", f"runs/{quote(run.name, safe='')}")


def _handle(name: str, run: dict[str, Any]) -> RecordedRun:
    lists = ("prompt_token_ids", "sites", "layers", "positions")
    return RecordedRun(name, run["id"], *(tuple(run[each]) for each in lists))


class Remote(DescribedModel):
    """A model on a server that `midstream serve MODEL` has started, with the interface of `VLLM`.

        model = Remote("http://gpu-server:8000", api_key="my-key")
        outputs = model.generate(prompts, plan=Steer("resid_post", layers=14, vector=v, scale=4.0), max_tokens=64)
        with model.trace("The Eiffel Tower is in"):   # on servers with --midstream-allow-traces
            h = model.layers_output[8].save()         # [tokens, hidden], on the CPU of this machine

    Interrupting a call, for example by Ctrl-C, ends its requests on the server. Traces need the server's minor version of Python and its
    version of midstream, because their code travels as bytecode. They can save tensors, numbers, texts and containers of these.

    Args:
        url: the server's address, `http://host:port`.
        api_key: one of the server's API keys; None takes it from the environment variable MIDSTREAM_API_KEY.
        mode: as in `VLLM`.
        admin_key: the server's key for administration, which is needed to set `engine_plan`; None takes it from MIDSTREAM_ADMIN_KEY.
        progress: the default of `progress` for the model's calls, such as `generate`.

    Attributes:
        plan: the plan of every request of this object except `record`. `engine_plan` is the plan of all clients.
        vectors, saes, runs: named vectors, sparse autoencoders and recorded runs on the server. Only the API key that made one, or an
            administrator, may replace or delete it.

    Raises:
        RemoteError: the server cannot be reached, or refuses the key.
    """

    _is_elsewhere = True
    adapter_argument = "model"

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        mode: Literal["sync", "async"] = "sync",
        admin_key: str | None = None,
        progress: bool | None = None,
    ) -> None:
        if mode not in ("sync", "async"):
            raise MidstreamError(f'mode is "sync" or "async"; {mode!r} was given.')
        self.edits, self.progress = {}, progress
        self.mode, self._is_async = mode, mode == "async"
        keys = (api_key or os.environ.get(API_KEY), admin_key or os.environ.get(ADMIN_KEY))
        taping.start()
        self._connection = ServerConnection(url, *keys)
        self._description = self._connection.ask("GET", "description").json()
        self.model_name = self._description["model"]
        self.vectors = RemoteVectors(self._connection)
        self.saes = RemoteSAEs(self._connection)
        self.runs = RemoteRuns(self._ask, None if self._is_async else run_now)
        self.sinks = Sinks()

    @property
    def url(self) -> str:
        """Where the server is, without a path."""
        return self._connection.url

    @property
    def description(self) -> dict[str, Any]:
        """The module tree, its shapes and sites, from the server's workers."""
        return self._description

    @property
    def _generation(self) -> Mapping[str, Any]:
        return self._description.get("generation", {})  # type: ignore[no-any-return]

    @property
    def _text_config(self) -> Any:
        return SimpleNamespace(**self._description["config"])

    def _check_adapter(self, adapter: Any) -> None:
        if not isinstance(adapter, str) or not adapter:
            text = (
                f"model is {adapter!r}. Allowed: the name that the server has for an adapter, None, or a list of these."
            )
            raise ParameterError(text, field="model")

    def name_of_adapter(self, adapter: Any) -> str:
        """The adapter's name, as collections and sweeps record it."""
        return str(adapter)

    @cached_property
    def config(self) -> Any:
        """The model's transformers configuration, from the server."""
        from transformers import AutoConfig

        fields = dict(self._description["hf_config"])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)

    @property
    def longest_prompt(self) -> int:
        return self._description["max_model_len"] - 1

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from the server."""
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        found = self._connection.ask("GET", "tokenizer").json()
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(found["tokenizer"]), **found["settings"])

    @property
    def engine_plan(self) -> Plan:
        """The plan of every request of every client of the server. Setting it needs `admin_key`; None deletes it."""
        return Plan.from_wire(self._connection.ask("GET", "plan").json()["plan"])

    @engine_plan.setter
    def engine_plan(self, plan: Any) -> None:
        if plan is None:
            self._connection.ask("DELETE", "plan")
        else:
            self._connection.ask("PUT", "plan", json={"plan": json.loads(Plan.of(plan).to_json())})

    def gauges(self) -> Any:
        """As `VLLM.gauges`: a dict of counts for each of the server's workers."""

        async def asked() -> Any:
            return (await self._ask("GET", "gauges")).json()["workers"]

        return self._finish(asked())

    def close(self) -> None:
        """Wait until consumers and directories have taken their rows, and close the connections to the server."""
        self.sinks.close()
        self._connection.close()

    async def _recording(self, asked: RunRequest) -> RecordedRun:
        """Have the server record a run. The server's engine-wide plan applies; this object's plan does not. The API key owns the run."""
        body = {
            "prompt": self._prompt_data(asked.prompt),
            "sites": asked.checked_sites(),
            "layers": _listed(asked.layers),
            "positions": _positions(asked.positions),
            "replace": asked.name is not None,
            **({} if asked.name is None else {"name": asked.name}),
            **({} if asked.adapter is None else {"model": asked.adapter}),
        }
        ((name, run),) = (await self._ask("POST", "runs", json=body)).json()["runs"].items()
        return await self.runs.add(_handle(name, run))

    async def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        if not self._is_async:
            return self._connection.ask(method, path, **request)
        return await asyncio.to_thread(lambda: self._connection.ask(method, path, **request))

    def _sweeping(self, asked: SweepRequest, to: Any) -> RemoteSweep:
        """Have the server run the sweep. The server's engine-wide plan applies, and this object's plan does not."""
        if to is not None:
            raise ParameterError("to: a Remote writes no cells as they come. Save the result: result.save(path).")
        metric, foil = asked.metric, None if asked.foil == [None] * len(asked.foil) else asked.foil
        if callable(metric):
            metric = "logit_diff" if foil else "logprob"
        if asked.paths is None:
            route, names = "sweeps", ("source", "coarse", "best", "top", "sites")
            own = {name: getattr(asked, name) for name in names}
        else:
            route, receivers = "path_patching", asked.paths.receivers
            own = {
                "receivers": "logits" if receivers is None else receivers,
                "freeze_mlps": MLPS in asked.paths.frozen,
            }
        given = own | {
            "direction": asked.direction,
            "answer": asked.answer,
            "layers": _listed(asked.layers),
            "heads": _listed(asked.heads),
            "clean": self._all_prompt_data("clean", asked.clean),
            "corrupt": None if asked.corrupt is None else self._all_prompt_data("corrupt", asked.corrupt),
            "positions": _sweep_positions(asked.positions),
            "metric": metric,
            "foil": foil,
            **({} if asked.adapter is None else {"model": asked.adapter}),
        }
        return RemoteSweep(self._connection, route, given, asked.metric, self._is_async)

    def _prompt_data(self, prompt: Prompt) -> str | list[int]:
        """The prompt in the form for the server. Raises PromptError for a prompt that its model cannot take."""
        with contextlib.suppress(UnicodeEncodeError):  # `ids_of` raises an error that says where
            if isinstance(prompt, str) and 0 < len(prompt.encode()) <= self.longest_prompt:
                self._warn_of_second_bos(prompt)
                return prompt  # short enough: no token is shorter than a byte
        (ids,) = self.ids_of([prompt])
        return prompt if isinstance(prompt, str) else ids

    def _all_prompt_data(self, name: str, prompts: Sequence[Prompt]) -> list[str | list[int]]:
        """The prompts of a sweep's argument, in the form for the server. Raises PromptError with the number of the prompt."""
        with about(name):
            return in_turn(self._prompt_data, prompts)

    def _warn_of_second_bos(self, text: str) -> None:
        """Warn here, since the server warns in its own log."""
        if text.startswith(("<", "[")):  # perhaps a special token
            with contextlib.suppress(MidstreamError):  # a tokenizer without a JSON form
                warn_of_second_bos(self.tokenizer(text)["input_ids"], self.tokenizer)

    # Running.

    def _run(self, invokes: list[Invoke], together: bool = False) -> OutputStream:
        invokes = self._with_programs(self._with_plan(invokes))
        prompts = in_turn(self._prompt_data, [invoke.prompt for invoke in invokes])
        invokes = [replace(invoke, prompt=prompt) for invoke, prompt in zip(invokes, prompts, strict=True)]
        parts = [invokes] if together else list(_parts(invokes))
        calls = [self._call(part, together) for part in parts]
        forwarders = [self._forwarders(part) for part in parts]
        if self._is_async:
            return RemoteStream(self._connection, calls, forwarders)

        def run(ended: Callable[[int], object]) -> list[InvokeResult]:
            results = []
            for (call, progress), own_forwarders in zip(calls, forwarders, strict=True):
                for index, _, result in self._connection.messages(call, progress):
                    if result is not None:
                        ended(1)
                        if index in own_forwarders:
                            own_forwarders[index].take(result)
                for index, forwarder in own_forwarders.items():
                    forwarder.finish(progress.results[index])
                results += [progress.results[i] for i in range(len(call.asked))]
            return results

        return Called(run)

    def _call(self, invokes: Sequence[Invoke], together: bool) -> tuple[RemoteCall, Progress]:
        """The call, and the `Progress` that reads its results. The call has no code if plans do all of the server's work for traces."""
        call = RemoteCall(metadata.version(NAME), [], [], self._is_async, together)
        endings: list[Ending | None] = [None] * len(invokes)
        plans: dict[Plan, int] = {}
        if (code := self._code(invokes)) is not None:
            lowering, prompts = self._lowered(invokes, code, together)
            if lowering.tier in (Tier.PLAN, Tier.CLIENT):
                endings = [
                    one.ending(lowering.tier) if invoke.program is not None else None
                    for invoke, one in zip(invokes, lowering.each, strict=True)
                ]
                call.own = [plans.setdefault(plan, len(plans)) for plan in lowering.plans]
                invokes = [
                    replace(invoke, prompt=ids, plan=invoke.plan + plan)
                    for invoke, ids, plan in zip(invokes, prompts, lowering.plans, strict=True)
                ]
            else:
                call.programs, call.bodies, call.keeps_to_graphs = code.programs, code.bodies, lowering.keeps_to_graphs
                if lowering.tier is not Tier.FORWARD:
                    call.tier, call.lengths = lowering.tier, list(map(len, prompts))
                    call.own = [plans.setdefault(plan, len(plans)) for plan in lowering.plans]
        for invoke in invokes:
            plan = with_whole_rows(invoke.plan) if has_destinations(invoke.plan) else invoke.plan
            number = plans.setdefault(plan, len(plans)) if plan else None
            parts = (invoke.prompt, _params(invoke.params), list(invoke.answers))
            prompt, params, answers = map(as_msgpack, parts)
            call.asked.append(CallEntry(prompt, params, number, answers, invoke.adapter))
        call.plans = [as_msgpack(self._sent(plan).to_wire()) for plan in plans]
        return call, Progress(endings, [invoke.plan.probes for invoke in invokes])

    def _sent(self, plan: Plan) -> Plan:
        """The plan; without the large constants of its programs, if the SAEs on the server contain all of them."""
        held, data = plan.held
        return held if data and data.keys() <= self.saes.constants else plan

    def _lowered(
        self, invokes: Sequence[Invoke], code: ShippedCode, together: bool
    ) -> tuple[Lowering, list[list[int]]]:
        """How the traces run, and the prompts' token ids."""
        prompts, given = self._all_token_ids(invokes), [invoke.plan for invoke in invokes]
        lowering = self._lower(invokes, prompts, code)
        streams = self._is_async and any(invoke.is_streamed for invoke in invokes)
        if together or streams or any(invoke.params.get("n", 1) > 1 for invoke in invokes):
            lowering = lowering.in_the_engine()
        own = dict.fromkeys(lowering.plans)
        try:
            for plan in own:
                check_strangers(plan, self.num_layers, self.device_type)
            fits = (
                len({*own, *given}) <= MAX_PROMPTS
                and sum(len(as_msgpack(plan.to_wire())) for plan in own) <= MAX_STRANGERS_BYTES
            )
            fits = fits and (not any(given) or lowering.stands_beside(given, self.num_layers))
        except PlanError:  # more than a server takes
            fits = False
        return lowering if fits else replace(lowering, tier=Tier.FORWARD), prompts

    def _forwarders(self, invokes: Sequence[Invoke]) -> dict[int, CaptureForwarder]:
        """The forwarders of invokes whose captured rows go to consumers, by their numbers."""
        found = {}
        for i, invoke in enumerate(invokes):
            if has_destinations(invoke.plan):
                plan = self.planner.prepare(invoke.plan, invoke.prompt, self._token_ids(invoke), invoke.params)
                found[i] = CaptureForwarder(plan, invoke.collected, self.sinks)
        return found

    def _answer_tokens(self, given: Any, prompts: int) -> list[Answers]:
        """The answers of each prompt; the server finds their token ids."""
        return [Answers(dict.fromkeys(answers, -1)) for answers in answers_by_prompt(given, prompts)]


class _OnServer(MutableMapping[str, Any]):
    """Named things on a server, of all clients. Each read and each change is a request to the server, and may raise its error.

    Attributes:
        _kind: the name of the routes, such as "vectors".
        _called: the word for one of the things in messages, such as "vector".
    """

    _kind: str
    _called: str

    def __init__(self, server: ServerConnection) -> None:
        super().__init__()
        self._server = server

    def _listed(self) -> dict[str, dict[str, Any]]:
        return self._server.ask("GET", self._kind).json()[self._kind]  # type: ignore[no-any-return]

    def _path(self, name: str) -> str:
        return f"{self._kind}/{quote(name, safe='')}"

    def _check(self, name: str) -> None:
        if name not in (there := self._listed()):
            raise KeyError(f"no {self._called} {name!r}: {nearest(str(name), there)}")

    def _file(self, name: str) -> bytes:
        self._check(name)
        return self._server.ask("GET", self._path(name)).content

    def __delitem__(self, name: str) -> None:
        self._check(name)
        self._server.ask("DELETE", self._path(name))

    def __contains__(self, name: object) -> bool:
        return name in self._listed()

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())


class RemoteVectors(_OnServer, Vectors):
    """The named vectors on a server."""

    _kind, _called = "vectors", "vector"

    @property
    def widths(self) -> dict[str, int]:
        return {name: each["width"] for name, each in self._listed().items()}

    @property
    def digests(self) -> dict[str, str]:
        return {name: each["digest"] for name, each in self._listed().items()}

    def __getitem__(self, name: str) -> Any:
        return read_vectors(self._file(name), name)[name]

    def _put(self, vectors: dict[str, Any]) -> None:
        self._server.ask("POST", "vectors?replace=true", content=written_vectors(vectors))


class RemoteSAEs(_OnServer):
    """The sparse autoencoders on a server. A plan that uses only these is sent without their large matrices."""

    _kind, _called = "saes", "SAE"

    @property
    def constants(self) -> set[str]:
        """The digests of the large matrices of all SAEs on the server."""
        return {digest for about in self._listed().values() for digest in about["constants"]}

    def __getitem__(self, name: str) -> SAE:
        return SAE.read(self._file(name))

    def __setitem__(self, name: str, sae: SAE) -> None:
        self._server.ask("POST", f"{self._path(name)}?replace=true", content=sae.written())


def _parts(invokes: Sequence[Invoke]) -> Iterator[list[Invoke]]:
    """The invokes in parts that fit into one call each."""
    part, size = list[Invoke](), 0
    for invoke in invokes:
        length = len(invoke.prompt)
        if part and (len(part) == MAX_PROMPTS or size + length > MAX_TOKENS):
            yield part
            part, size = [], 0
        part.append(invoke)
        size += length
    yield part


def _listed(given: Any) -> Any:
    """Numbers as a list; "all" and None as they are."""
    return given if given is None or isinstance(given, str) else [given] if isinstance(given, int) else list(given)


def _place(entry: Any) -> Any:
    return {"span": entry.text, "occurrence": entry.occurrence} if isinstance(entry, Span) else entry


def _positions(positions: Any) -> Any:
    if isinstance(positions, Selector):
        return {"selector": positions.kind, "options": positions.options}
    return _place(positions) if isinstance(positions, Span) else _listed(positions)


def _sweep_positions(positions: Any) -> Any:
    if isinstance(positions, dict):
        entries = positions.items()
        return {
            name: [*map(_place, each)] if isinstance(each, (list, tuple)) else _place(each) for name, each in entries
        }
    if isinstance(positions, (list, tuple, range)):
        return [*map(_place, positions)]
    return positions if positions in ("all", "together") else [_place(positions)]


def _params(params: dict[str, Any]) -> dict[str, Any]:
    for name in ("extra_args", "output_kind"):
        if name in params:
            raise ParameterError(f"{name} is not for Remote. A plan is given as plan=.")
    given = engine_params(params)
    return {name: list(value) if isinstance(value, (set, tuple)) else value for name, value in given.items()}
