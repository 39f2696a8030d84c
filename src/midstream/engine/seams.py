"""The table of all places where midstream touches vLLM.

A row names a part of vLLM, midstream's action on it, the code that does it, the reason, and the expected signature and members.
`plugin` makes the replacements, and refuses any without a row. `midstream doctor` compares the rows with any vLLM without importing
it (see `doctor`), so this file imports nothing of vLLM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from midstream.errors import UnsupportedVersionError

OLDEST, NEWEST = (0, 26), (0, 33)  # the versions of vLLM that the table fits
# The versions on which tests have run, with the V1 and with the V2 model runner.
_V1, _V2 = "0.26 to 0.33", "0.26, 0.32 and 0.33"


class Does(Enum):
    """What midstream does to a part of vLLM."""

    REPLACES = "replaces"
    SUBCLASSES = "subclasses"
    SETS = "sets"  # assigns a value to an attribute of an object
    CALLS = "calls"
    READS = "reads"


class Role(Enum):
    """What a process does in an engine. A process with an in-process engine has all roles."""

    FRONT_END = "front end"  # takes requests
    SERVER = "server"  # a front end that takes them over HTTP
    SCHEDULER = "scheduler"
    WORKER = "worker"
    CPU_WORKER = "worker on the CPU"
    ADAPTERS = "worker with adapters"
    CPU_ADAPTERS = "worker with adapters on the CPU"
    V2_WORKER = "V2 worker"  # a worker with vLLM's V2 model runner


@dataclass(frozen=True)
class Seam:
    """One place where midstream touches vLLM.

    Attributes:
        target: a module, class, function, method or attribute of vLLM, by its dotted path.
        by: the code in midstream, by its dotted path. Where `role` is set, it is a function that takes vLLM's function and returns the
            replacement.
        reason: why midstream needs this.
        signature: the expected parameters and return value of a function, such as `(a, b, *, c, **rest) -> tuple[X, ...]`: its first
            positional parameters are `a` and `b`, another is named `c`, and it returns a tuple that begins with an X. Without `**rest` it
            has no other parameters; if midstream only calls it, it may have others with a default.
        members: the expected members of a class, separated by semicolons: attributes, and methods as `name(signature)`.
        role: the processes in which `plugin.apply_replacements` replaces the target for good; None if a `Replacement` does so on one object
            or for a while, or if nothing is replaced.
        seen: the versions on which tests have run through this row.
        optional: what happens if vLLM does not have the target; empty if midstream needs it.
    """

    target: str
    does: Does
    by: str
    reason: str
    signature: str = ""
    members: str = ""
    role: Role | None = None
    seen: str = _V1
    optional: str = ""


def supported_range() -> str:
    """The supported versions of vLLM, for messages."""
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


def is_supported(version: str) -> bool:
    """Whether a version of vLLM is in the supported range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def check_vllm_version(version: str | None = None) -> None:
    """Raise UnsupportedVersionError unless vLLM (`version`, or the one installed) is in the supported range."""
    if version is None:
        import vllm

        version = vllm.__version__
    if not is_supported(version):
        raise UnsupportedVersionError(
            f"midstream supports vLLM {supported_range()}; this is vLLM {version}. Install one of these, or a midstream made for it."
        )


REPLACES, SUBCLASSES, SETS, CALLS, READS = Does

