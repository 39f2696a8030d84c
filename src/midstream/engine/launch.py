"""Starts vLLM engines with midstream's worker and scheduler, and sends them the client's requests and calls."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from midstream.arch.aliases import Rename, names_alone
from midstream.engine.log import new_log
from midstream.engine.plugin import PREFIX, SOCKETS, register
from midstream.engine.unguarded import refuse_in_import
from midstream.errors import EngineClosedError, MidstreamError, ParameterError, PromptError
from midstream.plan.fields import nearest
from midstream.plan.probes import ScoreChunk
from midstream.plan.values import Plan
from midstream.runtime.request import TraceRequest, users_id
from midstream.settings import GRAPH_BYTES, NAME, RECORD_BYTES, SCHEDULER, WORKER, Settings, chosen_graph_sites

_SHUTDOWN_SECONDS, _HURRY_SECONDS = 15.0, 0.3
_NOTICE_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # between two looks at whether the engine is alive
_BASE = "VLLM_RPC_BASE_PATH"
_LONGEST_DIRECTORY = 107 - 37  # the longest path of a socket, less a UUID
# The numbers of the adapters that each engine has loaded.
_adapters: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()

_SERVED_PARAMETERS = (  # of vLLM's SamplingParams
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids bad_words ignore_eos "
    "max_tokens min_tokens logprobs prompt_logprobs detokenize skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output structured_outputs logit_bias allowed_token_ids"
).split()


def stepping_after_the_last_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an in-process engine's client that makes one more step if the workers do not know of a request's end yet.

    Consumers of captures would otherwise wait for the next request. An engine in its own process makes that step anyway.
    """

    def call(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        scheduler = self.engine_core.scheduler
        if getattr(scheduler, "has_ends_to_tell", False) and not scheduler.has_unfinished_requests():
            self.engine_core.step_fn()
        return result

    return call


def taking_scores(original: Callable[..., Any]) -> Callable[..., Any]:
    """An `OutputProcessor.process_outputs` that takes probes' scores off the engine's outputs, and keeps them with their requests.

    An output has no field for them, so they travel under a key of its `kv_transfer_params`.
    """

    def process_outputs(self: Any, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.kv_transfer_params and NAME in output.kv_transfer_params:
                chunks = output.kv_transfer_params.pop(NAME)
                output.kv_transfer_params = output.kv_transfer_params or None
                if (state := self.request_states.get(output.request_id)) is not None:
                    _scores_of(state).extend(map(tuple, chunks))
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def putting_scores(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `RequestState._new_completion_output` whose sample has the scores that have come.

    vLLM merges outputs that nobody has read in time, and keeps the attributes of one of them: so all have one list, which grows.
    """

    def new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        sample = original(self, *args, **kwargs)
        sample.midstream = _scores_of(self)
        return sample

    return new_completion_output


def _scores_of(state: Any) -> list[ScoreChunk]:
    """The scores that have come for a request in vLLM's front end."""
    if not hasattr(state, "midstream"):
        state.midstream = []
    return state.midstream  # type: ignore[no-any-return]


def passing_interrupts_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `zmq_socket_ctx` for an engine's start that passes KeyboardInterrupt on: Ctrl-C, and SIGTERM to a server that starts.

    vLLM's own ignores it, and then waits ten minutes for an engine with which it has lost its connection (0.32, 0.33).
    """

    @contextlib.contextmanager
    def socket(*args: Any, **kwargs: Any) -> Iterator[Any]:
        interrupt = None
        with original(*args, **kwargs) as made:
            try:
                yield made
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    return socket


def engine_arguments(
    *,
    plan: Any = None,
    graph_sites: Sequence[str] | None = None,
    graph_bytes: int = GRAPH_BYTES,
    record_bytes: int = RECORD_BYTES,
    rename: Rename | None = None,
) -> dict[str, Any]:
    """Arguments with which a stock vLLM engine takes plans: `vllm.LLM(model, **midstream.engine_arguments())`, or `AsyncEngineArgs`.

    Requests carry plans as `SamplingParams(extra_args={"midstream": plan})`. Captured rows go to directories and consumers, because a
    stock engine has no midstream client that receives them. Traces are refused, because they are code.

    Args:
        plan: applies to every request, before its own plan; a `Plan` or a list of interventions, whose captures have `to=`.
        graph_sites, graph_bytes, record_bytes, rename: as for `midstream.VLLM`. (You do not need this function for `midstream.VLLM`.)

    Raises:
        PlanError: `plan` is not a plan, or has parts that cannot be sent to an engine.
        UnknownSiteError: `graph_sites` has a site that cannot be built in.
    """
    _loaded(register)  # vLLM calls it by the package's entry points, which a source tree on the path does not have
    text = Plan.of(plan).to_json() if plan is not None else None  # vLLM hashes the settings as JSON
    sites = chosen_graph_sites(graph_sites)
    settings = Settings(False, names_alone(rename), sites, record_bytes, graph_bytes=graph_bytes, plan=text)
    return {"worker_cls": WORKER, "scheduler_cls": SCHEDULER, "additional_config": settings.to_config()}


def llm_arguments(model: str, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine arguments with midstream's added. Raises MidstreamError if the caller has given one of midstream's."""
    for name in ("worker_cls", "scheduler_cls"):
        if name in given:
            raise MidstreamError(f"midstream sets {name} to get into the engine; leave it out.")
    return {
        **given,
        "model": model,
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "additional_config": settings.to_config(given.get("additional_config")),
    }


def start_engine(arguments: dict[str, Any], *, is_async: bool) -> Any:
    """A `vllm.LLM` or a `vllm.v1.engine.async_llm.AsyncLLM`.

    It has its own directory for sockets, since vLLM leaves their files behind. The engine's processes remove the directory if the client
    dies.

    Raises:
        ParameterError: an argument that vLLM does not have.
        UnguardedScriptError: the caller's script starts an engine outside of `if __name__ == "__main__":`.
    """
    refuse_in_import()
    log = new_log()
    with log.during_start() if log is not None else contextlib.nullcontext():
        engine = _started(arguments, is_async)
    if log is not None and not is_in_process(engine):
        log.return_prints(engine.midstream_sockets)
    engine.midstream_log = log
    return engine


def _started(arguments: dict[str, Any], is_async: bool) -> Any:
    """Start the engine, with the arguments and errors of `start_engine`."""

    def load() -> Callable[[], Any]:
        register()
        if is_async:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            return lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        from vllm import LLM

        return lambda: LLM(**arguments)

    make = _loaded(load)
    before = {name: os.environ.get(name) for name in (_BASE, SOCKETS)}
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=before[_BASE])
    os.environ[SOCKETS] = os.path.abspath(directory)
    if len(directory) <= _LONGEST_DIRECTORY:
        os.environ[_BASE] = directory
    try:
        engine = make()
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if unknown := [name for name in arguments if str(error).endswith(f"unexpected keyword argument '{name}'")]:
            from vllm.engine.arg_utils import AsyncEngineArgs

            near = nearest(unknown[0], inspect.signature(AsyncEngineArgs).parameters)
            raise ParameterError(f"{unknown[0]} is not an argument of vLLM's engine: {near}") from error
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})
    if is_in_process(engine):  # it has no sockets, and if it is killed no process is left to remove the directory
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    engine.midstream_sockets = directory
    return engine


