"""`midstream serve MODEL ...`: `vllm serve` with midstream's worker, scheduler, plugins and settings."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from midstream.errors import MidstreamError
from midstream.serve.files import read_files
from midstream.settings import GRAPH_BYTES, NAME, RECORD_BYTES, SCHEDULER, WORKER, Settings, chosen_graph_sites

_PLUGINS = "VLLM_PLUGINS"
_GROUP = "vllm.endpoint_plugins"


def main(argv: Sequence[str]) -> int:
    """Start the server; returns when it has ended."""
    parser = argparse.ArgumentParser(
        prog="midstream serve",
        usage="midstream serve MODEL [--midstream-...] [any argument of vllm serve]",
        description="vLLM's OpenAI server, with plans in its requests and midstream's routes under /v1/midstream.",
        epilog="`vllm serve --help` lists the other arguments.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--flags", action="store_true", help="print what stock `vllm serve` needs for the same server, and end"
    )
    parser.add_argument(
        "--midstream-graph-sites",
        metavar="SITES",
        help="as graph_sites of midstream.VLLM, with commas: only for tensor parallelism",
    )
    for name, default in (("graph_bytes", GRAPH_BYTES), ("record_bytes", RECORD_BYTES)):
        flag = f"--midstream-{name.replace('_', '-')}"
        parser.add_argument(flag, metavar="N", type=int, default=default, help=f"as {name} of midstream.VLLM")
    parser.add_argument(
        "--midstream-rename", metavar="JSON", type=json.loads, default={}, help="as rename of midstream.VLLM"
    )
    parser.add_argument(
        "--midstream-allow-traces",
        action="store_true",
        help="let clients with the API key run code in the engine: traces of midstream.Remote; needs --api-key",
    )
    parser.add_argument(
        "--midstream-sae",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="a sparse autoencoder of SAELens's that plans may use by this name; may be given several times",
    )
    parser.add_argument(
        "--midstream-vectors",
        metavar="FILE",
        action="append",
        default=[],
        help="a safetensors file of named vectors, as uploads have them; may be given several times",
    )
    parser.add_argument(
        "--midstream-plan",
        metavar="FILE",
        help="the engine-wide plan with which the server starts, as JSON: a list of interventions, or a plan with `final`",
    )
    own, rest = parser.parse_known_args(argv)
    given = own.midstream_graph_sites
    sites = given if given is None else list(filter(None, given.split(",")))
    settings = Settings(
        allow_traces=own.midstream_allow_traces,
        rename=own.midstream_rename,
        graph_sites=chosen_graph_sites(sites, tensor_ranks(rest)),
        graph_bytes=own.midstream_graph_bytes,
        record_bytes=own.midstream_record_bytes,
        saes=dict(map(_named_directory, own.midstream_sae)),
        vector_files=tuple(map(os.path.abspath, own.midstream_vectors)),
        plan_file=None if own.midstream_plan is None else os.path.abspath(own.midstream_plan),
    )
    flags, plugins = server_flags(settings, rest), allowed_plugins(os.environ)
    if own.flags:
        print(f"{_PLUGINS}={plugins} vllm serve {shlex.join(flags)}")
        return 0
    routes = next((each for each in entry_points(group=_GROUP) if each.name == NAME), None)
    if routes is None:
        raise MidstreamError(
            "This installation of midstream has no entry points. Install it again: pip install -e . in its folder."
        )
    read_files(settings)  # raises here, and not after the engine has started
    os.environ[_PLUGINS] = plugins
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
    try:
        _serve(flags, routes)
    except KeyboardInterrupt:  # SIGTERM or Ctrl-C before the server was up
        print("midstream: the server was ended before it was up.", file=sys.stderr)
        return 130
    return 0


def _named_directory(given: str) -> tuple[str, str]:
    name, equals, path = given.partition("=")
    if not (name and equals and path):
        raise MidstreamError(f"--midstream-sae is {given!r}; allowed: NAME=DIR.")
    return name, os.path.abspath(path)


def _serve(flags: Sequence[str], routes: EntryPoint) -> None:
    """Run `vllm serve`. vLLM's own program does not start with the CPU build, whose distribution has another name."""
    from vllm import logger
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command, parser = ServeSubcommand(), FlexibleArgumentParser(prog="midstream")
    command.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args([command.name, *flags])
    if (configure := getattr(logger, "configure_logging_from_args", None)) is not None:
        configure(arguments)
    command.validate(arguments)
    check_arguments(arguments, Settings(**arguments.additional_config[NAME]))
    routes.load()  # raises here. vLLM would only log the error, and serve without midstream's routes
    command.cmd(arguments)


def check_arguments(arguments: Any, settings: Settings) -> None:
    """Raise MidstreamError for arguments of `vllm serve` that start several front ends or engines, or allow traces without a key."""
    if settings.allow_traces and not (arguments.api_key or os.environ.get("VLLM_API_KEY")):
        raise MidstreamError(
            "Traces are code, so a server that allows them needs an API key: add --api-key, or leave --midstream-allow-traces out."
        )
    for flag, held in (
        ("api_server_count", "named vectors and captures live in one front end"),
        ("data_parallel_size", "named vectors and runs live in one engine"),
    ):
        if (count := getattr(arguments, flag, None) or 1) > 1:
            raise MidstreamError(
                f"--{flag.replace('_', '-')} {count} is not supported: {held}. Start several servers behind a load balancer."
            )


def tensor_ranks(given: Sequence[str]) -> int | None:
    """The number of tensor-parallel ranks in the arguments of `vllm serve`; None if a config file may set it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", type=int, dest="ranks")
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(given)
    return known.ranks or (None if known.config else 1)


def server_flags(settings: Settings, given: Sequence[str]) -> list[str]:
    """The arguments of `vllm serve`, with midstream's added. Raises MidstreamError for an argument that midstream sets."""
    rest, additional = list(given), dict[str, Any]()
    for name in ("worker-cls", "scheduler-cls"):
        if any(each.partition("=")[0] in (f"--{name}", f"--{name.replace('-', '_')}") for each in rest):
            raise MidstreamError(f"midstream sets --{name} to get into the engine; leave it out.")
    for i, each in enumerate(rest):
        flag, equals, value = each.partition("=")
        if flag in ("--additional-config", "--additional_config"):
            additional = json.loads(value if equals else rest[i + 1])
            del rest[i : i + 1 if equals else i + 2]
            break
    config = json.dumps(settings.to_config(additional))
    return [*rest, "--worker-cls", WORKER, "--scheduler-cls", SCHEDULER, "--additional-config", config]


def allowed_plugins(environment: Mapping[str, str]) -> str:
    """VLLM_PLUGINS with midstream in it. vLLM loads endpoint plugins only by name. If it is unset, vLLM loads all other plugins."""
    given = environment.get(_PLUGINS)
    names = (
        given.split(",") if given is not None else [each.name for each in entry_points(group="vllm.general_plugins")]
    )
    return ",".join(dict.fromkeys([*filter(None, names), NAME]))