# fmt: off
_FRONT_END = (
    Seam("vllm.v1.engine.async_llm.AsyncLLM.add_request", REPLACES, "midstream.engine.admission.parsing_on_a_thread",
         "Parses plans from HTTP on a separate thread: the event loop that calls this serves everyone. Loads new adapters first.",
         signature="(request_id, prompt, params, **rest)", role=Role.FRONT_END),
    Seam("vllm.v1.engine.llm_engine.LLMEngine.add_request", REPLACES, "midstream.engine.launch.loading_adapters",
         "vLLM loads an adapter in the step of its first request, where an error ends the engine; this loads it before.",
         signature="(request_id, prompt, params, **rest)", role=Role.FRONT_END, seen="0.32"),
    Seam("vllm.v1.engine.input_processor.InputProcessor.process_inputs", REPLACES, "midstream.engine.admission.checking_plans",
         "Checks a request's plan where its token ids are first known, and puts it into its wire form.",
         signature="(**rest) -> EngineCoreRequest", role=Role.FRONT_END),
    Seam("vllm.v1.engine.output_processor.OutputProcessor.process_outputs", REPLACES, "midstream.engine.launch.taking_scores",
         "Takes the scores of probes off the engine's outputs, and keeps them with their request.",
         signature="(engine_core_outputs, **rest)", role=Role.FRONT_END),
    Seam("vllm.v1.engine.utils.zmq_socket_ctx", REPLACES, "midstream.engine.launch.passing_interrupts_on",
         "Lets Ctrl-C and SIGTERM end an engine's start.", signature="(path, socket_type, **rest)", role=Role.FRONT_END),
    Seam("vllm.v1.engine.output_processor.OutputProcessor", READS, "midstream.engine.launch.taking_scores",
         "Finds a request by the id of its output.", members="request_states"),
    Seam("vllm.v1.engine.output_processor.RequestState._new_completion_output", REPLACES, "midstream.engine.launch.putting_scores",
         "Puts the scores of probes on the samples of a request.", signature="(**rest) -> CompletionOutput", role=Role.FRONT_END),
    Seam("vllm.v1.engine.EngineCoreOutput", SETS, "midstream.engine.scheduler._Rules._put_scores",
         "The scores of probes travel with an output under a key of their own.", members="kv_transfer_params"),
    Seam("vllm.v1.engine.core_client.InprocClient.get_output", REPLACES, "midstream.engine.launch.stepping_after_the_last_output",
         "An in-process engine stops stepping after its last output; workers hear of a request's end in the step after it.",
         signature="(**rest)", role=Role.FRONT_END),
    Seam("vllm.v1.engine.core_client.InprocClient.abort_requests", REPLACES, "midstream.engine.launch.stepping_after_the_last_output",
         "As for get_output, after an abort.", signature="(request_ids, **rest)", role=Role.FRONT_END),
    Seam("vllm.v1.engine.core_client.launch_core_engines", REPLACES, "midstream.engine.unguarded.noticing_unguarded_scripts",
         "A script without a `__main__` guard ends with one line that says so.", signature="(**rest)", role=Role.FRONT_END, seen="0.32"),
    Seam("vllm.v1.engine.core_client.InprocClient", READS, "midstream.engine.launch.stepping_after_the_last_output",
         "Reaches the scheduler and the step function of an in-process engine.", members="engine_core"),
    Seam("vllm.v1.engine.core.EngineCore", CALLS, "midstream.engine.launch.stepping_after_the_last_output",
         "Makes one more step of an in-process engine.", members="scheduler; step_fn"),
    Seam("vllm.LLM", CALLS, "midstream.engine.launch.start_engine",
         "The offline engine.",
         members="__init__(model, **rest); "
                 "enqueue(prompts, sampling_params, *, lora_request, use_tqdm); collective_rpc(method, *, args); llm_engine"),
    Seam("vllm.v1.engine.llm_engine.LLMEngine", CALLS, "midstream.engine.launch.step",
         "Steps and aborts requests, and reaches the configuration and the engine core's client.",
         members="step(); abort_request(request_ids); collective_rpc(method, *, args); engine_core; vllm_config"),
    Seam("vllm.tokenizers.cached_tokenizer_from_config", CALLS, "midstream.engine.worker.Worker._front_ends_tokenizer",
         "The tokenizer that looks for stop strings.", optional="Traces may see a step beyond a stop string."),
    Seam("vllm.v1.engine.detokenizer.IncrementalDetokenizer", CALLS, "midstream.engine.worker.Worker._ends_text",
         "Finds where stop strings end the text, so that a trace sees no step beyond it.",
         members="from_new_request(tokenizer, request); update(new_token_ids, stop_terminated)"),
    Seam("vllm.v1.engine.async_llm.AsyncLLM", CALLS, "midstream.engine.launch.start_engine",
         "The online engine.",
         members="from_engine_args(engine_args); generate(prompt, sampling_params, request_id, *, lora_request); "
                 "collective_rpc(method, *, args); "
                 "shutdown(*, timeout); vllm_config"),
    Seam("vllm.engine.arg_utils.AsyncEngineArgs", CALLS, "midstream.engine.launch.start_engine",
         "Takes midstream's worker, scheduler and settings.", members="worker_cls; scheduler_cls; additional_config"),
    Seam("vllm.v1.engine.core_client.EngineCoreClient", CALLS, "midstream.engine.launch.shut_down",
         "Ends the engine with time to free its shared memory and sockets.", members="shutdown(*, timeout)"),
    Seam("vllm.v1.engine.async_llm.AsyncLLM", READS, "midstream.engine.launch._has_died",
         "The log of an engine that has ended by itself is kept.", members="errored"),
    Seam("vllm.v1.engine.async_llm.AsyncLLM", READS, "midstream.engine.launch.call_workers",
         "vLLM never answers a call that was sent to a killed engine; midstream ends it.", members="errored"),
    Seam("vllm.v1.engine.core_client.SyncMPClient", READS, "midstream.engine.launch.wake_waiting_callers",
         "vLLM leaves callers waiting when the engine's process is killed (0.26 to 0.33); midstream puts the error into their queues.",
         members="resources; outputs_queue; utility_results"),
    Seam("vllm.v1.engine.core_client.SyncMPClient", READS, "midstream.engine.launch.has_outputs",
         "Tells whether the engine's process has sent outputs.", members="outputs_queue"),
    Seam("vllm.v1.engine.core_client.BackgroundResources", READS, "midstream.engine.launch.wake_waiting_callers",
         "Says whether vLLM knows that the engine is dead.", members="engine_dead"),
    Seam("vllm.v1.engine.exceptions.EngineDeadError", CALLS, "midstream.engine.launch.wake_waiting_callers",
         "The error that vLLM raises to callers of a dead engine."),
    Seam("vllm.outputs.RequestOutput", READS, "midstream.engine.launch.step",
         "Says which outputs of a step have finished.", members="finished"),
    Seam("vllm.v1.engine.EngineCoreRequest", READS, "midstream.engine.admission.admitted",
         "The request that carries the plan to the engine.", members="sampling_params; prompt_token_ids; prompt_embeds; mm_features"),
    Seam("vllm.v1.engine.input_processor.InputProcessor", READS, "midstream.engine.admission.checking_plans",
         "Reaches the engine's configuration.", members="vllm_config"),
    Seam("vllm.SamplingParams", SETS, "midstream.engine.admission.checking_plans",
         "Plans and traces travel in extra_args; a request that a worker ends drops min_tokens; traced prompts skip the prefix cache.",
         members="extra_args; max_tokens; min_tokens; skip_reading_prefix_cache"),
    Seam("vllm.SamplingParams.skip_clone", SETS, "midstream.engine.launch.sampling_params",
         "Each request has its own parameters, so vLLM need not copy them deeply.", optional="vLLM copies them."),
    Seam("vllm.exceptions.VLLMValidationError", SUBCLASSES, "midstream.engine.admission._refusal",
         "Servers answer this error with status 400."),
    Seam("vllm.exceptions.VLLMClientError", READS, "midstream.engine.launch.translated_errors",
         "Recognised by name: an error that a request has caused.",
         optional="Errors of a request are recognised by VLLMValidationError and by the module that raised them."),
    *(
        Seam(module, READS, "midstream.engine.launch._is_about_input",
             "A ValueError raised in this module is about the request: 0.26 has no class of its own for all of them.")
        for module in ("vllm.sampling_params", "vllm.v1.engine.input_processor", "vllm.renderers", "vllm.inputs")
    ),
    Seam("vllm.envs.VLLM_RPC_BASE_PATH", SETS, "midstream.engine.launch.start_engine",
         "Gives each engine its own directory for sockets, by the environment: vLLM does not delete their files."),
    Seam("vllm.utils.network_utils.get_ip", CALLS, "midstream.engine.launch.address_for_workers",
         "The address at which other hosts reach this one.", signature="()"),
)

