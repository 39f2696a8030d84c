"""`collect` on many engines, over the nodes of a Ray cluster: an actor pool of Ray Data.

    import midstream.ray

    prompts = ray.data.read_parquet("s3://bucket/prompts")
    midstream.ray.collect(
        prompts, id_column="key", model="meta-llama/Llama-3.1-8B", to="/shared/acts",
        plan=Capture("resid_post", layers=14, positions="all_prompt"), concurrency=8,
    )
    open_captures("/shared/acts")

Each actor has an engine and writes the rows of its prompts to the common directory; the driver gets a row with counts for each prompt.
Before it starts any engine, the driver leaves out the prompts that the directory has.

If an actor, its engine or its node dies, the batches that it had are lost, and the other actors go on. Ray starts the actor again where
there is room. Once all other batches have run, the driver gives the lost prompts that the directory lacks to new actors. Ray's own
retries are off: Ray would wait until the dead actor can start again, although other actors are idle.

`pip install "midstream[ray]"` on every node. Plans travel as JSON, since Ray's blocks would unify the fields of all interventions.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data

from midstream.capture.directory import remove_orphans
from midstream.capture.listing import Listing
from midstream.client.collecting import Collection
from midstream.client.trace_model import TraceModel
from midstream.commands.collect import start_model
from midstream.errors import CaptureError, EngineClosedError, MidstreamError, ParameterError, PromptError
from midstream.plan.values import Plan
from midstream.plan.vectors import digest
from midstream.requests.arguments import AdapterArgument, Prompt, adapter_in, prompts_of, sampling

_log = logging.getLogger(__name__)
JOB = "ray.json"  # a file in the directory: the job's arguments, for later drivers to compare, since a driver has no engine to ask
ASKED = pa.schema([("id", pa.string()), ("prompt", pa.string())])  # the prompt as JSON
RAN = pa.schema([("id", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("error", pa.string())])


def collect(
    prompts: ray.data.Dataset | Iterable[Prompt],
    *,
    model: str,
    plan: Any,
    to: str | Path,
    concurrency: int = 2,
    engine: Mapping[str, Any] | None = None,
    backend: str = "vllm",
    num_gpus: float | None = None,
    batch_size: int = 256,
    prompt_column: str = "text",
    id_column: str | None = None,
    shard_bytes: int | None = None,
    skip_special_tokens: bool = False,
    on_bad: Literal["raise", "skip", "truncate"] = "raise",
    lora_request: Any = None,
    **params: Any,
) -> ray.data.Dataset:
    """Run the prompts whose captures a directory lacks on several engines, and write their captures to the directory.

    If a job was killed or has failed, run it again: only missing prompts run. Prompts with the same id must be the same; this is not
    checked.

    Args:
        prompts: a Dataset with a column of prompts (text, token ids or chat messages); or prompts, whose ids are their numbers from 0.
        model: a path or name, as for `midstream.VLLM`.
        plan, shard_bytes, skip_special_tokens, params: as in `model.collect`.
        on_bad: as in `model.collect`. With "raise", a prompt that the model cannot take fails its batch. Each actor logs how many it left
            out or cut.
        to: a directory that all nodes share, for this model and this plan only.
        concurrency: how many engines.
        engine: arguments of `midstream.VLLM`, or of `LanguageModel`.
        backend: "vllm" or "transformers".
        num_gpus: GPUs of each engine. None: `tensor_parallel_size` times `pipeline_parallel_size` of `engine`. 0 for the CPU.
        batch_size: how many prompts an engine gets at a time.
        prompt_column, id_column: of the Dataset. It must have ids, since Ray does not keep the order of rows.
        lora_request: the adapter of all prompts, on vLLM. All nodes find it under its path. Engines get `enable_lora=True`.

    Returns:
        a Dataset with a row for each prompt that has run or was left out: its `id`, and the number of `rows` and `bytes` that were written.
        Both are 0 if `on_bad` left the prompt out, or if the actor that wrote its rows has died. Rows of generated tokens count as if each
        prompt generated `max_tokens`.

    Raises:
        CaptureError: the directory contains other captures. Also raised at the end if batches failed (for example, a prompt is too
            long), or if engines died and an attempt wrote no prompt at all.
        PlanError, PromptError, ParameterError: an argument is invalid. Nothing has been run.
        ray.exceptions.RayError: an engine did not start.
    """
    to, engine = Path(to).expanduser().absolute(), dict(engine or {})
    options: dict[str, Any] = {"shard_bytes": shard_bytes, "skip_special_tokens": skip_special_tokens, "on_bad": on_bad}
    Collection(None, [], plan, to, sampling(params, 1), **options)  # raises
    argument: AdapterArgument | None = "lora_request" if backend == "vllm" else None
    adapter, _ = adapter_in({"lora_request": lora_request}, argument)  # raises
    text = Plan.of(plan).to_json()
    job: dict[str, Any] = {
        "model": model,
        "dtype": engine.get("dtype"),
        "plan": digest(text.encode()),
        "skip_special_tokens": skip_special_tokens,
        "params": params,
    }
    if adapter is not None:
        engine = {"enable_lora": True, **engine}
        job["adapter"] = f"{adapter.lora_name} ({adapter.lora_path})"
        params = {**params, "lora_request": adapter}
    _begin(to, job)
    listing = Listing(to)
    listing.refresh()
    missing = _missing(prompts, prompt_column, id_column, listing.digests, on_bad == "raise")
    missing = missing.repartition(target_num_rows_per_block=batch_size).materialize()
    if num_gpus is None:
        num_gpus = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    arguments = partial(start_model, model, backend, engine), {"plan": text, "to": str(to), **options, **params}
    asked, tables = _ids(missing), [RAN.empty_table()]
    lost = missing.count()
    while lost:
        before = len(listing.digests)
        size = min(concurrency, -(-lost // batch_size))
        tables += _run(missing, arguments, batch_size, size, num_gpus)
        listing.refresh()
        done = pa.concat_arrays([*_ids_in(tables), pa.array([*listing.digests], pa.string())])
        missing = _without(missing, done).materialize()
        lost = missing.count()
        if len(listing.digests) == before:
            break
        if lost:
            _log.warning("%s prompts of engines that died run again.", f"{lost:,}")
    ran = pa.concat_tables(tables)
    failed = ran.filter(ran["error"].is_valid())
    errors = []
    if failed:
        errors.append(f"Batches with {len(failed):,} of {len(asked):,} prompts failed, the first: {failed['error'][0]}")
    if lost:
        errors.append(
            f"{lost:,} prompts have not run: their engines died, and no engine wrote a prompt in the last attempt. The actors' output "
            "shows why."
        )
    if errors:
        raise CaptureError(
            f"{' '.join(errors)} The others are in {to}. Run the job again for the prompts that it lacks."
        )
    by_the_dead = asked.filter(pc.invert(pc.is_in(asked, pa.concat_arrays(_ids_in(tables)))))
    rest = pa.Table.from_pylist([{"id": name, "rows": 0, "bytes": 0} for name in by_the_dead.to_pylist()], RAN)
    return ray.data.from_arrow(pa.concat_tables([ran, rest]).select(["id", "rows", "bytes"]))


def _run(
    missing: ray.data.Dataset, arguments: tuple[Any, ...], batch_size: int, size: int, num_gpus: float
) -> Iterator[pa.Table]:
    """Run all batches once, each on one of `size` actors. Yields tables of the schema RAN for the batches whose actors did not die."""
    ran = missing.map_batches(
        Engine,
        fn_constructor_args=arguments,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=size),
        num_gpus=num_gpus,
        max_task_retries=0,
    )
    ran.context.max_errored_blocks = -1
    for table in ran.materialize().to_arrow_refs():
        try:
            found = ray.get(table)
        except ray.exceptions.RayError:  # it was on a node that is gone
            continue
        if found:  # a table without rows lacks columns
            yield found.cast(RAN)


def _ids(prompts: ray.data.Dataset) -> pa.Array:
    """The ids of a Dataset with the columns of ASKED."""
    return pa.concat_arrays(_ids_in(ray.get(prompts.to_arrow_refs())))


def _ids_in(tables: Iterable[pa.Table]) -> list[pa.Array]:
    return [pa.array([], pa.string()), *(chunk for table in tables if table for chunk in table["id"].chunks)]


def _without(prompts: ray.data.Dataset, known: pa.Array) -> ray.data.Dataset:
    """The prompts whose ids are not in `known`."""
    return prompts.map_batches(
        lambda table: table.filter(pc.invert(pc.is_in(table["id"], known))), batch_format="pyarrow"
    )


def _begin(to: Path, job: Mapping[str, Any]) -> None:
    """Note the job in a directory without captures. Raise CaptureError if another job has captured to the directory.

    Only the note shows this: jobs may have equal ids, and a job without missing prompts starts no engine that could compare.
    """
    to.mkdir(parents=True, exist_ok=True)
    text, file = json.dumps(job, sort_keys=True, default=str), to / JOB
    if not any(to.glob("index-*.jsonl")):
        file.write_text(text)
    elif file.exists() and (begun := file.read_text()) != text:
        raise CaptureError(
            f"{to} was begun with {begun}, and this is {text}. Give collect what the directory was begun with, or another directory."
        )


def _missing(
    prompts: Any, prompt_column: str, id_column: str | None, there: Mapping[str, str], checked: bool = True
) -> ray.data.Dataset:
    """The prompts whose ids are not in `there`, with the columns of ASKED. `checked`: as in `prompts_of`."""
    if not isinstance(prompts, ray.data.Dataset):
        each = enumerate(prompts_of(prompts, checked=checked)[0])
        asked = [{"id": str(i), "prompt": _as_json(prompt)} for i, prompt in each if str(i) not in there]
        return ray.data.from_arrow(pa.Table.from_pylist(asked, ASKED))
    if id_column is None:
        raise ParameterError(
            "id_column is None; allowed: a column of the Dataset. Its rows have no order to number them."
        )
    columns = prompts.columns() or [prompt_column, id_column]
    for name, column in {"prompt_column": prompt_column, "id_column": id_column}.items():
        if column not in columns:
            raise ParameterError(f"{name} is {column!r}; allowed: {', '.join(columns)}.")

    def asked_in(table: pa.Table) -> pa.Table:
        prompts = [*map(_as_json, table[prompt_column].to_pylist())]
        return pa.table([table[id_column].cast(pa.string()), prompts], ASKED)

    found = prompts.map_batches(asked_in, batch_format="pyarrow")
    found = _without(found, pa.array([*there], pa.string())).materialize()
    counts = pc.value_counts(_ids(found))
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise PromptError(
            f"{id_column} has {twice[0]['values'].as_py()!r} more than once; give each prompt one of its own."
        )
    return found


def _as_json(prompt: Any) -> str:
    """A prompt as text, without the keys that are None: Arrow gives each message the keys of all messages."""
    if isinstance(prompt, list):
        prompt = [
            {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
            for part in prompt
        ]
    return json.dumps(prompt, default=lambda array: array.tolist())


class Engine:
    """An actor with an engine, which runs batches with the columns of ASKED.

    Args:
        start: starts the model.
        given: arguments of the model's `collect_batch`. The plan is JSON.
    """

    def __init__(self, start: Callable[[], TraceModel], given: Mapping[str, Any]) -> None:
        remove_orphans(Path(given["to"]))
        self._model = start()
        self._given = {**given, "plan": Plan.from_json(given["plan"])}

    def __call__(self, table: pa.Table) -> pa.Table:
        ids, prompts, error = table["id"].to_pylist(), [*map(json.loads, table["prompt"].to_pylist())], None
        written: dict[str, tuple[int, int]] = {}
        try:
            written = self._model.collect_batch(prompts, ids=ids, **self._given)
        except EngineClosedError:  # Ray restarts a dead actor, but not a dead engine in a living one
            traceback.print_exc()
            os._exit(1)
        except MidstreamError as failure:  # the other batches may succeed
            error = f"{type(failure).__name__}: {failure}"
        rows = [(name, *written.get(name, (0, 0)), error) for name in ids]
        return pa.Table.from_pylist([dict(zip(RAN.names, row, strict=True)) for row in rows], RAN)
