"""Engines shared by the tests: each is started once, by the first test that needs it, in each process that runs tests."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ranks
from engines import ENGINE, RANKS, STARTS, alive, start

# Without a GPU the kernels' tests use Triton's interpreter, which has to be chosen before anybody imports Triton. The engines that the
# tests start do not inherit the choice.
if importlib.util.find_spec("triton") and not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

import torch

from midstream.memory import without_collections
from midstream.trace.body import Modes

if TYPE_CHECKING:
    from clients import Client
    from oracle import Plain
    from servers import Server

    from midstream import VLLM, LanguageModel, Remote


# Tests of the models that do not hold with `--remote`, by a part of their files and names.
NOT_REMOTE = {
    "a_tensor_of_any_kind_is_saved": "a server sends dense tensors",
    "a_container_saved_under_two_names_comes_back_as_one": "a server sends the value of each name by itself",
    "samples_that_do_not_fit_into_one_step": "it asks for the engine's config",
    "traces_beside_drafted_tokens": "it changes the engine's config",
    "what_vllm_refuses_is_midstreams_error": "a server refuses these itself",
    "other_engines": "it starts engines of its own",
    "a_killed_collection": "it starts engines of its own",
    "tests/models/test_final.py": "the plan of a Remote is one client's, and only an administrator's may be final",
}
# What one process runs, by the beginnings of the tests' names.
TOGETHER = {
    "ranks": ("tests/ranks/",),
    "compiled": (
        *(f"tests/engine/test_{each}.py" for each in ("graph_sites", "lifecycle", "plan_engine")),
        "tests/models/test_apply.py",
    ),
    "traces_server": tuple(f"tests/engine/test_{each}.py" for each in ("serve_remote", "serve_sweeps", "inspect_ai")),
}
FOLDERS = ["ranks", "engine", "docs", "models", "gpu", "unit"]  # the longest first: two processes then end together


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--remote", action="store_true", help="run the engines' tests on a server, by midstream.Remote")
    parser.addoption("--ranks", choices=list(ranks.SIZES), help="run the engines' tests on engines of several ranks")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and tests send it
    torch.set_num_threads(1)  # the models are small, and the other core is an engine's
    if (name := config.getoption("--ranks")) is not None:
        RANKS.update(ranks.SIZES[name])
        # It counts whole GiB for each rank, and two engines of four ranks may run at once.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        ENGINE.update(gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 28)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep Python's collector from walking again and again over a million objects, while modules are imported."""
    with without_collections():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*FOLDERS, item.path.parent.name).index(item.path.parent.name))
    for item in items:
        if {"engine", "compiled"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker("engine")
    if config.getoption("--remote"):
        for item in items:
            for part, why in NOT_REMOTE.items():
                if part in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=why))
    if RANKS:
        for item in items:
            if (why := ranks.why_not(item.nodeid)) is not None:
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # one of xdist's processes
        output["starts"] = STARTS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    STARTS.extend(map(tuple, getattr(node, "workeroutput", {}).get("starts", [])))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if STARTS:
        terminalreporter.section(f"{len(STARTS)} engine starts, {sum(seconds for seconds, _ in STARTS):.0f} s")
        for seconds, what in sorted(STARTS, reverse=True):
            terminalreporter.write_line(f"{seconds:.1f} s {what}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole files to the two processes, but give all tests of several ranks to one of them, and the files that share a server or
    the engine that compiles.

    A rank spins while it waits for the others, so two engines of several ranks on two cores take many times as long as one.
    """
    from xdist.scheduler import LoadFileScheduling

    class FilesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = (each for each in TOGETHER if nodeid.startswith(TOGETHER[each]))
            return next(together, None) or super()._split_scope(nodeid)

    return FilesTogether(config, log)


@pytest.fixture(scope="session")
def hf() -> LanguageModel:
    """The bundled model on transformers, float32."""
    import torch

    from midstream import LanguageModel, demo_model

    return LanguageModel(demo_model(), dtype=torch.float32)


@pytest.fixture(scope="session")
def engine(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM | Remote]:
    """The bundled model on an eager engine in processes of its own, as users have it."""
    if pytestconfig.getoption("--remote"):
        from servers import remote

        with remote(tmp_path_factory.mktemp("server")) as model:
            yield model
        return
    with start(enforce_eager=True, worker_extension_cls="in_place_norms.InPlaceNorms") as model:
        yield model


@pytest.fixture(scope="session")
def compiled() -> Iterator[VLLM]:
    """The bundled model on an engine that compiles."""
    with start() as model:
        yield model


@pytest.fixture(scope="session")
def traces_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`midstream serve` with API keys and an administrator's, which allows traces."""
    from servers import ADMIN, KEYS, serving

    flags = ("--midstream-allow-traces", "--api-key", *KEYS)
    with serving(tmp_path_factory.mktemp("traces"), *flags, stock=False, MIDSTREAM_ADMIN_KEY=ADMIN) as server:
        yield server


@pytest.fixture(scope="session")
def plain() -> Plain:
    """The bundled model on plain transformers with torch hooks: the oracle of the trace tests."""
    from oracle import Plain

    from midstream import demo_model

    return Plain(demo_model())


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    """Starts `lifecycle_script.py`: its mode, and further arguments."""
    from clients import clients

    with clients() as begin:
        yield begin


@pytest.fixture(params=["hf", pytest.param("engine", marks=pytest.mark.engine)])
def model(request: pytest.FixtureRequest) -> Any:
    """Both backends in turn, for what means the same on both."""
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def torchs_modes_stay() -> Iterator[None]:
    """What a test changes of them would be the next one's: gradients off, say."""
    before = Modes.now()
    yield
    assert Modes.now() == before


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used a shared engine, nothing of its traces is alive on any worker."""
    yield
    for name in ("engine", "compiled"):
        if name in request.fixturenames:
            left = alive(request.getfixturevalue(name))
            assert not left, left