_SERVER = (
    *(
        Seam(f"vllm.entrypoints.openai.{handler}", REPLACES, "midstream.serve.requests.answering",
             "Reads a request's field 'midstream', and puts captures and answers into the response.",
             signature="(request, raw_request)", role=Role.SERVER)
        for handler in ("completion.serving.OpenAIServingCompletion.create_completion",
                        "chat_completion.serving.OpenAIServingChat.create_chat_completion",
                        "responses.serving.OpenAIServingResponses.create_responses")
    ),
    *(
        Seam(f"vllm.entrypoints.openai.{request}", SETS, "midstream.serve.requests.answering",
             "vLLM copies vllm_xargs into the SamplingParams of each of the request's prompts.", members="vllm_xargs")
        for request in ("completion.protocol.CompletionRequest", "chat_completion.protocol.ChatCompletionRequest",
                        "responses.protocol.ResponsesRequest")
    ),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.generate", REPLACES, "midstream.serve.requests.running",
         "Runs each prompt of a request with its plan, and checks the plan before a stream begins.",
         signature="(prompt, sampling_params, request_id, **rest)", role=Role.SERVER),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.shutdown", REPLACES, "midstream.serve.requests.draining",
         "Lets running requests end, and their last outputs arrive, before the engine ends.",
         signature="(timeout=timeout)", role=Role.SERVER),
    Seam("vllm.v1.engine.output_processor.OutputProcessor", READS, "midstream.serve.requests.draining",
         "Whether requests run.", members="has_unfinished_requests()"),
    Seam("vllm.v1.engine.async_llm.AsyncLLM", READS, "midstream.serve.requests.draining", "Which requests run.",
         members="errored; output_processor"),
    Seam("vllm.plugins.endpoint_plugins.interface.EndpointPlugin", READS, "midstream.serve.plugin.Plugin",
         "Adds midstream's routes.",
         members="name; required_tasks; attach_router(app); init_state(engine_client, state, args)"),
    Seam("vllm.entrypoints.cli.serve.ServeSubcommand", CALLS, "midstream.serve.command._serve", "Is `vllm serve`.",
         members="name; subparser_init(subparsers); validate(args); cmd(args)"),
    Seam("vllm.utils.argparse_utils.FlexibleArgumentParser", CALLS, "midstream.serve.command._serve", "Reads its arguments."),
    Seam("vllm.logger.configure_logging_from_args", CALLS, "midstream.serve.command._serve", "Sets up its logs.",
         signature="(args)", optional="The arguments do not set up logs."),
)

_CONFIG = (
    Seam("vllm.__version__", READS, "midstream.engine.seams.check_vllm_version",
         "Refuses versions that the table does not fit."),
    Seam("vllm.config.VllmConfig", READS, "midstream.engine.worker.Worker._make_plan_host",
         "The engine's configuration; midstream's settings are in additional_config, which is part of vLLM's compile-cache key.",
         members="model_config; parallel_config; scheduler_config; compilation_config; speculative_config; kv_transfer_config; "
                 "lora_config; cache_config; device_config; additional_config; instance_id"),
    Seam("vllm.config.DeviceConfig", READS, "midstream.engine.admission.admitted",
         "The kind of device, which says what plans cost.", members="device_type"),
    Seam("vllm.config.ModelConfig", READS, "midstream.engine.admission.admitted",
         "Plans and prompts are checked against it.",
         members="dtype; hf_text_config; max_model_len; tokenizer; skip_tokenizer_init; get_hidden_size(); get_vocab_size(); "
                 "get_head_size(); runner_type"),
    Seam("vllm.config.ParallelConfig", READS, "midstream.engine.worker.refuse_unsupported",
         "Says whether the engine has midstream's worker, and whether its batches and prompts are split.",
         members="worker_cls; use_ray; use_ubatching; prefill_context_parallel_size; decode_context_parallel_size; "
                 "data_parallel_size; tensor_parallel_size; enable_expert_parallel; nnodes"),
    Seam("vllm.config.CacheConfig", READS, "midstream.engine.worker.Worker._records_later",
         "Says whether layers run on fewer rows than the batch has.", members="kv_sharing_fast_prefill"),
    Seam("vllm.config.SchedulerConfig", READS, "midstream.engine.launch.check_prompts",
         "The limits of a step; also names midstream's scheduler.",
         members="scheduler_cls; async_scheduling; max_num_batched_tokens; max_num_seqs; enable_chunked_prefill"),
    Seam("vllm.config.SpeculativeConfig", READS, "midstream.engine.admission._check_engine",
         "Says how tokens are drafted; plans are refused with methods that were not tested.", members="method"),
    Seam("vllm.config.CompilationConfig", READS, "midstream.engine.worker.has_graphs",
         "Says whether steps run compiled code or CUDA graphs, and holds the layers' KV caches.",
         members="cudagraph_mode; mode; pass_config; max_cudagraph_capture_size; static_forward_context"),
    Seam("vllm.config.compilation.PassConfig.enable_sp", READS, "midstream.engine.worker.refuse_unsupported",
         "Sequence parallelism splits the residual stream's rows over ranks, so such an engine is refused.",
         optional="0.32 and later have no such pass."),
    Seam("vllm.config.VllmConfig.compilation_config", SETS, "midstream.engine.graphs.EagerKernels",
         "On a copy of the configuration: asks which kernels an engine without compilation prefers."),
    Seam("vllm.config.CompilationConfig.mode", SETS, "midstream.engine.graphs.EagerKernels", "As above, on a copy."),
    Seam("vllm.config.CUDAGraphMode", READS, "midstream.engine.worker.has_graphs",
         "Tells full graphs from piecewise graphs.", members="NONE; PIECEWISE; FULL"),
    Seam("vllm.config.CompilationMode", READS, "midstream.engine.worker.compiles",
         "Says that nothing is compiled.", members="NONE"),
    Seam("vllm.envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND", READS, "midstream.engine.worker.refuse_unsupported",
         "The older Ray executor does not call the worker's execute_model, so such an engine is refused.",
         optional="0.33 and later have no older Ray executor."),
    Seam("vllm.compilation.breakable_cudagraph.is_breakable_cudagraph_enabled", CALLS, "midstream.engine.worker.refuse_unsupported",
         "Breakable CUDA graphs have no sites in them, so such an engine is refused.", signature="()"),
)

