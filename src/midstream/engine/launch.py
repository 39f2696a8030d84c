"""Starts vLLM engines with midstream's worker and scheduler in them, and speaks to them for the client."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from typing import Any

from midstream.engine.lifeline import PREFIX, SOCKETS
from midstream.engine.plugin import register
from midstream.errors import EngineClosedError, MidstreamError, ParameterError, PromptError
from midstream.plan.values import Plan
from midstream.runtime.trace_request import TraceRequest
from midstream.settings import RECORD_BYTES, SCHEDULER, WORKER, Settings

DIED = "The engine died, or lost its results channel; its log says why. Start a new one."
_SHUTDOWN_SECONDS = 15.0
_NOTICE_SECONDS = 10.0
_BASE = "VLLM_RPC_BASE_PATH"
_LONGEST_DIRECTORY = 107 - 37  # what a socket's path may have, less a UUID


def engine_arguments(
    *,
    plan: Any = None,
    graph_sites: Sequence[str] = ("resid_post",),
    record_bytes: int = RECORD_BYTES,
    rename: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What makes a stock vLLM engine take plans: `vllm.LLM(model, **midstream.engine_arguments())`, or `AsyncEngineArgs`.

    Its requests carry plans as `SamplingParams(extra_args={"midstream": plan})`; what they capture goes to directories and consumers,
    for nobody waits at the client. It takes no traces, which are code.

    Args:
        plan: for every request, before its own; a `Plan` or a list of interventions, captures with `to=`.
        graph_sites: as for `midstream.VLLM`, which has all of this built in.
        record_bytes, rename: likewise.

    Raises:
        PlanError: `plan` is no plan, or has what cannot be sent to an engine.
        UnknownSiteError: `graph_sites` has a site that cannot be built in.
    """
    _loaded(register)  # vLLM does so by the package's entry points, which a source tree on the path has not
    text = Plan.of(plan).to_json() if plan is not None else None  # vLLM hashes the settings as JSON
    settings = Settings(False, dict(rename or {}), tuple(graph_sites), record_bytes, text)
    return {"worker_cls": WORKER, "scheduler_cls": SCHEDULER, "additional_config": settings.to_config()}


def llm_arguments(model: str, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine arguments with midstream's own among them. Raises MidstreamError if one of those is taken."""
    for name in ("worker_cls", "scheduler_cls"):
        if name in given:
            raise MidstreamError(
                f"{name} is what midstream puts itself into the engine by; it cannot be given as well."
            )
    return {
        **given,
        "model": model,
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "additional_config": settings.to_config(given.get("additional_config")),
    }


def start_llm(arguments: dict[str, Any]) -> Any:
    """A `vllm.LLM`."""

    def load() -> Any:
        register()
        from vllm import LLM

        return LLM

    make = _loaded(load)
    return _start(lambda: make(**arguments))


def start_async_llm(arguments: dict[str, Any]) -> Any:
    """A `vllm.v1.engine.async_llm.AsyncLLM`."""

    def load() -> Any:
        register()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    return _start(_loaded(load))


def _loaded(load: Callable[[], Any]) -> Any:
    """What `load` returns, which imports vLLM. On a thread of its own, for vLLM keeps errors of imports, and so all frames that led there:
    here those of the caller, with the engine in them. Seen on 0.32 without torchcodec."""
    with ThreadPoolExecutor(1, "midstream-import") as pool:
        return pool.submit(load).result()


def _start(start: Callable[[], Any]) -> Any:
    """An engine with a directory of its own for its sockets: vLLM leaves their files behind. Its processes remove it if the client dies."""
    before = {name: os.environ.get(name) for name in (_BASE, SOCKETS)}
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=before[_BASE])
    os.environ[SOCKETS] = os.path.abspath(directory)
    if len(directory) <= _LONGEST_DIRECTORY:
        os.environ[_BASE] = directory
    try:
        engine = start()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})
    if is_in_process(engine):  # it has no sockets, and nobody would remove the directory if it is killed
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    engine.midstream_sockets = directory
    return engine


def config_of(engine: Any) -> Any:
    """The engine's VllmConfig."""
    return engine.llm_engine.vllm_config if hasattr(engine, "llm_engine") else engine.vllm_config


def address_for_workers(config: Any) -> str | None:
    """Where workers on other hosts can reach this process, or None if there are none."""
    parallel = config.parallel_config
    if not parallel.use_ray and getattr(parallel, "nnodes", 1) == 1:
        return None
    from vllm.utils.network_utils import get_ip

    return get_ip()


def shut_down(engine: Any) -> None:
    """End the engine and its processes, with time to free their shared memory and sockets."""
    core = engine.llm_engine.engine_core if hasattr(engine, "llm_engine") else engine
    try:
        core.shutdown(timeout=_SHUTDOWN_SECONDS)
    finally:
        shutil.rmtree(engine.midstream_sockets, ignore_errors=True)


def is_in_process(engine: Any) -> bool:
    """Whether the engine runs in this very process, and so rests between calls."""
    return hasattr(engine, "llm_engine") and not engine.llm_engine.engine_core.__class__.__name__.startswith(
        ("Sync", "Async", "DP")
    )


def sampling_params(params: Mapping[str, Any], request: TraceRequest | None) -> Any:
    """`vllm.SamplingParams`; a traced request's prompt is computed in full, never read from the prefix cache. Raises ParameterError."""
    from vllm import SamplingParams

    extra = dict(params.get("extra_args") or {})
    given = {**params}
    if request is not None:
        given |= {"extra_args": {**extra, **request.to_extra_args()}, "skip_reading_prefix_cache": True}
    try:
        with _told():
            made = SamplingParams(**given)
    except TypeError as error:
        raise ParameterError(f"Not a sampling parameter of vLLM: {error}") from error
    if hasattr(made, "skip_clone"):  # each request has its own: vLLM need not copy them deeply
        made.skip_clone = True
    return made