def _loaded(load: Callable[[], Any]) -> Any:
    """Call `load`, which imports vLLM, on another thread.

    vLLM keeps errors of failed imports, and with them all frames of the thread. The caller's frames would keep its engine alive. Seen on
    0.32 without torchcodec.
    """
    with ThreadPoolExecutor(1, "midstream-import") as pool:
        return pool.submit(load).result()


def config_of(engine: Any) -> Any:
    """The engine's VllmConfig."""
    return engine.llm_engine.vllm_config if hasattr(engine, "llm_engine") else engine.vllm_config


def address_for_workers(config: Any) -> str | None:
    """This host's address, or None if there are no workers on other hosts."""
    parallel = config.parallel_config
    if not parallel.use_ray and getattr(parallel, "nnodes", 1) == 1:
        return None
    from vllm.utils.network_utils import get_ip

    return get_ip()


def shut_down(engine: Any) -> None:
    """End the engine and its processes, and give them time to free their shared memory and sockets."""
    core, log = engine.llm_engine.engine_core if hasattr(engine, "llm_engine") else engine, engine.midstream_log
    if log is not None and _has_died(engine):
        log.keep()
    try:
        with log.during_end() if log is not None else contextlib.nullcontext():
            hurries = getattr(engine, "midstream_ends_quickly", False)
            core.shutdown(timeout=_HURRY_SECONDS if hurries else _SHUTDOWN_SECONDS)
    finally:
        if log is not None:
            log.close()
        shutil.rmtree(engine.midstream_sockets, ignore_errors=True)


