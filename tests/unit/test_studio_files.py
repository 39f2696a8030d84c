"""The studio's files without a browser: how they are served, what they may load, and how they read streams and tokens (H11)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from fastapi import FastAPI
from fastapi.testclient import TestClient

from midstream.serve import studio
from midstream.sweeps.cells import align

FOLDER = Path(str(files("midstream.serve") / "studio"))
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(studio.router)
    return TestClient(app)


def test_the_page_and_its_files_have_their_types_and_a_strict_policy(client: TestClient) -> None:
    page = client.get("/midstream/studio")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.content == (FOLDER / "index.html").read_bytes()
    names = [each.name for each in FOLDER.iterdir()]
    assert {"index.html", "studio.css", "studio.js"} <= {*names}
    for name in names:
        answer = client.get(f"/midstream/studio/{name}")
        assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes(), name
        assert answer.headers["content-type"].startswith(TYPES[Path(name).suffix]), name
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "*" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_an_address_with_a_slash_leads_to_the_page(client: TestClient) -> None:
    answer = client.get("/midstream/studio/", follow_redirects=False)
    assert answer.status_code == 307 and answer.headers["location"].endswith("/midstream/studio")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fstudio.py", "%2e%2e/plugin.py", "studio.py", "%00"])
def test_no_other_file_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/midstream/studio/{name}").status_code == 404


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_html() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"\w+://|[\"'(]//\w|@import|url\(", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:", page)
    for address in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert (FOLDER.parent / address).is_file(), address


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's modules, where node can import them."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    folder = tmp_path_factory.mktemp("modules")
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def evaluated(folder: Path, script: str) -> list[object]:
    """What the script prints, a JSON value on each line."""
    (folder / "script.js").write_text(script)
    done = subprocess.run(["node", "script.js"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_reader_of_events_takes_a_stream_cut_at_any_byte(node: Path) -> None:
    script = """
    import { eventsOf } from "./events.js";
    const text = ': kept alive\\n\\nevent: cell\\r\\ndata: {"token": "日本"}\\r\\n\\r\\nid: 7\\ndata:one\\ndata: two\\n\\ndata: lost';
    const bytes = new TextEncoder().encode(text);
    for (let size = 1; size <= bytes.length; size++) {
      const stream = new ReadableStream({
        start(controller) {
          for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
          controller.close();
        },
      });
      const found = [];
      for await (const event of eventsOf(stream)) found.push(event);
      console.log(JSON.stringify(found));
    }"""
    expected = [{"name": "cell", "data": '{"token": "日本"}'}, {"name": "message", "data": "one\ntwo"}]
    found = evaluated(node, script)
    assert len(found) > 50 and all(each == expected for each in found)


def test_leaving_the_reader_cancels_the_stream(node: Path) -> None:
    script = """
    import { eventsOf } from "./events.js";
    let isCancelled = false;
    const bytes = new TextEncoder().encode("data: one\\n\\n");
    const stream = new ReadableStream({
      pull: (controller) => controller.enqueue(bytes),
      cancel: () => { isCancelled = true; },
    });
    for await (const _ of eventsOf(stream)) break;
    console.log(isCancelled);"""
    assert evaluated(node, script) == [True]


def test_token_strings_of_both_kinds_become_text(node: Path) -> None:
    cases = {
        "The França": ["The", "ĠFran", "Ã§", "a"],
        "日 x\n": ["æĹ", "¥", "Ġx", "Ċ"],
        "Paris is\n": ["<s>", "▁Paris", "▁is", "<0x0A>"],
        "naïve": ["▁na", "ï", "ve"],
        "Yes ": ["<|user|>", "Ċ", "Yes", "Ġ", "<|end|>"],  # in a chat template
    }
    script = f"""
    import {{ textsOf }} from "./tokens.js";
    for (const [prompt, strings] of Object.entries({json.dumps(cases)})) console.log(JSON.stringify(textsOf(strings, prompt)));"""
    assert evaluated(node, script) == [
        ["The", " Fran", "ç", "a"],
        ["⟨E6⟩⟨97⟩", "⟨A5⟩", " x", "\n"],
        ["<s>", " Paris", " is", "\n"],
        [" na", "ï", "ve"],
        ["<|user|>", "\n", "Yes", " ", "<|end|>"],
    ]


def test_white_space_and_control_characters_are_visible(node: Path) -> None:
    script = """
    import { visible } from "./tokens.js";
    for (const text of [" a b", "\\n\\t", "\\r\\u0000", ""]) console.log(JSON.stringify(visible(text)));"""
    assert evaluated(node, script) == ["␣a␣b", "↵⇥", "␍␀", "∅"]


def test_tokens_correspond_as_in_the_sweep(node: Path) -> None:
    pairs = [([1, 2, 3], [1, 9, 3]), ([1, 2, 3], [1, 8, 9, 3]), ([1, 2, 2, 3], [1, 2, 3]), ([1], [2, 3]), ([5, 5], [5])]
    script = f"""
    import {{ aligned, comparison }} from "./tokens.js";
    for (const pair of {json.dumps(pairs)}) console.log(JSON.stringify(aligned(...pair)));
    console.log(JSON.stringify(comparison([1, 2, 3, 4], [1, 5, 9, 3, 4])));"""
    *found, compared = evaluated(node, script)
    assert found == [align(*pair) for pair in pairs]
    assert compared == ["same", "unaligned", "same", "same"]


def test_a_pair_is_named_by_what_differs(node: Path) -> None:
    pairs = [
        (["The", " capital", " of", " France", " is"], ["The", " capital", " of", " Italy", " is"]),
        (["The", " France"], ["The", " United", " Kingdom"]),
        (["a", " b"], ["a"]),
        (["a", " b"], ["a", " b"]),
    ]
    script = f"""
    import {{ difference }} from "./tokens.js";
    for (const pair of {json.dumps(pairs)}) console.log(JSON.stringify(difference(...pair)));"""
    assert evaluated(node, script) == ["France → Italy", "France → United Kingdom", "b → ∅", "a b"]


def test_a_number_keeps_four_digits_whatever_its_size(node: Path) -> None:
    script = """
    import { significant } from "./dom.js";
    for (const value of [0, 1234.5678, -12345.6, 12.345678, -0.0123456, 1e-9]) console.log(JSON.stringify(significant(value)));"""
    assert evaluated(node, script) == ["0", "1235", "−12346", "12.35", "−0.01235", "0.000000"]


def test_a_refused_key_is_named_so(node: Path) -> None:
    script = """
    globalThis.document = { baseURI: "http://localhost/midstream/studio" };
    const stored = {};
    globalThis.sessionStorage = { getItem: (name) => stored[name] ?? null, setItem: (name, text) => { stored[name] = text; } };
    const { ask, key } = await import("./server.js");
    const answers = ANSWERS;
    for (const given of ["", "some-key"]) {
      if (given) key.set(given);
      for (const [status, body] of answers) {
        globalThis.fetch = async () => new Response(body, { status });
        await ask("v1/models").catch(({ message, status, param }) => console.log(JSON.stringify([message, status, param])));
      }
    }"""
    refused = "This API key was refused."
    named = {"error": {"message": "It is another's.", "param": "name"}}
    answers = [(401, '{"error": "Unauthorized"}'), (403, "<html>"), (403, json.dumps(named))]
    assert evaluated(node, script.replace("ANSWERS", json.dumps(answers))) == [
        ["The server asks for an API key.", 401, "key"],
        ["The server answered with status 403.", 403, None],
        ["It is another's.", 403, "name"],
        [refused, 401, "key"],
        [refused, 403, "key"],
        [f"{refused} It is another's.", 403, "name"],
    ]


def test_layers_are_read_from_text(node: Path) -> None:
    texts = ["all", "3", " 3, 5-7 ", "", "x", "3,", "-1", "7-5"]
    script = f"""
    globalThis.document = {{ baseURI: "http://localhost/midstream/studio" }};
    const {{ layersOf }} = await import("./steering.js");
    for (const text of {json.dumps(texts)}) console.log(JSON.stringify(layersOf(text)));"""
    assert evaluated(node, script) == ["all", [3], [3, 5, 6, 7], None, None, None, None, None]
