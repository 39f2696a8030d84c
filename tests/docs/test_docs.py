"""Rows A7, A8: every code block of the README and the docs is run, and what the pages say comes out is compared.

- A block ```python is run; the blocks of a page share their names. `model` (vLLM) and `hf` (transformers) are given.
- ```python notest is compiled only: for what cannot be run here, such as models of many gigabytes.
- ```python script is written to a file and run as a program of its own.
- `expression  # -> value` and `print(...)  # -> text` are compared; numbers to the digits that are shown.
- A block ```text that follows is all that the block before it printed.
- A block ```bash run is run.
- A block ```bash server or ```python server is run with a server on the bundled model that allows traces, and so are all blocks of the
  pages in `SERVED`.

Tracebacks point at the page: a block is compiled under the page's name, with its lines where they are in the page.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
from servers import serving

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
SERVED = ["docs/serving.md", "docs/recipes/inspect.md", "docs/recipes/monitor.md"]
URL, KEY, ADMIN_KEY = "http://localhost:8000", "my-key", "my-admin-key"  # of the server, on the pages
FENCE = re.compile(r"^( *)```(\w*) ?(.*)$")
EXPECTED = re.compile(r"# -> (.*)$", re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


@dataclass
class Block:
    """A fenced block of a page; `line` is that of its first line in the page."""

    language: str
    words: str
    line: int
    text: str


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    current: Block | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and current is None:
            current = Block(fence[2], fence[3].strip(), number + 1, "")
        elif fence and current is not None:
            found.append(current)
            current = None
        elif current is not None:
            current.text += line + "\n"
    assert current is None, f"a block that begins on line {current.line - 1} does not end"
    return found


def page_filename(page: str) -> str:
    return f"<{page}>"


def offer_source(page: str, blocks: list[Block]) -> None:
    """Have Python find the page's code under its name, each line where it is in the page."""
    lines: list[str] = []
    for block in blocks:
        lines += ["\n"] * (block.line - 1 - len(lines)) + block.text.splitlines(keepends=True)
    linecache.cache[page_filename(page)] = (sum(map(len, lines)), None, lines, page_filename(page))


def run_block(page: str, block: Block, names: dict[str, Any]) -> str:
    """Run a block statement by statement, comparing what its comments say; what it printed."""
    filename, printed = page_filename(page), io.StringIO()
    shown = block.text.splitlines()
    for statement in ast.parse("\n" * (block.line - 1) + block.text, filename).body:
        assert statement.end_lineno is not None
        comment = EXPECTED.search(shown[statement.end_lineno - block.line])
        where = f"{page}:{statement.end_lineno}"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), filename, "eval"), names)
            else:
                value = exec(compile(ast.Module([statement], []), filename, "exec"), names)
        printed.write(out.getvalue())
        if comment is not None:
            assert isinstance(statement, ast.Expr), f"{where}: `# ->` belongs behind an expression"
            expect(where, out.getvalue().strip() if value is None else repr(value), comment[1].strip())
    return printed.getvalue()


def expect(where: str, found: str, written: str) -> None:
    """The same text, numbers within one unit of the last digit that is written."""
    pattern = NUMBER.sub("#", written)
    assert NUMBER.sub("#", found) == pattern, f"{where}: the page says {written}, but it is {found}"
    for a, b in zip(NUMBER.findall(found), NUMBER.findall(written), strict=True):
        mantissa, _, exponent = b.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        assert abs(float(a) - float(b)) <= unit * 1.001, f"{where}: the page says {written}, but it is {found}"


def run_script(page: str, block: Block, folder: Path) -> str:
    """Run a block as a program of its own; what it printed, where its comments say so.

    The README's is started as a newcomer starts it. The others are forked from a process that has imported vLLM, which is faster, and
    their engines are forked, too.
    """
    assert 'if __name__ == "__main__":' in block.text  # else an engine's processes would run it again
    file, output, errors = (folder / name for name in ("script.py", "output", "errors"))
    file.write_text(block.text)
    if page == "README.md":
        with output.open("w") as out, errors.open("w") as err:
            command = [sys.executable, str(file)]
            done = subprocess.run(command, stdout=out, stderr=err, cwd=folder, env=script_environment(), timeout=600)
        code = done.returncode
    else:
        unset = dict.fromkeys(os.environ.keys() - script_environment().keys())
        run = partial(forked.run_script, file, folder)
        code = forked.Program(run, [str(file)], output, {**script_environment(), **unset}, errors).run(600)
    assert code == 0, errors.read_text()[-4000:]
    written = [match[1] for line in block.text.splitlines() if (match := EXPECTED.search(line))]
    lines = [line.strip() for line in output.read_text().splitlines()]
    for number, text in enumerate(written):
        assert text in lines, f"`{text}` (comment {number} of the block) was not printed: {lines}"
    return output.read_text()