_SCHEDULER = (
    Seam("vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys", REPLACES, "midstream.engine.prefix_cache.adding_plan_keys",
         "Keys KV blocks by the edits of a plan in them.",
         signature="(request, start_token_idx, end_token_idx, **rest) -> tuple[tuple[Any, ...] | None, int]", role=Role.SCHEDULER),
    Seam("vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks", REPLACES, "midstream.engine.prefix_cache.limiting_hits",
         "A request with captures recomputes its prompt from the lowest captured position on.", signature="(request, **rest)",
         role=Role.SCHEDULER),
    Seam("vllm.v1.core.block_pool.BlockPool.get_new_blocks", REPLACES, "midstream.engine.prefix_cache.noting_allocations",
         "A block that holds another request's edits is cleared before it is used again.", signature="(**rest) -> list[KVCacheBlock]",
         role=Role.SCHEDULER),
    Seam("vllm.v1.core.kv_cache_manager.KVCacheManager.coordinator", REPLACES, "midstream.engine.prefix_cache.holding_back",
         "While a request is scheduled: limits cache hits, and keeps blocks out of the cache until the workers have accepted its plan."),
    Seam("vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator", CALLS, "midstream.engine.prefix_cache._Coordinator",
         "The two methods that the stand-in for the coordinator wraps.",
         members="find_longest_cache_hit(block_hashes, max_cache_hit_length); cache_blocks(request, num_computed_tokens)"),
    Seam("vllm.v1.core.kv_cache_manager.KVCacheManager", CALLS, "midstream.engine.scheduler._Rules",
         "Caches the blocks of a request whose plan was accepted, and evicts the blocks of a refused request.",
         members="block_pool; cache_blocks(request, num_computed_tokens); evict_blocks(block_ids); get_block_ids(request_id)"),
    Seam("vllm.v1.core.kv_cache_utils.KVCacheBlock", READS, "midstream.engine.prefix_cache.EditedBlocks",
         "Identifies the blocks that a request is given.", members="block_id"),
    Seam("vllm.v1.core.sched.scheduler.Scheduler", SUBCLASSES, "midstream.engine.scheduler._Rules",
         "Computes traced prompts in one step, gives traces steps apart, tells workers of ends, and clears and keys KV blocks.",
         members="__init__(vllm_config, **rest); add_request(request); schedule(**rest) -> SchedulerOutput; "
                 "update_from_output(scheduler_output, model_runner_output); finish_requests(request_ids, finished_status); "
                 "_free_request(request, **rest); _preempt_request(request, **rest); _update_request_as_session(session, update); "
                 "_get_new_block_ids_to_zero() -> list[int] | None; kv_cache_manager; waiting; running; requests; vllm_config; "
                 "scheduler_config; max_num_running_reqs; max_num_scheduled_tokens; has_unfinished_requests()"),
    Seam("vllm.v1.core.sched.async_scheduler.AsyncScheduler", SUBCLASSES, "midstream.engine.scheduler.AsyncMidstreamScheduler",
         "The same rules where scheduling is asynchronous."),
    Seam("vllm.config.SchedulerConfig.long_prefill_token_threshold", REPLACES,
         "midstream.engine.scheduler._Rules._schedule_in_one_step",
         "No limit on long prompts in the steps in which a traced prompt begins: it may not be split."),
    Seam("vllm.v1.core.sched.request_queue.RequestQueue", CALLS, "midstream.engine.scheduler._Rules._take_held_back",
         "Takes requests that have to wait off the queue, and puts them back.",
         members="__iter__(); add_request(request); prepend_request(request); remove_requests(requests)"),
    Seam("vllm.v1.request.Request", SETS, "midstream.engine.scheduler._Rules",
         "Ends a request by its max_tokens, and reads its state.",
         members="max_tokens; sampling_params; request_id; client_index; status; prompt_token_ids; num_prompt_tokens; num_tokens; "
                 "num_tokens_with_spec; num_computed_tokens; num_output_tokens; num_output_placeholders; block_hashes; mm_features; "
                 "update_block_hashes(); take_events()"),
    Seam("vllm.v1.request.StreamingUpdate", READS, "midstream.engine.scheduler._Rules._update_request_as_session",
         "The plan of a session's next part.", members="sampling_params"),
    Seam("vllm.v1.request.RequestStatus", READS, "midstream.engine.scheduler._is_unstarted",
         "Tells preempted requests from new ones, and ends requests with an error.", members="PREEMPTED; FINISHED_ERROR"),
    Seam("vllm.v1.engine.EngineCoreOutput", CALLS, "midstream.engine.scheduler._Rules._update",
         "The output of a request that a worker has refused.", members="request_id; new_token_ids; finish_reason; stop_reason; events"),
    Seam("vllm.v1.engine.EngineCoreOutputs", CALLS, "midstream.engine.scheduler._Rules._update",
         "The outputs of a step for one client.", members="outputs"),
    Seam("vllm.v1.engine.FinishReason", READS, "midstream.engine.scheduler._Rules._update",
         "The reason that a refused request's output gives.", members="ERROR"),
    Seam("vllm.v1.core.sched.output.SchedulerOutput", READS, "midstream.engine.worker.Worker._schedule",
         "What a step holds; also carries the ends of requests to the workers, as an attribute of midstream's.",
         members="scheduled_new_reqs; scheduled_cached_reqs; num_scheduled_tokens; total_num_scheduled_tokens; finished_req_ids"),
    Seam("vllm.v1.core.sched.output.NewRequestData", READS, "midstream.engine.worker.Worker._schedule",
         "A request's first step.", members="req_id; sampling_params; prompt_token_ids; num_computed_tokens; block_ids"),
    Seam("vllm.v1.core.sched.output.CachedRequestData", READS, "midstream.engine.worker.Worker._schedule",
         "A request's later steps.", members="req_ids; num_computed_tokens; new_block_ids"),
)