def engine_prompt(token_ids: Sequence[int], salt: str | None) -> dict[str, Any]:
    """A prompt for vLLM. Blocks of a salted prompt are keyed by the salt: its KV is nobody else's."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
    return {**prompt, "cache_salt": salt} if salt is not None else prompt


def check_prompts(config: Any, prompts: Sequence[Sequence[int]], together: bool) -> None:
    """Refuse what cannot be traced in one piece; `prompts` has one for each sample. Raises PromptError."""
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    budget = scheduler.max_num_batched_tokens
    for ids in prompts:
        if len(ids) >= longest:
            raise PromptError(
                f"The prompt has {len(ids)} tokens; with max_model_len={longest} there is room for {longest - 1}."
            )
        if len(ids) > budget:
            raise PromptError(
                f"A traced prompt is computed in one step, and this one has {len(ids)} tokens; a step takes {budget}. "
                "Start the engine with a larger max_num_batched_tokens, or shorten the prompt."
            )
    if together and (sum(map(len, prompts)) > budget or len(prompts) > scheduler.max_num_seqs):
        raise PromptError(
            f"Invokes that wait for each other run in the same step: {len(prompts)} prompts, counted once for each "
            f"sample, of {sum(map(len, prompts))} tokens together do not fit into max_num_batched_tokens={budget}, "
            f"max_num_seqs={scheduler.max_num_seqs}."
        )


def ask(engine: Any, method: str, *args: Any) -> Any:
    """What each worker's `method` returns; to be awaited on an `AsyncLLM`. Raises EngineClosedError if the engine is dead."""
    with _told():
        answers = engine.collective_rpc(method, args=args)
    return _awaited(answers) if inspect.isawaitable(answers) else answers


async def _awaited(answers: Awaitable[Any]) -> Any:
    with _told():
        return await answers


def let_go(llm: Any) -> None:
    """Raise to whoever waits for a dead `vllm.LLM`, once vLLM knows that it is.

    It leaves them waiting where the engine's own process was killed (vLLM 0.26 to 0.33).
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    core = llm.llm_engine.engine_core
    deadline = time.monotonic() + _NOTICE_SECONDS
    while not core.resources.engine_dead:
        if time.monotonic() > deadline:  # a worker's connection alone was lost
            return
        time.sleep(0.05)
    core.outputs_queue.put_nowait(EngineDeadError())
    for answer in list(core.utility_results.values()):
        with contextlib.suppress(InvalidStateError):
            answer.set_exception(EngineDeadError())


def generate(
    llm: Any, prompts: list[dict[str, Any]], params: list[Any], progress: bool, finished: Callable[[Any], None]
) -> list[Any]:
    """Run requests on a `vllm.LLM` to their end. Interrupted, it takes them off the engine.

    `finished` is called with each request's output as soon as it has ended, between two steps.
    """
    with _told(), _telling(llm.llm_engine, finished):
        try:
            return llm.generate(prompts, params, use_tqdm=progress)
        except BaseException:
            # What interrupted it says more; a dead engine has dropped them as well.
            with contextlib.suppress(Exception):
                _abort_all(llm)
            raise


@contextlib.contextmanager
def _telling(engine: Any, finished: Callable[[Any], None]) -> Iterator[None]:
    """`vllm.LLM.generate` hands out no output before the last request has ended. The steps that it runs have each of them before."""
    step, is_wrapped = engine.step, "step" in vars(engine)

    def told() -> list[Any]:
        outputs = step()
        for output in outputs:
            if output.finished:
                finished(output)
        return outputs

    engine.step = told
    try:
        yield
    finally:
        del engine.step
        if is_wrapped:
            engine.step = step


def _abort_all(llm: Any) -> None:
    engine = llm.llm_engine
    pending = list(engine.output_processor.request_states)
    if pending:
        engine.abort_request(pending, internal=True)


async def stream(engine: Any, prompt: dict[str, Any], params: Any, request_id: str) -> AsyncGenerator[Any]:
    """The outputs of one request on an `AsyncLLM`. Cancelled or closed, it takes it off the engine."""
    with _told():
        async with contextlib.aclosing(engine.generate(prompt, params, request_id)) as outputs:
            async for output in outputs:
                yield output


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """vLLM's errors of the engine's death, and those that refuse a request, as midstream's own."""
    try:
        yield
    except Exception as error:
        if (own := _own_error(error)) is not None:
            raise own from error
        raise


def _own_error(error: Exception) -> MidstreamError | None:
    kinds = {each.__name__ for each in type(error).__mro__}
    if "EngineDeadError" in kinds:
        return EngineClosedError(DIED)
    if not kinds & {"VLLMClientError", "VLLMValidationError"} and not ("ValueError" in kinds and _is_of_input(error)):
        return None
    text = str(error)
    if text.startswith("Token id") or "prompt (length" in text or "context length" in text:
        return PromptError(f"vLLM does not take this prompt: {text}")
    return ParameterError(f"vLLM does not take these sampling parameters: {text}")


def _is_of_input(error: BaseException) -> bool:
    """Whether it was raised where vLLM looks at what it is given: not all of that has a class of its own in 0.26."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return module.startswith(
        ("vllm.sampling_params", "vllm.v1.engine.input_processor", "vllm.renderers", "vllm.inputs")
    )