def end_quickly(engine: Any) -> None:
    """The user has interrupted the engine's work. Its processes take seconds to end, so `shut_down` will kill them at once."""
    engine.midstream_ends_quickly = True


def _has_died(engine: Any) -> bool:
    """Whether vLLM knows that the engine has crashed."""
    if not hasattr(engine, "llm_engine"):
        return bool(engine.errored)
    return not is_in_process(engine) and bool(engine.llm_engine.engine_core.resources.engine_dead)


def died_error(engine: Any) -> EngineClosedError:
    """The error for an engine that has crashed."""
    error = EngineClosedError("The engine died, or lost its results channel; its log says why. Start a new one.")
    keep_log(engine, error)
    return error


def keep_log(engine: Any, error: BaseException) -> None:
    """Keep the log file of an engine that has crashed, and have the error name it."""
    if (log := getattr(engine, "midstream_log", None)) is not None:
        log.keep(error)


def is_in_process(engine: Any) -> bool:
    """Whether the engine runs in this process, where it makes steps only during calls."""
    return hasattr(engine, "llm_engine") and type(engine.llm_engine.engine_core).__name__ == "InprocClient"


def sampling_params(params: Mapping[str, Any], request: TraceRequest | None) -> Any:
    """`vllm.SamplingParams`. A traced prompt is computed in full and not read from the prefix cache. Raises ParameterError."""
    from vllm import SamplingParams

    extra = dict(params.get("extra_args") or {})
    given = {**params}
    if request is not None:
        given |= {"extra_args": {**extra, **request.to_extra_args()}, "skip_reading_prefix_cache": True}
    try:
        with translated_errors():
            made = SamplingParams(**given)
    except TypeError as error:
        raise ParameterError(f"Not a sampling parameter of vLLM: {error}") from error
    if hasattr(made, "skip_clone"):  # each request has its own parameters
        made.skip_clone = True
    return made


def checked_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """A stranger's sampling parameters, converted to their types. Raises ParameterError."""
    from vllm import SamplingParams

    for name in given:
        if name not in _SERVED_PARAMETERS:
            text = f"A server takes no sampling parameter {name!r}: {nearest(name, _SERVED_PARAMETERS)}"
            raise ParameterError(text, field=name)
    try:
        with translated_errors():
            made = msgspec.convert(dict(given), SamplingParams)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ParameterError(f"Sampling parameters: {error}") from error
    return {name: getattr(made, name) for name in given}


def engine_prompt(token_ids: Sequence[int], text: str | None, salt: str | None) -> dict[str, Any]:
    """A prompt for vLLM, with its text if it has one. KV of a prompt with a salt is shared only with prompts that have the same salt."""
    known = {"prompt": text, "cache_salt": salt}
    return {"prompt_token_ids": list(token_ids), **{name: each for name, each in known.items() if each is not None}}


def check_prompts(config: Any, prompts: Sequence[Sequence[int]], together: bool) -> None:
    """Raise PromptError for prompts that cannot be traced in one step; `prompts` has one for each sample."""
    scheduler = config.scheduler_config
    budget = scheduler.max_num_batched_tokens
    for ids in prompts:
        if len(ids) > budget:
            raise PromptError(
                f"A traced prompt is computed in one step, and this one has {len(ids)} tokens; a step takes {budget}. "
                "A plan's Capture has no such limit: generate(prompt, plan=Capture(...)). For a trace, start the engine with a larger "
                "max_num_batched_tokens, or shorten the prompt."
            )
    if together and (sum(map(len, prompts)) > budget or len(prompts) > scheduler.max_num_seqs):
        raise PromptError(
            f"Invokes that wait for each other run in the same step: {len(prompts)} prompts, counted once for each "
            f"sample, of {sum(map(len, prompts))} tokens together do not fit into max_num_batched_tokens={budget}, "
            f"max_num_seqs={scheduler.max_num_seqs}."
        )