_WORKER = (
    Seam("vllm.forward_context.create_forward_context", REPLACES, "midstream.engine.graphs.running_uncompiled",
         "Runs single steps uncompiled: vLLM's own runners set skip_compiled for encoders only.", signature="(**rest)",
         role=Role.WORKER),
    Seam("vllm.forward_context.ForwardContext", SETS, "midstream.engine.graphs.running_uncompiled",
         "Carries skip_compiled; says which graph a step replays.", members="skip_compiled; cudagraph_runtime_mode; batch_descriptor"),
    Seam("vllm.forward_context.get_forward_context", CALLS, "midstream.engine.graphs._run",
         "The context of the step that is running.", signature="() -> ForwardContext"),
    *(
        Seam(worker, SUBCLASSES, "midstream.engine.worker.Worker", f"Runs plans and traces around the steps of the {kind} worker.",
             members="init_device(); load_model(**rest); execute_model(scheduler_output); sample_tokens(grammar_output); "
                     "execute_dummy_batch(); compile_or_warm_up_model(); shutdown(); model_runner; vllm_config; device; rank")
        for worker, kind in (("vllm.v1.worker.gpu_worker.Worker", "GPU"), ("vllm.v1.worker.cpu_worker.CPUWorker", "CPU"))
    ),
    Seam("vllm.v1.outputs.AsyncModelRunnerOutput", SUBCLASSES, "midstream.engine.worker._ReportingOutput",
         "Adds errors and stops to an output that is still on its way from the device.", members="get_output()"),
    Seam("vllm.v1.outputs.SamplerOutput", READS, "midstream.engine.runners.Runner._watch_samples",
         "The sampled tokens, which traces read and write.", members="sampled_token_ids"),
    Seam("vllm.model_executor.models.interfaces_base.VllmModelForTextGeneration.compute_logits", REPLACES,
         "midstream.engine.runners.Runner._watch_logits",
         "While a step is watched: traces read and write logits, and rows that are not finite are cleaned before sampling.",
         signature="(hidden_states, **rest)"),
    Seam("vllm.sequence.IntermediateTensors", CALLS, "midstream.engine.runners.Runner.probe",
         "Fills the dummy input of a later pipeline stage with different values.", members="items()"),
    Seam("vllm.model_executor.custom_op.CustomOp._forward_method", REPLACES, "midstream.engine.graphs.EagerKernels",
         "In uncompiled steps: uses vLLM's kernels instead of the plain PyTorch code that compiled engines have there."),
    Seam("vllm.model_executor.custom_op.CustomOp", READS, "midstream.engine.graphs.EagerKernels",
         "Knows its kernel for each platform.", members="forward_cuda; forward_cpu"),
    Seam("vllm.platforms.current_platform", READS, "midstream.engine.worker",
         "Chooses the CPU's or the GPU's worker."),
    Seam("vllm.platforms.interface.Platform", CALLS, "midstream.engine.graphs.EagerKernels",
         "Tells CUDA from the CPU.", members="is_cuda(); is_cpu()"),
    Seam("vllm.platforms.interface.Platform.get_default_ir_op_priority", CALLS, "midstream.engine.graphs.EagerKernels",
         "In uncompiled steps: the kernels that an eager engine prefers.", signature="(vllm_config) -> 'IrOpPriorityConfig'",
         optional="The compiled engine's preferences stay."),
    Seam("vllm.config.kernel.IrOpPriorityConfig", CALLS, "midstream.engine.graphs.EagerKernels",
         "Sets that preference for a block of code.", members="set_priority()"),
    Seam("vllm.compilation.cuda_graph.CUDAGraphWrapper.__call__", REPLACES, "midstream.engine.graphs.calling_pieces_by",
         "While graphs are recorded, in traced steps, and in planned steps without a graph: decides for each piece what runs."),
    Seam("vllm.compilation.cuda_graph.CUDAGraphWrapper.concrete_cudagraph_entries", REPLACES, "midstream.engine.graphs.SetOfGraphs",
         "In planned steps: graphs with the plans' kernel in them."),
    Seam("vllm.compilation.cuda_graph.CUDAGraphWrapper", READS, "midstream.engine.graphs.PiecewiseGraphs",
         "The compiled code of a piece, and which kind of graph it is for.", members="runnable; runtime_mode"),
    Seam("vllm.compilation.cuda_graph.CUDAGraphEntry", READS, "midstream.engine.graphs._run",
         "Where the graph of the next piece reads its input.", members="output"),
    Seam("vllm.utils.torch_utils.LayerName", CALLS, "midstream.engine.graphs._register",
         "A value that differs from layer to layer, which compiled graphs take as an input.", members="__init__(value); value"),
    Seam("vllm.distributed.get_pp_group", CALLS, "midstream.engine.worker.Worker._attach",
         "The stages of the pipeline.", signature="() -> GroupCoordinator"),
    Seam("vllm.distributed.get_tp_group", CALLS, "midstream.engine.worker.Worker._attach",
         "The tensor-parallel ranks.", signature="() -> GroupCoordinator"),
    Seam("vllm.distributed.parallel_state.GroupCoordinator", CALLS, "midstream.engine.worker.Worker._attach",
         "A rank's place among the others, and how they exchange values.",
         members="rank_in_group; world_size; cpu_group; all_gather(input_, dim)"),
    Seam("vllm.utils.import_utils.resolve_obj_by_qualname", CALLS, "midstream.engine.worker",
         "Imports the platform's worker.", signature="(qualname)"),
    Seam("vllm.v1.kv_cache_interface.KVCacheConfig", READS, "midstream.engine.runners.Runner.prepare_clearing",
         "The layers of each group of KV caches, and how many blocks there are.", members="num_blocks; kv_cache_groups"),
    Seam("vllm.v1.kv_cache_interface.KVCacheGroupSpec", READS, "midstream.engine.runners.Runner.prepare_clearing",
         "The layers that share blocks.", members="kv_cache_spec; layer_names"),
    Seam("vllm.v1.kv_cache_interface.FullAttentionSpec", READS, "midstream.engine.runners.Runner.prepare_clearing",
         "The layers that vLLM clears itself."),
    Seam("vllm.v1.kv_cache_interface.AttentionSpec", READS, "midstream.engine.runners.Runner.has_recurrent_layers",
         "The layers that keep only keys and values: a forward on dummy tokens does not change the requests' own."),
    Seam("vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs", READS, "midstream.engine.runners.Runner.has_recurrent_layers",
         "Several layers' specs.", members="kv_cache_specs"),
    Seam("vllm.model_executor.layers.attention.attention.Attention", READS, "midstream.engine.runners.Runner.prepare_clearing",
         "A layer's KV cache, which midstream clears where vLLM does not.", members="kv_cache"),
    Seam("vllm.model_executor.layers.attention.attention.Attention", READS, "midstream.arch.blocks.head_dims_of",
         "The inputs of a layer's attention are the sites attn_q, attn_k and attn_v.",
         members="forward(query, key, value, **rest); head_size; kv_sharing_target_layer_name", seen="0.26 and 0.32"),
    Seam("vllm.model_executor.layers.attention.attention.Attention", READS, "midstream.arch.heads.settings_of",
         "The settings from which attention_probabilities are computed; the soft cap, sinks, ALiBi slopes and scale are of `impl`.",
         members="impl; sliding_window; layer_name", seen="0.26 and 0.32"),
    Seam("vllm.model_executor.layers.attention.attention.Attention", READS, "midstream.arch.heads.why_not_again",
         "Attention whose outputs midstream cannot compute again.", members="attn_type; kv_cache_dtype", seen="0.26 and 0.32"),
    Seam("vllm.model_executor.layers.attention.attention.Attention", READS, "midstream.runtime.knockouts.AttentionCuts._cut_in_vllm",
         "The outputs of heads, [tokens, heads * head_dim], which are changed in place.", members="num_heads; head_size",
         seen="0.26 and 0.32"),
)

