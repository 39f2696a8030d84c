"""Which module may import which (style.md): `sites < arch < plan, trace < capture, transport < ranks < runtime < engine,
lowering, requests < sweeps < client < remote, transformers, vllm < serve`.

Read off the source, so that an import inside a function or under TYPE_CHECKING counts like any other. A module that is
new at the top of the package has to be entered below, as a leaf or as an entry point.
"""

import ast
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
PACKAGE = "midstream"

LAYERS = {
    "sites": 0,
    "arch": 1,
    "plan": 2,
    "sae_files": 3,
    "sae": 4,
    "trace": 2,
    "capture": 3,
    "transport": 3,
    "features": 5,
    "ranks": 4,
    "runtime": 5,
    "engine": 6,
    "lowering": 6,
    "requests": 6,
    "sweeps": 7,
    "client": 8,
    "remote": 9,
    "transformers": 9,
    "vllm": 9,
    "serve": 10,
}
LEAVES = {
    "errors",
    "settings",
    "bundled",
    "hooks",
    "memory",
    "plots",
    "progress",
    "queues",
    "tree",
}  # import nothing of midstream but each other; all may import them
ENTRY_POINTS = {
    "",
    "__main__",
    "cli",
    "commands",
    "inspect_ai",
    "ray",
}  # may import everything; "" is midstream/__init__.py
MAY_IMPORT_VLLM = {"engine", "serve"}
WITHOUT_VLLM = {
    "sites",
    "arch",
    "plan",
    "sae_files",
    "sae",
    "features",
    "trace",
    "capture",
    "transport",
    "sweeps",
    "ranks",
    "runtime",
    "lowering",
    "requests",
    "client",
    "remote",
    "transformers",
    "inspect_ai",
    "ray",
} | LEAVES


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((SRC / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def area(module: str) -> str:
    """The layer, leaf or entry point that a module of midstream belongs to: its name right below the package."""
    return module.split(".")[1] if "." in module else ""


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that the source imports; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = module.split(".")[: -up or None] if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the module's imports do against the rules, one line each."""
    here = area(module)
    if here not in LAYERS.keys() | LEAVES | ENTRY_POINTS:
        return [
            f"{module}: midstream/{here} is new: add it to LAYERS, LEAVES or ENTRY_POINTS of tests/unit/test_layers.py"
        ]
    found = []
    for line, name in imports(source, module, is_package):
        root = name.split(".")[0]
        if root == "vllm" and here not in MAY_IMPORT_VLLM:
            found.append(f"{module}:{line}: imports {name}; vLLM is imported under {sorted(MAY_IMPORT_VLLM)} alone")
        if root == PACKAGE and not may_import(here, area(name)):
            found.append(f"{module}:{line}: imports {name}, which does not lie below {here}")
    return found


def may_import(here: str, there: str) -> bool:
    if here in ENTRY_POINTS or there in LEAVES or here == there:
        return True
    return here in LAYERS and there in LAYERS and LAYERS[there] < LAYERS[here]


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    path = modules()[module]
    assert violations(path.read_text(), module, path.name == "__init__.py") == []


def test_the_scheduler_knows_of_plans_only_what_the_front_end_made_of_them() -> None:
    """Q2. Its steps wait for everything that it computes."""
    paths, found = modules(), set[str]()
    for name in ("scheduler", "prefix_cache", "shares"):
        module = f"midstream.engine.{name}"
        found |= {each for _, each in imports(paths[module].read_text(), module, False) if ".plan." in each}
    assert found == {
        "midstream.plan.probes.ScoreChunk",
        "midstream.plan.compile.ScheduledPlan",
        "midstream.plan.work.STEP_SECONDS",
        "midstream.plan.work.StepWork",
    }


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Modules that import each other in a circle, or None."""
    rest = dict(graph)
    while leaves := [module for module, imported in rest.items() if not imported & rest.keys()]:
        for module in leaves:
            del rest[module]
    path = [min(rest)] if rest else []
    while path and path[-1] not in path[:-1]:
        path.append(min(graph[path[-1]] & rest.keys()))
    return path[path.index(path[-1]) :] if path else None


def test_files_do_not_import_each_other_in_circles() -> None:
    paths = modules()
    graph = {
        module: {
            next((name for name in (found, found.rpartition(".")[0]) if name in paths), "")
            for _, found in imports(path.read_text(), module, path.name == "__init__.py")
        }
        - {"", module}
        for module, path in paths.items()
    }
    assert len(graph) > 20 and circle(graph) is None


def test_checker_finds_a_circle() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("midstream.sites.layouts", "from midstream.engine import worker", "not lie below sites"),
        ("midstream.sites.layouts", "from ..arch import find", "not lie below sites"),
        ("midstream.plan.steer", "from .. import trace", "not lie below plan"),
        ("midstream.plan.steer", "def f():\n    import midstream.vllm.vllm_model", "plan.steer:2"),
        ("midstream.plan.values", "from midstream.capture import segment", "not lie below plan"),
        ("midstream.capture.directory", "from midstream.client import results", "not lie below capture"),
        ("midstream.capture.directory", "import vllm", "imports vllm;"),
        ("midstream.engine.worker", "from midstream import VLLM", "not lie below engine"),
        ("midstream.engine.worker", "if TYPE_CHECKING:\n    from midstream.serve import app", "not lie below engine"),
        ("midstream.engine.worker", "import midstream", "not lie below engine"),
        ("midstream.engine.worker", "from midstream.commands.demo import main", "not lie below engine"),
        ("midstream.vllm.vllm_model", "from midstream.serve import app", "not lie below vllm"),
        ("midstream.errors", "from midstream.sites import Site", "not lie below errors"),
        ("midstream.vllm.vllm_model", "def f():\n    import vllm", "imports vllm;"),
        ("midstream.vllm.vllm_model", "from vllm.v1.engine import core", "imports vllm.v1.engine.core;"),
        ("midstream.trace.body", "importlib.import_module('vllm.config')", "imports vllm.config;"),
        ("midstream.cli", "import vllm", "imports vllm;"),
        ("midstream.gadgets", "", "midstream/gadgets is new"),
    ],
)
def test_checker_finds_a_violation(module: str, source: str, reason: str) -> None:
    (found,) = violations(source, module)
    assert reason in found


@pytest.mark.parametrize(
    ("module", "source", "is_package"),
    [
        ("midstream", "from .engine import plugin\nfrom midstream.serve import app", True),
        ("midstream.cli", "from midstream.serve import main", False),
        ("midstream.sites.layouts", "from . import dual\nfrom ..errors import MidstreamError\nimport torch", False),
        ("midstream.sites", "from .layouts import Single\nfrom .. import errors", True),
        (
            "midstream.engine.worker",
            "import vllm\nfrom midstream.plan import steer\nfrom ..trace.body import Body",
            False,
        ),
        ("midstream.engine", "from .worker import Worker\nfrom ..sites import Site", True),
        (
            "midstream.vllm.vllm_model",
            "from . import engine\nfrom .engine import EngineConnection\nfrom midstream.engine import plugin",
            False,
        ),
        ("midstream.serve.app", "import vllm\nfrom midstream.vllm import vllm_model", False),
    ],
)
def test_checker_allows_what_points_down(module: str, source: str, is_package: bool) -> None:
    assert violations(source, module, is_package) == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_midstream_is_light() -> None:
    """Neither vLLM nor torch is loaded, and it takes under half a second of a core (best of three)."""
    code = """
        import sys, time
        start = time.process_time()
        import midstream
        seconds = time.process_time() - start
        print(seconds, [name for name in ("vllm", "torch", "transformers", "numpy") if name in sys.modules])
    """
    seconds, loaded = [], set()
    for _ in range(3):
        first, _, rest = run_python(code).partition(" ")
        seconds.append(float(first))
        loaded.add(rest.strip())
    assert loaded == {"[]"}
    assert min(seconds) < 0.5


def test_layers_below_the_engine_import_without_vllm() -> None:
    names = [name for name in modules() if area(name) in WITHOUT_VLLM]
    output = run_python(f"""
        import importlib, importlib.machinery, importlib.util

        class NoVLLM(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.partition(".")[0] == "vllm" else super().find_spec(name, path, target)

        import sys
        sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = NoVLLM
        assert importlib.util.find_spec("vllm") is None
        for name in {names}:
            importlib.import_module(name)
        print("imported", len({names}))
    """)
    assert output.split() == ["imported", str(len(names))]


def test_importing_midstream_leaves_the_gpu_alone() -> None:
    """A process that has asked CUDA for its devices cannot be forked any more, and vLLM would start no engine. Seen failing there."""
    names = [name for name in modules() if area(name) in WITHOUT_VLLM]
    output = run_python(f"""
        import importlib

        import torch

        def asked(*args):
            raise AssertionError("CUDA was asked")

        torch._C._cuda_getDeviceCount = torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked
        for name in {names}:
            importlib.import_module(name)
        print("imported", len({names}))
    """)
    assert output.split() == ["imported", str(len(names))]


def test_language_model_loads_nothing_of_the_engine(tmp_path: Path) -> None:
    """K3: `LanguageModel` runs plans, captures, recorded runs and traces without `midstream.engine` and without vLLM."""
    script = tmp_path / "script.py"  # a trace is run from its source
    script.write_text(
        textwrap.dedent(f"""
        import sys

        from midstream import Capture, LanguageModel, Patch, Steer, demo_model

        model = LanguageModel(demo_model())
        prompt = "The capital of France is"
        run = model.record(prompt, sites=["resid_post"])
        plan = [Patch("resid_post", layer=2, position=-1, source=run), Capture("resid_post", layers=3)]
        (output,) = model.generate(prompt, plan=plan, answers=[" Paris"], max_tokens=2)
        store = model.collect(prompt, plan=Capture("resid_post", layers=3), to={str(tmp_path / "rows")!r})
        with model.trace(prompt, plan=Steer("resid_post", layers=3, vector=[1.0] * model.hidden_size)):
            hidden = model.layers_output[3].save()
        loaded = [name for name in sys.modules if name.partition(".")[0] == "vllm" or name.startswith("midstream.engine")]
        assert not loaded, loaded
        print(*hidden.shape, len(output.captures), len(output.answers), len(store))
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "256", "1", "1", "1"]


ALONE = """
    import importlib.util

    from midstream import Capture, LanguageModel, Steer, demo_model

    model = LanguageModel(demo_model())
    plan = [Steer("resid_post", layers=3, vector=[1.0] * model.hidden_size), Capture("resid_post", layers=3)]
    (output,) = model.generate("The capital of France is", plan=plan, max_tokens=2)
    with model.trace("The capital of France is"):
        hidden = model.layers_output[3].save()
    assert importlib.util.find_spec("vllm") is None
    print(*hidden.shape, len(output.captures), len(output.outputs[0].token_ids))
"""


@pytest.mark.slow
def test_the_package_alone_runs_plans_and_traces_on_transformers(tmp_path: Path) -> None:
    """The wheel of this tree, with no extras, where there is no vLLM. Seen failing for what vLLM alone brought."""
    root, venv = SRC.parent, tmp_path / "venv"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    torch_build = (
        [] if (links := os.environ.get("PIP_FIND_LINKS")) else ["--torch-backend=cpu"]
    )  # as in scripts/setup.sh
    environment |= {"UV_FIND_LINKS": links.replace(" ", ",")} if links else {}

    def run(*command: Path | str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    uv, python = Path(sys.executable).with_name("uv"), venv / "bin" / "python"
    run(uv, "build", "--wheel", "--out-dir", tmp_path, root)
    run(uv, "venv", "--python", sys.executable, venv)
    (wheel,) = tmp_path.glob("*.whl")
    page = SRC / "midstream" / "serve" / "studio"
    assert {f"midstream/serve/studio/{each.name}" for each in page.iterdir()} <= {*zipfile.ZipFile(wheel).namelist()}
    constraints = root / "requirements" / "cpu-constraints.txt"
    run(uv, "pip", "install", "--python", python, *torch_build, "-c", constraints, wheel)
    script = tmp_path / "script.py"  # a trace is run from its source
    script.write_text(textwrap.dedent(ALONE))
    assert run(python, script).split() == ["5", "256", "1", "2"]