def adapter_at(path: str) -> Any:
    """The LoRARequest of an adapter at a path, or with a name on the Hugging Face hub. The last part of either is its name."""
    from vllm.lora.request import LoRARequest

    directory = Path(path).expanduser()
    return LoRARequest(Path(path).name, 1, str(directory.resolve()) if directory.is_dir() else path)


def check_adapter(config: Any, adapter: Any) -> None:
    """Raise ParameterError for a value that is no LoRARequest, or that this engine cannot run."""
    from vllm.lora.request import LoRARequest

    if not isinstance(adapter, LoRARequest):
        text = f"lora_request is {adapter!r}. Allowed: vllm.lora.request.LoRARequest(name, number, path), None, or a list of these."
        raise ParameterError(text, field="lora_request")
    if config.lora_config is None:
        text = "lora_request: this engine takes no adapters. Start it with enable_lora=True, and max_lora_rank as large as the adapter's."
        raise ParameterError(text, field="lora_request")


def check_adapters_fit_one_step(config: Any, adapters: Iterable[Any]) -> None:
    """Raise ParameterError if requests that must be in the same steps have more adapters than a step takes."""
    numbers = {adapter.lora_int_id for adapter in adapters if adapter is not None}
    if numbers and len(numbers) > (most := config.lora_config.max_loras):
        raise ParameterError(
            f"lora_request: invokes that wait for each other run in the same step, and these have {len(numbers)} adapters; a step takes "
            f"{most}. Start the engine with a larger max_loras.",
            field="lora_request",
        )