_ADAPTERS = (
    *(
        Seam(f"vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU.{method}", REPLACES, "midstream.engine.adapters.skipping_rows",
             "On the CPU: vLLM adds the last adapter to rows that have none; this leaves them as they are.", signature="(y, x, **rest)",
             role=Role.CPU_ADAPTERS, seen="0.32")
        for method in ("add_shrink", "add_lora_embedding", "add_lora_logits")
    ),
    Seam("vllm.lora.worker_manager.WorkerLoRAManager._load_adapter", REPLACES, "midstream.engine.adapters.checking_fit",
         "vLLM leaves out the modules of an adapter that the model does not have; this refuses an adapter that fits none.",
         signature="(lora_request) -> LoRAModel", role=Role.ADAPTERS, seen="0.32"),
    Seam("vllm.lora.lora_model.LoRAModel", SETS, "midstream.engine.adapters.checking_fit",
         "The names of an adapter's modules; the warning about those that are left out travels with it, under a name of midstream's.",
         members="loras", seen="0.32"),
    Seam("vllm.lora.model_manager.LoRAModelManager", READS, "midstream.engine.adapters._check_fit",
         "The modules that take adapters.",
         members="modules; packed_modules; packed_modules_mapping; model; lora_config; get_adapter(adapter_id)", seen="0.32"),
    Seam("vllm.lora.utils.is_in_target_modules", CALLS, "midstream.engine.adapters._check_fit",
         "Whether `lora_target_modules` leaves a module in.",
         signature="(module_name, target_modules, packed_modules_mapping)", seen="0.32"),
    Seam("vllm.model_executor.layers.linear.LinearBase", READS, "midstream.engine.adapters._check_sizes",
         "The sizes of a layer, on all ranks together.", members="input_size; output_size", seen="0.32"),
    Seam("vllm.model_executor.layers.linear.MergedColumnParallelLinear", READS, "midstream.engine.adapters._output_sizes",
         "The sizes of the layers that are merged into one.", members="output_sizes", seen="0.32"),
    Seam("vllm.model_executor.layers.linear.QKVParallelLinear", READS, "midstream.engine.adapters._output_sizes",
         "The same for queries, keys and values.", members="total_num_heads; total_num_kv_heads; head_size; v_head_size", seen="0.32"),
    Seam("vllm.model_executor.models.utils.PPMissingLayer", READS, "midstream.engine.adapters._check_fit",
         "A layer of another pipeline stage, which checks the adapter's modules there.", seen="0.32"),
    Seam("vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU", READS, "midstream.engine.adapters.skipping_rows",
         "The adapter of each row; -1 for none.", members="token_lora_indices; sampler_indices", seen="0.32"),
    Seam("vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin", READS, "midstream.engine.worker.Worker._attach",
         "The adapters of a worker.", members="lora_manager", seen="0.32"),
    Seam("vllm.lora.worker_manager.WorkerLoRAManager", READS, "midstream.engine.worker.Worker._attach",
         "The adapters of a worker.", members="_adapter_manager", seen="0.32"),
    Seam("vllm.lora.model_manager.LoRAModelManager", CALLS, "midstream.engine.adapters.Adapters",
         "While a trace calls a layer: the rows of the call have the adapter of the trace's request.",
         members="set_adapter_mapping(mapping); _last_mapping", seen="0.32"),
    Seam("vllm.lora.layers.utils.LoRAMapping", CALLS, "midstream.engine.adapters.Adapters",
         "Says which adapter each row has.", members="index_mapping; prompt_mapping; is_prefill", seen="0.32"),
    Seam("vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA", READS, "midstream.arch.blocks.unwrapped",
         "A layer with adapters, around the layer without.", members="base_layer", seen="0.32"),
    Seam("vllm.lora.request.LoRARequest", READS, "midstream.engine.launch.check_adapter",
         "An adapter: its name, its number and its place.", members="lora_name; lora_int_id; lora_path; load_inplace", seen="0.32"),
    Seam("vllm.v1.worker.gpu_worker.Worker", CALLS, "midstream.engine.worker.Worker.midstream_load_adapter",
         "Loads an adapter before its first request: one that cannot be loaded would end the engine.", members="add_lora(lora_request)",
         seen="0.32"),
    Seam("vllm.entrypoints.openai.models.serving.OpenAIServingModels", CALLS, "midstream.serve.requests.adapter_of",
         "The adapters of a server by name.", members="is_base_model(model_name); resolve_lora(lora_name); lora_requests; base_model_paths",
         seen="0.32"),
    Seam("vllm.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING", READS, "midstream.engine.launch.may_load_adapters",
         "Whether a server looks for adapters that it has not loaded.", seen="0.32"),
    Seam("vllm.config.LoRAConfig", READS, "midstream.engine.launch.check_adapters_fit_one_step",
         "How many adapters a step takes.", members="max_loras", seen="0.32"),
    Seam("vllm.v1.core.sched.output.NewRequestData", READS, "midstream.engine.worker.Worker._schedule",
         "A request's adapter.", members="lora_request", seen="0.32"),
)