def run_shell(page: str, block: Block, folder: Path) -> str:
    """Run a block of commands with bash; what it printed. An answer of 400 or more fails."""
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**script_environment(), "PATH": path, "CURL_HOME": str(folder)}
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert result.returncode == 0, f"{page}:{block.line}: {result.stdout}{result.stderr}"
    return result.stdout


def script_environment() -> dict[str, str]:
    """That of somebody who has just installed the package: none of the engine settings that the tests make."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    kept["RAY_AUTH_MODE"] = "disabled"  # clusters that other tests start at once would take each other's token
    kept["RAY_worker_niceness"] = "0"  # Ray's 15 would starve it while other tests run
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), kept.get("PYTHONPATH", "")])}


def compare_text(page: str, block: Block, printed: str) -> None:
    found = [line.rstrip() for line in printed.rstrip().splitlines()]
    written = [line.rstrip() for line in block.text.rstrip().splitlines()]
    assert len(found) == len(written), f"{page}:{block.line}: the block before printed\n{printed}"
    for number, (a, b) in enumerate(zip(found, written, strict=True)):
        expect(f"{page}:{block.line + number}", a, b)


def paired(blocks: list[Block]) -> Iterator[tuple[Block, Block | None]]:
    """Python blocks, ```bash server and ```bash run, each with the ```text block that follows it."""
    for block, following in zip(blocks, [*blocks, None][1:], strict=True):
        if block.language == "python" or block.words in ("server", "run"):
            yield block, following if following is not None and following.language == "text" else None


def run_page(page: str, blocks: list[Block], names: dict[str, Any], folder: Path) -> None:
    offer_source(page, [b for b in blocks if b.language == "python" and b.words in ("", "server")])
    for block, output in paired(blocks):
        assert block.words in ("", "notest", "script", "server", "run"), (
            f"{page}:{block.line - 1}: unknown words {block.words!r}"
        )
        if block.words == "notest":
            compile(block.text, page_filename(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            continue
        if block.language == "bash":
            printed = run_shell(page, block, folder)
        else:
            printed = run_script(page, block, folder) if block.words == "script" else run_block(page, block, names)
        if output is not None:
            compare_text(page, output, printed)


def read(page: str) -> list[Block]:
    return blocks_of((ROOT / page).read_text(encoding="utf-8"))


RUN = [page for page in PAGES if any(b.language == "python" for b in read(page))]


@pytest.mark.engine
@pytest.mark.parametrize("page", [page for page in RUN if page not in SERVED])
def test_a7_code_runs(page: str, engine: Any, hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for the files that recipes write
    try:
        here = [block for block in read(page) if block.words != "server"]
        run_page(page, here, {"__name__": "__page__", "model": engine, "hf": hf}, tmp_path)
    finally:
        engine.clear_edits()
        hf.clear_edits()


@pytest.mark.engine
def test_a7_code_runs_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--api-key", KEY, "--midstream-allow-traces")
    with serving(tmp_path, *flags, stock=False, MIDSTREAM_ADMIN_KEY=ADMIN_KEY) as server:
        for page in PAGES:
            blocks = [block for block in read(page) if page in SERVED or block.words == "server"]
            for block in blocks:
                block.text = block.text.replace(URL, server.url)
            run_page(page, blocks, {"__name__": "__page__"}, tmp_path)


RECIPES = {
    "ablation": "mlp_out",
    "steering": "resid_post",
    "logit-lens": "project_on_vocab",
    "activation-patching": "resid_post",
    "one-trace-patching": "barrier",
    "activation-cache": "tracer.cache",
    "head-ablation": "attn_z",
    "steering-plan": "Steer(",
    "probing": "LogisticRegression(",
    "direction-ablation": "Clamp(",
    "site-patching": "Patch(",
    "inspect": "read_captures(",
    "factual-recall": "model.sweep(",
    "indirect-object": "interval(",
    "heads": 'heads="all"',
    "path-patching": "model.path_patching(",
    "coarse-to-fine": "coarse=(",
    "sae": "sae_weights.safetensors",
    "monitor": "engine_plan = Probe(",
    "conditional-steering": "When(",
    "token-scores": "plot_token_scores(",
    "experts": 'Steer("router"',
    "induction-heads": "Knockout(",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a8_recipe_checks_itself(recipe: str) -> None:
    """Each recipe of row A8, and of issue 3, point 10, is there, uses what it is about, and says what comes out."""
    code = "".join(b.text for b in read(f"docs/recipes/{recipe}.md") if b.language == "python" and b.words != "notest")
    assert RECIPES[recipe] in code
    assert "assert" in code or EXPECTED.search(code)


@pytest.mark.parametrize("page", RUN)
def test_a7_every_page_says_what_comes_out(page: str) -> None:
    blocks = read(page)
    checked = any("assert " in b.text or EXPECTED.search(b.text) for b in blocks if b.language == "python")
    assert checked or any(output for _, output in paired(blocks))


RESULTS = [str(page.relative_to(ROOT)) for page in (ROOT / "benchmarks" / "results").glob("*.md")]


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", *RESULTS])
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_every_page_is_on_the_map() -> None:
    """docs/index.md links to every page of docs/."""
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs/index.md").read_text(encoding="utf-8")))
    pages = {str(Path(page).relative_to("docs")) for page in PAGES if page.startswith("docs/")} - {"index.md"}
    assert pages <= linked, pages - linked


def test_the_reference_is_what_the_code_says() -> None:
    """F4: signatures and docstrings, as `python scripts/write_reference.py` writes them."""
    pytest.importorskip("vllm")
    script = runpy.run_path(str(ROOT / "scripts/write_reference.py"))
    assert script["page"]() == script["PAGE"].read_text(encoding="utf-8"), "run scripts/write_reference.py"


# The runner of pages itself: it must be able to fail.

PAGE = """
```python
x = 2.0
x * 2  # -> 4.0
```

```python
def f():
    raise KeyError("here")
