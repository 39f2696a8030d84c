"""Captures the prompts of a file to a directory: `model.collect` as a command.

    midstream collect MODEL --prompts prompts.jsonl --to acts --site resid_post --layers 5,14 --positions all_prompt
    midstream collect MODEL --prompts prompts.parquet --column text --to acts --plan plan.json --max-model-len 4096
    midstream collect MODEL --prompts prompts.jsonl --to acts --site resid_post --shard 0/8    # one of eight processes

A line of a JSONL file is a prompt (a text, token ids or chat messages, as JSON) or an object with a prompt in one of its columns. Each
process reads the whole file before it starts an engine, so nothing runs if one line is not a prompt. A prompt's id is its line number
(from 1; in a parquet file its row number, from 0) or the value of `--id-column`. So all shards of a file can write to one directory, and
the same command again runs only the prompts that the directory lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import midstream  # loads its names when they are used
from midstream.client.collecting import ON_BAD
from midstream.client.trace_model import TraceModel
from midstream.errors import MidstreamError, ParameterError, PromptError
from midstream.plan.values import Capture, Plan
from midstream.requests.arguments import Prompt, is_chat

COLUMNS = ("text", "prompt", "messages", "token_ids")  # where a prompt is looked for


# The file.


def read_prompts(
    path: Path,
    column: str | None = None,
    id_column: str | None = None,
    shard: tuple[int, int] = (0, 1),
    on_bad: str = "raise",
) -> tuple[list[Prompt], list[str]]:
    """The prompts of a shard of a file, and their ids. Raises PromptError if any line of the file, in the shard or not, has no prompt.
    Unless `on_bad` is "raise", a value that is not a prompt is returned like a prompt.
    """
    prompts, ids, lines = list[Prompt](), list[str](), dict[str, int]()
    for number, given in _records(path, column, id_column):
        try:
            prompt, name = _prompt_in(given, column, on_bad == "raise"), _id_in(given, id_column)
        except PromptError as error:
            raise PromptError(f"{path}:{number}: {error}") from None
        if name is not None and (first := lines.setdefault(name, number)) != number:
            raise PromptError(
                f"{path}:{number}: the id {name!r} is also that of {first}. Give each prompt one of its own."
            )
        if number % shard[1] == shard[0]:
            prompts.append(prompt)
            ids.append(str(number) if name is None else name)
    return prompts, ids


def _records(path: Path, column: str | None, id_column: str | None) -> Iterator[tuple[int, Any]]:
    """The numbers and values of the lines of a JSONL file that are not blank, or of the rows of a parquet file."""
    if not path.is_file():
        raise PromptError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        yield from enumerate(_rows(path, {*([column] if column else COLUMNS), id_column}))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                yield number, msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise PromptError(f"{path}:{number}: the line is not JSON: {error}") from None


def _rows(path: Path, columns: set[str | None]) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MidstreamError("A parquet file needs pyarrow: pip install pyarrow.") from error
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=[name for name in file.schema_arrow.names if name in columns]):
            yield from batch.to_pylist()


def _prompt_in(given: Any, column: str | None, checked: bool) -> Any:
    """The prompt of a line or row. Raises PromptError if it has several or none and, if `checked`, for a value that is no prompt."""
    if isinstance(given, Mapping):
        known = [name for name in ([column] if column else COLUMNS) if name in given]
        found = [name for name in known if given[name] is not None]
        if len(known) == 1 and not found and not checked:
            return None
        if len(found) != 1:
            allowed = column or f"one of {', '.join(COLUMNS)}; --column names another"
            raise PromptError(f"the columns are {', '.join(given) or 'none'}; allowed: {allowed}.")
        given = given[found[0]]
    is_tokens = isinstance(given, list) and all(type(each) is int and each >= 0 for each in given)
    if checked and (not given or not (isinstance(given, str) or is_tokens or is_chat(given))):
        raise PromptError(f"the prompt is {str(given)[:80]!r}; allowed: a text, token ids or chat messages, not empty.")
    return given


def _id_in(given: Any, id_column: str | None) -> str | None:
    if id_column is None:
        return None
    if not isinstance(given, Mapping) or not isinstance(name := given.get(id_column), (str, int)):
        raise PromptError(f"the column {id_column} has no id; allowed: a text or a number.")
    return str(name)


# The arguments.


def shard_of(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8)."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: I/N with I from 0 to N-1")
    return int(number), int(count)


def engine_arguments(given: Sequence[str]) -> dict[str, Any]:
    """`--max-model-len 4096 --enforce-eager --no-async-scheduling` as keyword arguments. Values are read as JSON if they are JSON."""
    found: dict[str, Any] = {}
    rest = list(given)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ParameterError(
                f"{flag!r} is not an option; allowed: the options of --help and --NAME VALUE for the engine."
            )
        name = flag.removeprefix("--").replace("-", "_")
        if not equals and (not rest or rest[0].startswith("--")):
            found[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        text = text if equals else rest.pop(0)
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _numbers(text: str) -> Any:
    """`5,14` as [5, 14]; a word as it is."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().lstrip("-").isdecimal() for part in parts) else text