_V1_RUNNER = (
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner._determine_batch_execution_and_padding", REPLACES,
         "midstream.engine.runners.V1Runner.connect",
         "While a step is watched: called when the batch is laid out; a traced step runs without graphs.",
         signature="(*, num_scheduled_tokens_np, force_eager, **rest) -> tuple[CUDAGraphMode, BatchDescriptor, ...]"),
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample", REPLACES, "midstream.engine.runners.V1Runner.connect",
         "While a step is watched: traces read and write its samples.", signature="(**rest) -> SamplerOutput"),
    Seam("vllm.v1.cudagraph_dispatcher.CudagraphDispatcher.dispatch", REPLACES, "midstream.engine.runners.V1Runner.connect",
         "While a step is watched: keeps steps from full graphs if they are traced, or if the graph they need is not recorded.",
         signature="(*, invalid_modes, **rest) -> tuple[CUDAGraphMode, BatchDescriptor]"),
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner.capture_model", REPLACES, "midstream.engine.runners.V1Runner._watch_recording",
         "Measures the memory of vLLM's graphs, with which midstream's graphs are counted.", signature="(**rest) -> int"),
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner._capture_cudagraphs", REPLACES,
         "midstream.engine.runners.V1Runner._watch_recording",
         "In engines in which no graph can be recorded later: records graphs a second time, with the plans' kernel in them.",
         signature="(**rest)"),
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner._warmup_and_capture", CALLS, "midstream.engine.runners.V1Runner._record",
         "Records one graph, with the plans' kernel in it.", signature="(desc, cudagraph_runtime_mode, **rest)"),
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner.input_batch", REPLACES, "midstream.engine.runners.V1Runner._record",
         "While a graph is recorded: a batch without requests, so that nothing of theirs gets into it."),
    Seam("vllm.v1.worker.block_table.MultiGroupBlockTable", CALLS, "midstream.engine.runners._NullBlocks",
         "While a graph is recorded: block tables without the requests' blocks.",
         members="block_tables; commit_block_table(num_reqs); __getitem__(idx)"),
    Seam("vllm.v1.worker.block_table.BlockTable", CALLS, "midstream.engine.runners._NullBlocks",
         "The table of a group of layers on the device.", members="get_device_tensor(num_reqs)"),
    Seam("vllm.compilation.monitor.cudagraph_capturing_enabled", REPLACES, "midstream.engine.runners.V1Runner._record",
         "While a graph is recorded: vLLM forbids that once the engine has started."),
    Seam("vllm.distributed.parallel_state.graph_capture", CALLS, "midstream.engine.runners.V1Runner._record",
         "Prepares the communication between the ranks for a recording.", signature="(device)"),
    Seam("vllm.v1.cudagraph_dispatcher.CudagraphDispatcher", CALLS, "midstream.engine.runners.V1Runner._count_graphs",
         "How many graphs vLLM records.", members="get_capture_descs()"),
    Seam("vllm.v1.sample.sampler.Sampler.gather_specific_token_logprobs", REPLACES, "midstream.engine.runners.V1Runner._keep_top_logprobs",
         "A request that grades answers takes the likeliest tokens from the others in its step; this gives them back.",
         signature="(logprobs, logprob_token_ids, sampled)"),
    Seam("vllm.v1.sample.sampler.Sampler", CALLS, "midstream.engine.runners.V1Runner._keep_top_logprobs",
         "Gathers the likeliest tokens.", members="gather_logprobs(logprobs, num_logprobs, *, token_ids)"),
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner._zero_block_ids", REPLACES, "midstream.engine.runners.V1Runner._clear_by",
         "Clears KV blocks in the layers that vLLM leaves out, such as those with sliding windows.", signature="(block_ids)"),
    Seam("vllm.v1.worker.gpu_model_runner.GPUModelRunner", CALLS, "midstream.engine.runners.V1Runner",
         "The batch that is laid out, the forward's output, and dummy forwards to probe the model.",
         members="get_model(); _dummy_run(num_tokens, *, is_profile); _init_kv_zero_meta(); _kv_block_zeroer; model; device; "
                 "input_batch; execute_model_state; cudagraph_dispatcher; kv_cache_config; compilation_config; sampler; "
                 "capture_model(**rest)"),
    Seam("vllm.v1.worker.cpu_model_runner.CPUModelRunner.sample_tokens", REPLACES, "midstream.engine.runners.sparing_generators",
         "On the CPU: a request with a seed whose prompt is split over steps would end the engine.", signature="(grammar_output)",
         role=Role.CPU_WORKER),
    Seam("vllm.v1.worker.cpu_model_runner.CPUModelRunner", READS, "midstream.engine.runners.sparing_generators",
         "The requests whose token a step drops, and their generators.", members="discard_request_mask; input_batch"),
    Seam("vllm.v1.worker.cpu_model_runner.CPUModelRunner", CALLS, "midstream.engine.runners.V1Runner",
         "The same on the CPU.", members="_zero_block_ids(block_ids); get_model()"),
    Seam("vllm.v1.worker.gpu_input_batch.InputBatch", READS, "midstream.engine.runners.V1Runner.connect",
         "The requests in the order of their rows.", members="req_ids; generators; num_computed_tokens_cpu; max_num_logprobs; "
                 "num_computed_tokens_cpu_tensor; num_prompt_tokens_cpu_tensor; block_table"),
    Seam("vllm.forward_context.BatchDescriptor", READS, "midstream.engine.runners.V1Runner.connect",
         "The batch's size with padding.", members="num_tokens"),
    Seam("vllm.v1.worker.gpu_model_runner.ExecuteModelState", READS, "midstream.engine.runners.V1Runner.batch",
         "The rows at the forward's end.", members="hidden_states"),
)