def loading_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """An `LLMEngine.add_request` that has the workers load an adapter before its first request. Raises ParameterError if they cannot.

    vLLM loads it in the step of that request, where an error ends the engine.
    """

    def add_request(self: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_new(self, adapter := adapter_among(args, kwargs)):
            check_loaded(self, adapter, call_workers(self, *loading(adapter)))
        return original(self, request_id, prompt, params, *args, **kwargs)

    return add_request


async def load_first(engine: Any, adapter: Any) -> None:
    """Have the workers of an `AsyncLLM` load an adapter, or None, before its first request. Raises ParameterError if they cannot."""
    if _is_new(engine, adapter):
        check_loaded(engine, adapter, await call_workers(engine, *loading(adapter)))


def adapter_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The adapter among the arguments that follow `params` in `add_request`; None for none."""
    return kwargs.get("lora_request") or next(iter(args[1:2]), None)


def _is_new(engine: Any, adapter: Any) -> bool:
    """Whether an engine with midstream's workers has yet to load the adapter."""
    if adapter is None or engine.vllm_config.parallel_config.worker_cls != WORKER:
        return False
    return adapter.load_inplace or adapter.lora_int_id not in _adapters.get(engine, ())


def loading(adapter: Any) -> tuple[str, bytes]:
    """The method of the workers that loads an adapter, and its argument."""
    return "midstream_load_adapter", msgspec.msgpack.encode(adapter)


def check_loaded(engine: Any, adapter: Any, answers: Sequence[tuple[str | None, str | None]]) -> None:
    """Raise ParameterError if a worker could not load an adapter, and warn of the parts that the workers do not apply.

    Args:
        engine: the `LLMEngine` or `AsyncLLM`.
        answers: each worker's answer from `midstream_load_adapter`.
    """
    if reason := next((failure for failure, _ in answers if failure), None):
        raise ParameterError(
            f"lora_request: vLLM cannot load the adapter {adapter.lora_name!r} from {adapter.lora_path}: {reason}",
            field="lora_request",
        )
    for text in dict.fromkeys(warning for _, warning in answers if warning):
        warnings.warn(text, UserWarning, stacklevel=3)
    _adapters.setdefault(engine, set()).add(adapter.lora_int_id)


def may_load_adapters() -> bool:
    """Whether vLLM's server looks for adapters that requests name and that it has not loaded."""
    import vllm.envs as envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def call_workers(engine: Any, method: str, *args: Any) -> Any:
    """Call a method of each worker. Returns the list of their results, or an awaitable of it on an `AsyncLLM`.

    Raises:
        EngineClosedError: the engine is dead.
    """

    async def awaited(answers: Awaitable[Any]) -> Any:
        asked = asyncio.ensure_future(answers)
        try:
            with translated_errors(engine):
                while not (await asyncio.wait([asked], timeout=_LOOK_SECONDS))[0]:
                    if engine.errored:  # vLLM never answers a call that was sent to a killed engine
                        raise died_error(engine)
                return asked.result()
        finally:
            asked.cancel()

    with translated_errors(engine):
        answers = engine.collective_rpc(method, args=args)
    return awaited(answers) if inspect.isawaitable(answers) else answers


def wake_waiting_callers(llm: Any) -> None:
    """Raise EngineDeadError in the threads that wait for a `vllm.LLM`, once vLLM knows that the engine is dead.

    vLLM leaves them waiting if the engine's process was killed (0.26 to 0.33).
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    core = llm.llm_engine.engine_core
    deadline = time.monotonic() + _NOTICE_SECONDS
    while not core.resources.engine_dead:
        if time.monotonic() > deadline:  # only a worker's connection was lost
            return
        time.sleep(0.05)
    core.outputs_queue.put_nowait(EngineDeadError())
    for answer in list(core.utility_results.values()):
        with contextlib.suppress(InvalidStateError):
            answer.set_exception(EngineDeadError())


def submit(llm: Any, prompts: Sequence[dict[str, Any]], params: Sequence[Any], adapters: Sequence[Any]) -> list[str]:
    """Submit requests to a `vllm.LLM`, and return their ids, as outputs have them. `step` runs them."""
    given = {"lora_request": adapters} if any(adapters) else {}
    with translated_errors(llm):
        return [users_id(name) for name in llm.enqueue(prompts, params, use_tqdm=False, **given)]


def step(llm: Any) -> list[Any]:
    """Wait for a step of a `vllm.LLM`, and return the outputs of the requests that ended in it."""
    with translated_errors(llm):
        return [output for output in llm.llm_engine.step() if output.finished]


def has_outputs(llm: Any) -> bool:
    """Whether the engine's process has sent outputs, so that `step` returns at once. False for an engine in this process."""
    outputs = getattr(llm.llm_engine.engine_core, "outputs_queue", None)
    return outputs is not None and not outputs.empty()


def abort(llm: Any, names: list[str]) -> None:
    """Abort requests by their ids."""
    # The caller's own error matters more than an error here, and a dead engine has dropped the requests.
    with contextlib.suppress(Exception):
        llm.llm_engine.abort_request(names)


@contextlib.contextmanager
def translated_errors(engine: Any = None) -> Iterator[None]:
    """Turn vLLM's errors into midstream's, if they say that the engine is dead or that a request is refused."""
    try:
        yield
    except MidstreamError:  # raised by `engine/admission.py`; it is also one of vLLM's errors
        raise
    except Exception as error:
        kinds = {each.__name__ for each in type(error).__mro__}
        if "EngineDeadError" in kinds:
            raise died_error(engine) from error
        if not (
            kinds & {"VLLMClientError", "VLLMValidationError"} or ("ValueError" in kinds and _is_about_input(error))
        ):
            raise
        text = str(error)
        if text.startswith("Token id") or "prompt (length" in text or "context length" in text:
            raise PromptError(f"vLLM does not take this prompt: {text}") from error
        field = getattr(error, "parameter", None)
        raise ParameterError(f"vLLM does not take these sampling parameters: {text}", field=field) from error


def _is_about_input(error: BaseException) -> bool:
    """Whether vLLM's checks of its input raised the error. In 0.26 not all of these errors have their own class."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return module.startswith(
        ("vllm.sampling_params", "vllm.v1.engine.input_processor", "vllm.renderers", "vllm.inputs")
    )