def _plan(args: argparse.Namespace) -> Plan:
    if args.plan is not None:
        try:
            return Plan.from_json(args.plan.read_text(encoding="utf-8"))
        except OSError as error:
            raise ParameterError(f"--plan is {args.plan}, which cannot be read: {error.strerror}.") from error
    layers, positions = _numbers(args.layers), _numbers(args.positions)
    return Plan(tuple(Capture(site, layers=layers, positions=positions) for site in args.site.split(",")))


def start_model(name: str, backend: str, engine: Mapping[str, Any]) -> TraceModel:
    """A model on vLLM or transformers."""
    return (midstream.LanguageModel if backend == "transformers" else midstream.VLLM)(name, **engine)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="midstream collect",
        usage="midstream collect MODEL --prompts FILE --to DIR (--site SITE | --plan FILE) [any argument of the engine]",
        description="Capture the prompts of a file to a directory. Run it again after a kill: only missing prompts run.",
        epilog="Other options go to midstream.VLLM, or to LanguageModel: --tensor-parallel-size 2 is tensor_parallel_size=2.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a path or name")
    parser.add_argument("--prompts", metavar="FILE", type=Path, required=True, help="JSONL, or .parquet")
    parser.add_argument(
        "--to", metavar="DIR", type=Path, required=True, help="a directory for this model and plan alone"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--site", help="a site to capture, or several with commas, such as resid_post")
    what.add_argument("--plan", metavar="FILE", type=Path, help="a plan as JSON (Plan.to_json) instead of a site")
    parser.add_argument("--layers", default="all", help="with --site: layers with commas; all if not given")
    parser.add_argument(
        "--positions",
        default="last_prompt",
        help="with --site: last_prompt, all_prompt, all_generated, all, or positions as --positions=0,-1",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        type=shard_of,
        default=(0, 1),
        help="only the prompts whose number modulo N is I; for Slurm with --array=0-7: "
        "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT",
    )
    parser.add_argument("--column", help=f"where the prompts are; {', '.join(COLUMNS)} are found without it")
    parser.add_argument("--id-column", help="where the prompts' ids are; line numbers if not given")
    parser.add_argument("--limit-bytes", metavar="N", type=int, help="how many bytes of rows this process may write")
    parser.add_argument("--shard-bytes", metavar="N", type=int, help="about how large each file is")
    parser.add_argument("--skip-special-tokens", action="store_true", help="leave out rows of special tokens")
    parser.add_argument(
        "--on-bad",
        choices=ON_BAD,
        default="raise",
        help="what to do with prompts that the model cannot take: leave them out, or cut those that are too long",
    )
    parser.add_argument(
        "--params", metavar="JSON", type=json.loads, default={}, help='sampling parameters, such as {"max_tokens": 8}'
    )
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of all prompts, a path or name; on vLLM")
    parser.add_argument("--backend", choices=["vllm", "transformers"], default="vllm")
    args, rest = parser.parse_known_args(argv)
    plan, engine, params = _plan(args), engine_arguments(rest), args.params
    if args.adapter is not None:
        if args.backend == "transformers":
            parser.error("--adapter: a model on transformers has no adapters; allowed with --backend vllm")
        from midstream.engine import launch

        engine, params = {"enable_lora": True} | engine, {**params, "lora_request": launch.adapter_at(args.adapter)}
    prompts, ids = read_prompts(args.prompts, args.column, args.id_column, args.shard, args.on_bad)
    store = None
    try:
        with start_model(args.model, args.backend, engine) as model:
            try:
                store = model.collect(
                    prompts,
                    plan=plan,
                    to=args.to,
                    ids=ids,
                    shard_bytes=args.shard_bytes,
                    limit_bytes=args.limit_bytes,
                    skip_special_tokens=args.skip_special_tokens,
                    on_bad=args.on_bad,
                    **params,
                )
            except KeyboardInterrupt as stop:
                print(f"midstream: {stop}", file=sys.stderr)  # before the engine ends, which takes seconds
    except KeyboardInterrupt:
        print("midstream: interrupted", file=sys.stderr)
    if store is None:
        return 130
    nbytes = sum(path.stat().st_size for path in args.to.glob("*.safetensors"))
    of_shard = "" if args.shard == (0, 1) else f" of shard {args.shard[0]}/{args.shard[1]}"
    print(f"{len(store):,} of {len(ids):,} prompts{of_shard} are in {args.to}, whose files have {nbytes:,} bytes.")
    return 0