_V2_RUNNER = (
    Seam("vllm.v1.worker.gpu.model_runner.dispatch_cg_and_sync_dp", REPLACES, "midstream.engine.runners.keeping_from_graphs",
         "The V2 runner replays full graphs without calling the model, so it has to be told not to in a traced step, and in a planned "
         "one for which none is recorded.",
         signature="(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *, need_eager, **rest) -> "
                   "tuple[BatchExecutionDescriptor, ...]",
         role=Role.V2_WORKER, seen=_V2),
    Seam("vllm.v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor", READS, "midstream.engine.runners.keeping_from_graphs",
         "Says whether a full graph is replayed.", members="cg_mode", seen=_V2),
    Seam("vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_inputs", REPLACES, "midstream.engine.runners.V2Runner.connect",
         "While a step is watched: called when the batch is laid out.", signature="(**rest) -> InputBatch", seen=_V2),
    Seam("vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample", REPLACES, "midstream.engine.runners.V2Runner.connect",
         "While a step is watched: traces read and write its samples.", signature="(**rest) -> tuple[SamplerOutput, ...]", seen=_V2),
    Seam("vllm.v1.worker.gpu.model_runner.GPUModelRunner.capture_model", REPLACES, "midstream.engine.runners.V2Runner._watch_recording",
         "Measures the memory of vLLM's graphs, with which midstream's graphs are counted.", signature="(**rest) -> int", seen=_V2),
    Seam("vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.capture", REPLACES,
         "midstream.engine.runners.V2Runner._watch_recording",
         "Notes how vLLM has its graphs recorded; midstream does the same later, with the plans' kernel in them.",
         signature="(**rest)", seen=_V2),
    Seam("vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._capture_descs", REPLACES, "midstream.engine.runners.V2Runner._record",
         "While a graph is recorded: that one, and no others.", seen=_V2),
    Seam("vllm.v1.worker.gpu.cudagraph_utils.is_global_first_rank", REPLACES, "midstream.engine.runners.V2Runner._record",
         "While a graph is recorded: shows no progress bar.", signature="() -> bool", seen=_V2),
    Seam("vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.graphs", REPLACES,
         "midstream.engine.runners.V2Runner._full_graphs",
         "In planned steps: full graphs with the plans' kernel in them.", seen=_V2),
    Seam("vllm.v1.worker.gpu.model_runner.GPUModelRunner.kv_block_zeroer", REPLACES, "midstream.engine.runners.V2Runner._clear_by",
         "Clears KV blocks in the layers that vLLM leaves out, such as those with sliding windows.", seen=_V2),
    Seam("vllm.v1.worker.utils.KVBlockZeroer", CALLS, "midstream.engine.runners.V2Runner._vllms_clearing",
         "Clears the layers with full attention.", members="zero_block_ids(block_ids)", seen=_V2),
    Seam("vllm.v1.worker.gpu.model_runner.GPUModelRunner", CALLS, "midstream.engine.runners.V2Runner",
         "The forward's output, and dummy forwards to probe the model.",
         members="get_model(); _dummy_run(num_tokens, *, skip_attn, is_profile); _init_kv_zero_meta(); execute_model_state; "
                 "cudagraph_manager; kv_cache_config; compilation_config",
         seen=_V2),
    Seam("vllm.v1.worker.gpu.input_batch.InputBatch", READS, "midstream.engine.runners.V2Runner.connect",
         "The requests in the order of their rows, and the batch's size with padding.",
         members="req_ids; num_reqs; num_scheduled_tokens; num_computed_tokens_np; num_tokens_after_padding", seen=_V2),
    Seam("vllm.v1.worker.gpu.model_runner.ExecuteModelState", READS, "midstream.engine.runners.V2Runner.batch",
         "The batch and the rows at the forward's end.", members="input_batch; hidden_states", seen=_V2),
)

SEAMS = (*_FRONT_END, *_SERVER, *_CONFIG, *_SCHEDULER, *_WORKER, *_ADAPTERS, *_V1_RUNNER, *_V2_RUNNER)
# fmt: on
