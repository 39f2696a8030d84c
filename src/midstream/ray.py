"""`collect` on many engines, over the nodes of a Ray cluster: an actor pool of Ray Data.

    import midstream.ray

    prompts = ray.data.read_parquet("s3://bucket/prompts")
    midstream.ray.collect(
        prompts, id_column="key", model="meta-llama/Llama-3.1-8B", to="/shared/acts",
        plan=Capture("resid_post", layers=14, positions="all_prompt"), concurrency=8,
    )
    open_captures("/shared/acts")

Each actor has an engine and writes the rows of its prompts to the common directory; the driver gets a row with counts for each prompt. If
an actor or its node dies, Ray gives its batch to another one, which runs the prompts of the batch that the directory lacks. The driver
leaves out prompts that the directory has before it starts any engine.

`pip install "midstream[ray]"` on every node. Plans travel as JSON, since Ray's blocks would unify the fields of all interventions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data

from midstream.capture.directory import remove_orphans
from midstream.capture.listing import Listing
from midstream.client.collecting import Collection
from midstream.client.model import TraceModel
from midstream.commands.collect import start_model
from midstream.errors import CaptureError, EngineClosedError, MidstreamError, ParameterError, PromptError
from midstream.plan.values import Plan
from midstream.plan.vectors import digest
from midstream.requests.invokes import sampling
from midstream.requests.prompts import Prompt, prompts_of

JOB = "ray.json"  # in the directory: what was collected there, for a driver that has no engine to ask
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
    **params: Any,
) -> ray.data.Dataset:
    """Run the prompts whose captures a directory lacks on several engines, and write their captures to the directory.

    Run a job again that was killed, or has failed: only missing prompts run. A prompt that the directory has under its id is taken to be
    the same prompt.

    Args:
        prompts: a Dataset with a column of prompts (text, token ids or chat messages); or prompts, whose ids are their numbers from 0.
        model: a path or name, as for `midstream.VLLM`.
        plan, shard_bytes, skip_special_tokens, params: as in `model.collect`.
        to: a directory that all nodes share, for this model and this plan only.
        concurrency: how many engines.
        engine: arguments of `midstream.VLLM`, or of `LanguageModel`.
        backend: "vllm" or "transformers".
        num_gpus: GPUs of each engine. None: `tensor_parallel_size` times `pipeline_parallel_size` of `engine`. 0 for the CPU.
        batch_size: how many prompts an engine gets at a time.
        prompt_column, id_column: of the Dataset. It must have ids, since Ray does not keep the order of rows.

    Returns:
        a Dataset with a row for each prompt that has run: `id`, and how many `rows` and `bytes` were written; 0 if an actor that died had
        written them. Rows of generated tokens count as if each prompt generated `max_tokens`.

    Raises:
        CaptureError: the directory contains other captures. Also raised at the end if batches failed, as by a prompt that is too long.
        PlanError, PromptError, ParameterError: an argument is invalid. Nothing has been run.
        ray.exceptions.RayError: an engine did not start.
    """
    to, engine = Path(to).expanduser().absolute(), dict(engine or {})
    Collection([], plan, to, None, sampling(params, 1), shard_bytes, skip_special_tokens=skip_special_tokens)  # raises
    text = Plan.of(plan).to_json()
    _begin(
        to,
        {
            "model": model,
            "dtype": engine.get("dtype"),
            "plan": digest(text.encode()),
            "skip_special_tokens": skip_special_tokens,
            "params": params,
        },
    )
    listing = Listing(to)
    listing.refresh()
    missing = _missing(prompts, prompt_column, id_column, listing.digests)
    missing = missing.repartition(target_num_rows_per_block=batch_size).materialize()
    if not (count := missing.count()):
        return ray.data.from_arrow(RAN.empty_table())
    if num_gpus is None:
        num_gpus = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    start = partial(start_model, model, backend, engine)
    ran = missing.map_batches(
        Engine,
        fn_constructor_args=(start, text, str(to), params, shard_bytes, skip_special_tokens),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(concurrency, -(-count // batch_size))),
        num_gpus=num_gpus,
    )
    ran = ran.materialize()
    each = (
        table.filter(table["error"].is_valid()) for table in ran.iter_batches(batch_format="pyarrow", batch_size=None)
    )
    if failed := [row for table in each for row in table.to_pylist()]:
        raise CaptureError(
            f"Batches with {len(failed):,} of {count:,} prompts failed, the first: {failed[0]['error']} The others are in {to}. Run the "
            "job again for the prompts that it lacks."
        )
    return ran.select_columns(["id", "rows", "bytes"])


def _begin(to: Path, job: Mapping[str, Any]) -> None:
    """Raise CaptureError if another job has captured to the directory. Ids do not tell, and a job without missing prompts has no engine."""
    to.mkdir(parents=True, exist_ok=True)
    text, file = json.dumps(job, sort_keys=True, default=str), to / JOB
    if not any(to.glob("index-*.jsonl")):
        file.write_text(text)
    elif file.exists() and (begun := file.read_text()) != text:
        raise CaptureError(
            f"{to} was begun with {begun}, and this is {text}. Give collect what the directory was begun with, or another directory."
        )


def _missing(prompts: Any, prompt_column: str, id_column: str | None, there: Mapping[str, str]) -> ray.data.Dataset:
    """The prompts whose ids are not `there`, with the columns of ASKED."""
    if not isinstance(prompts, ray.data.Dataset):
        each = enumerate(prompts_of(prompts)[0])
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
    known = pa.array([*there], pa.string())

    def asked_in(table: pa.Table) -> pa.Table:
        table = table.set_column(table.schema.get_field_index(id_column), id_column, table[id_column].cast(pa.string()))
        table = table.filter(pc.invert(pc.is_in(table[id_column], known)))
        return pa.table([table[id_column], [*map(_as_json, table[prompt_column].to_pylist())]], ASKED)

    found = prompts.map_batches(asked_in, batch_format="pyarrow").materialize()
    names = [pa.chunked_array([], pa.string()), *(table["id"] for table in ray.get(found.to_arrow_refs()) if table)]
    counts = pc.value_counts(pa.chunked_array([chunk for name in names for chunk in name.chunks], pa.string()))
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise PromptError(
            f"{id_column} has {twice[0]['values'].as_py()!r} more than once; give each prompt one of its own."
        )
    return found


def _as_json(prompt: Any) -> str:
    """A prompt as text. Arrow gives each message the keys of all, with None."""
    if isinstance(prompt, list):
        prompt = [_without_none(part) if isinstance(part, dict) else part for part in prompt]
    return json.dumps(prompt, default=lambda array: array.tolist())


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


class Engine:
    """An actor: an engine, which runs batches of ASKED."""

    def __init__(
        self, start: Any, plan: str, to: str, params: Mapping[str, Any], shard_bytes: int | None, skips_special: bool
    ) -> None:
        remove_orphans(Path(to))
        self._model: TraceModel = start()
        self._given: dict[str, Any] = {
            "listing": Listing(Path(to)),
            "plan": Plan.from_json(plan),
            "to": to,
            "params": sampling(params, 1, self._model._generation),
            "shard_bytes": shard_bytes,
            "skip_special_tokens": skips_special,
        }

    def __call__(self, table: pa.Table) -> pa.Table:
        ids, error = table["id"].to_pylist(), None
        written: dict[str, dict[str, int]] = {}
        try:
            written = self._run([*map(json.loads, table["prompt"].to_pylist())], ids)
        except EngineClosedError:
            raise
        except MidstreamError as failure:  # the other batches may do
            error = f"{type(failure).__name__}: {failure}"
        rows = [{"id": name, "rows": 0, "bytes": 0, "error": error} | written.get(name, {}) for name in ids]
        return pa.Table.from_pylist(rows, RAN)

    def _run(self, prompts: list[Prompt], ids: list[str]) -> dict[str, dict[str, int]]:
        """Run the prompts that are not listed. Returns the rows and bytes of each."""
        invokes, sizes = Collection(prompts, ids=ids, **self._given).missing(self._model)
        if invokes:
            self._model._finish(self._model._results(self._model._run(invokes)))
        names = [invoke.collected.id for invoke in invokes if invoke.collected]
        return {name: {"rows": size[0], "bytes": size[1]} for name, size in zip(names, sizes.tolist(), strict=True)}