```

```python notest
from nowhere import nothing
```
"""


def test_runner_compares_values(tmp_path: Path) -> None:
    run_page("page.md", blocks_of(PAGE), {}, tmp_path)
    with pytest.raises(AssertionError, match=r"page\.md:4: the page says 5\.0, but it is 4\.0"):
        run_page("page.md", blocks_of(PAGE.replace("-> 4.0", "-> 5.0")), {}, tmp_path)
    with pytest.raises(SyntaxError):
        run_page("page.md", blocks_of(PAGE.replace("from nowhere", "from nowhere nothing")), {}, tmp_path)


@pytest.mark.parametrize(
    ("found", "written", "same"),
    [
        ("0.7351", "0.735", True),
        ("0.7372", "0.735", False),
        ("' Paris'", "' Rome'", False),
        ("1.2e-07", "1.3e-07", True),
    ],
)
def test_runner_compares_numbers_to_the_digits_shown(found: str, written: str, same: bool) -> None:
    with contextlib.nullcontext() if same else pytest.raises(AssertionError):
        expect("here", found, written)


def test_runner_compares_what_is_printed(tmp_path: Path) -> None:
    page = "```python\nprint('a', 1.25)\n```\n\n```text\na 1.25\n```\n"
    run_page("page.md", blocks_of(page), {}, tmp_path)
    with pytest.raises(AssertionError, match="page says b"):
        run_page("page.md", blocks_of(page.replace("\na 1", "\nb 1")), {}, tmp_path)


def test_runner_shows_the_line_of_the_page(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    run_page("page.md", blocks_of(PAGE), names, tmp_path)
    with pytest.raises(KeyError) as caught:
        names["f"]()
    entry = caught.traceback[-1]
    assert (entry.frame.code.raw.co_filename, entry.lineno + 1) == ("<page.md>", 9)
    assert linecache.getline("<page.md>", 9) == '    raise KeyError("here")\n'


def test_the_files_that_architecture_names_exist() -> None:
    """Also that every folder of the package has its line there."""
    named = set(re.findall(r"`([\w/]+\.py|[\w/]+/)`", (ROOT / "docs" / "architecture.md").read_text()))
    package = ROOT / "src" / "midstream"
    assert len(named) > 50
    assert [n for n in named if not any((root / n).exists() for root in (package, ROOT))] == []
    assert {f"{each.parent.name}/" for each in package.glob("*/__init__.py")} <= named
