"""The studio in a real headless browser, on `midstream serve` of the bundled model (H11). Its numbers are those of plain HTTP.

After each test the browser's console holds no error, and so no violation of the page's content security policy.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import csv
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save_file
from servers import Server, serving

from midstream import SAE, Remote
from midstream.sites import LAYER_SITES

pytestmark = pytest.mark.engine

KEY, HIDDEN = "my-key", 256
CLEAN, CORRUPT, ANSWER, FOIL = "The capital of France is", "The capital of Italy is", " Paris", " Rome"
SWEEP = {"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWER, "foil": FOIL, "sites": ["resid_post"]}
SPAIN = {
    "clean": "The capital of Spain is",
    "corrupt": "The capital of Germany is",
    "answer": " Madrid",
    "foil": " Berlin",
}
JAPAN = {
    "clean": "The capital of Japan is",
    "corrupt": "The capital of China is",
    "answer": " Tokyo",
    "foil": " Beijing",
}
LAYERS = 8


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian's chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,720"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        browser.set_page_load_timeout(60)
        browser.set_script_timeout(60)
        size = {"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield browser


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Not started where there is no browser."""
    with serving(tmp_path_factory.mktemp("studio"), "--api-key", KEY, stock=False) as server:
        yield server


class Page:
    """The studio in the browser. Elements are found by their ids."""

    def __init__(self, browser: Any, server: Server) -> None:
        self.browser, self.server = browser, server
        self.expected = ""  # a regular expression of the console's errors that belong to the test

    def open(self, key: str = KEY, theme: str = "light") -> None:
        """Open the page anew, with an API key and nothing else in its storage."""
        self.emulate(theme)
        self.browser.get(f"{self.server.url}/midstream/studio/icon.svg")  # of the same origin
        self.run(
            "sessionStorage.clear(); localStorage.clear(); if (arguments[0]) sessionStorage[arguments[1]] = arguments[0]",
            key,
            "midstream-api-key",
        )
        self.browser.get(f"{self.server.url}/midstream/studio")
        if key:
            self.wait(lambda: "demo" in self.text("model") and self.all("#site option"))

    def emulate(self, theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def __getitem__(self, name: str) -> Any:
        return self.browser.find_element("id", name)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def text(self, name: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", name))

    def texts(self, selector: str) -> list[str]:
        return list(
            self.run("return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector)
        )

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, (self.text("progress"), self.texts(".error, .alert"), self.console())
            time.sleep(0.05)
        return found

    def write(self, name: str, text: str) -> None:
        self[name].clear()
        self[name].send_keys(text)

    def fill(self, **fields: str) -> None:
        """Write into fields, and wait until the page has checked them."""
        for name, text in fields.items():
            self.write(name, text)
        for name in fields:
            self.wait(lambda name=name: self.text(f"{name}-note"))

    def sweep(self, **fields: str) -> None:
        """Fill in the form, and run it to its end."""
        self.fill(**{"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWER, "foil": FOIL, **fields})
        self.start()

    def add(self, **fields: str) -> None:
        """Add a pair to the form."""
        self["add"].click()
        self.fill(**fields)

    def start(self) -> None:
        """Run the sweep that the form describes to its end."""
        self["run"].click()
        self.wait(lambda: self["run"].is_enabled() and "noise floor" in self.text("progress"))

    def show(self, pair: int | str) -> None:
        """Choose the pair in the heatmaps, or "mean"."""
        self["shown"].find_element("css selector", f"[value='{pair}']").click()

    def readout(self, name: str = "readout") -> dict[str, str]:
        return dict(zip(self.texts(f"#{name} dt"), self.texts(f"#{name} dd"), strict=True))

    def choose(self, name: str, value: str) -> None:
        """Choose an option of a select."""
        self[name].find_element("css selector", f"option[value='{value}']").click()

    def copied(self, directory: Path, prefix: str = "", file: str = "sweep.py") -> str:
        """What "Copy as Python" gives. A browser without a clipboard saves it in the directory."""
        grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        self.browser.execute_cdp_cmd("Browser.grantPermissions", grant)
        self[f"{prefix}copy"].click()
        self.wait(lambda: self.text(f"{prefix}taking-note"))
        if self.text(f"{prefix}taking-note") == "Copied.":
            return str(self.browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])"))
        self.wait((directory / file).exists)
        return (directory / file).read_text()

    def exported(self, directory: Path) -> list[dict[str, str]]:
        """The rows of "Export the cells"."""
        self["export"].click()
        self.wait((directory / "sweep.csv").exists)
        with (directory / "sweep.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def press(self, *keys: str) -> None:
        """Press keys wherever the focus is."""
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def focused(self) -> dict[str, str]:
        script = """const it = document.activeElement;
            return {id: it.id, role: it.getAttribute("role") ?? "", label: it.getAttribute("aria-label") ?? ""}"""
        return dict(self.run(script))

    def labels(self) -> dict[tuple[str, int, int], str]:
        """The label of every cell, by site, layer and column."""
        script = """return [...document.querySelectorAll("[role=gridcell]")].map((it) => [
            it.closest("figure").querySelector("figcaption").textContent,
            arguments[0] - Number(it.parentNode.getAttribute("aria-rowindex")), Number(it.getAttribute("aria-colindex")) - 2,
            it.getAttribute("aria-label")])"""
        return {(site, row, column): label for site, row, column, label in self.run(script, LAYERS)}

    def cell(self, row: int, column: int) -> Any:
        return self.all("[role=grid]")[0].find_element(
            "css selector", f"[aria-rowindex='{LAYERS - row}'] [aria-colindex='{column + 2}']"
        )

    def console(self) -> list[str]:
        """The console's errors and warnings since the last call."""
        found = [each for each in self.browser.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]
        return [each["message"] for each in found if "/favicon.ico" not in each["message"]]  # for the icon by itself


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Page]:
    page = Page(browser, server)
    page.console()
    page.open()
    yield page
    errors = page.console()
    assert all(page.expected and re.search(page.expected, each) for each in errors), errors


def events(server: Server, **changes: Any) -> list[dict[str, Any]]:
    """The events of a sweep by plain HTTP."""
    status, text = server.post("/v1/midstream/sweeps", {**SWEEP, **changes}, key=KEY)
    assert status == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def value_of(label: str) -> float:
    """The number in a cell's label, `layer 3, ␣Italy: 16.642, within the noise floor`."""
    found = re.search(r": (−?[\d.]+)(, within the noise floor)?$", label)
    assert found, label
    return float(found[1].replace("−", "-"))


# ------------------------------------------------------------------------------------------------------- causal tracing


@pytest.mark.parametrize(
    "metric, direction",
    [
        ("logit_diff", "denoising"),
        pytest.param("logprob", "noising", marks=pytest.mark.matrix),
        pytest.param("recovered", "denoising", marks=pytest.mark.matrix),
    ],
)
def test_a_sweep_from_the_empty_form_fills_the_heatmap(page: Page, server: Server, metric: str, direction: str) -> None:
    assert not page["clean"].get_attribute("value") and not page.all("[role=grid]")
    assert [each.get_attribute("value") for each in page.all("#site-list input:checked")] == ["resid_post"]
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
    assert page.texts("#clean-tokens li") == ["The", "␣capital", "␣of", "␣France (differs)", "␣is"]
    assert page.texts("#corrupt-tokens .changed") == ["␣Italy (differs)"]
    assert page.text("answer-note") == "␣Paris is token 965"
    for name, value in (("metric", metric), ("direction", direction)):
        page[name].find_element("css selector", f"[value={value}]").click()
    page["run"].click()
    page.wait(lambda: "noise floor" in page.text("progress"))

    start, *rest = events(server, metric=metric, direction=direction)
    cells, labels = [each for each in rest if each["event"] == "cell"], page.labels()
    assert len(labels) == len(cells) == start["cells"] == LAYERS * 5
    for cell in cells:
        label = labels[("resid_post", *cell["index"])]
        token = cell["token"].replace(" ", "␣")
        assert label.startswith(f"layer {cell['layers'][0]}, {token}: ")
        assert value_of(label) == pytest.approx(cell["value"], abs=2e-3)
    assert f"{start['cells']} cells" in page.text("progress")
    (baselines,) = (each for each in rest if each["event"] == "baselines")
    patched = baselines["corrupt" if direction == "denoising" else "clean"]
    centre = {"logit_diff": patched[0] - patched[-1], "logprob": patched[0], "recovered": 0.0}[metric]
    for label in labels.values():
        if "within the noise floor" in label:
            assert value_of(label) == pytest.approx(centre, abs=2e-3)
    assert 10 <= sum("within the noise floor" in label for label in labels.values()) < len(labels)


def test_layers_and_sites_are_in_the_models_order(page: Page) -> None:
    """As in the figures of Python: the first layer at the bottom, blue for more."""
    sites = [each.get_attribute("value") for each in page.all("#site-list input")]
    assert sites == [site for site in LAYER_SITES if site in sites] and len(sites) == 12
    page.sweep()
    values = [value_of(label) for label in page.labels().values()]
    found = re.findall(r"−?[\d.]+", page["gradient"].get_attribute("aria-label"))
    assert [float(each.replace("−", "-")) for each in found] == pytest.approx([min(values), max(values)], abs=0.01)
    heights = [page.cell(layer, 0).location["y"] for layer in range(LAYERS)]
    assert heights == sorted(heights, reverse=True)
    (red, _, blue), (white, *_) = (
        [int(each) for each in re.findall(r"\d+", colour)]
        for colour in page.run(
            """const middle = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const rgb = (it) => { middle.fillStyle = getComputedStyle(it).backgroundColor; middle.fillRect(0, 0, 1, 1);
              return [...middle.getImageData(0, 0, 1, 1).data].slice(0, 3).join(" "); };
            return [rgb(arguments[0]), rgb(arguments[1])];""",
            page.cell(2, 3),
            page.cell(2, 0),
        )
    )
    assert blue > red + 50 and white > 230  # Italy becomes France; the first token changes nothing


def test_heads_are_patched_one_by_one(page: Page) -> None:
    page["heads"].click()
    page.sweep()
    start, *rest = events(page.server, sites=["attn_z"], heads="all", positions="together")
    cells, labels = [each for each in rest if each["event"] == "cell"], page.labels()
    assert len(labels) == len(cells) == start["cells"] == LAYERS * len(start["grid"]["heads"]) > LAYERS
    for cell in cells:
        row, head, _ = cell["index"]
        label = labels["attn_z", row, head]
        assert label.startswith(f"layer {row}, head {head}: ")
        assert value_of(label) == pytest.approx(cell["value"], abs=2e-3)
    page.cell(4, 1).click()
    page.wait(lambda: len(page.all("#top li")) == 20)
    found = events(page.server, sites=["attn_z"], layers=[4], heads=[1], positions="together", top=10)
    (patched,) = (each["top"] for each in found if each["event"] == "cell")
    assert page.texts("#top section:nth-child(1) code")[0] == patched[0][0].replace(" ", "␣")
    assert page.readout()["Head"] == "1"


def test_a_sweep_is_taken_away_as_python_and_as_a_table(page: Page, tmp_path: Path) -> None:
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    assert not page["taking"].is_displayed()
    page.sweep()
    text = page.copied(tmp_path)
    (call,) = (
        each
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "sweep"
    )
    given = (
        [ast.literal_eval(each) for each in call.args],
        {each.arg: ast.literal_eval(each.value) for each in call.keywords},
    )
    assert given == (
        [CLEAN, CORRUPT, ANSWER, FOIL],
        {"sites": ["resid_post"], "metric": "logit_diff", "direction": "denoising"},
    )
    assert f'Remote("{page.server.url}")' in text
    rows = page.exported(tmp_path)
    cells = {(each["layers"][0], each["positions"][0]): each for each in events(page.server) if each["event"] == "cell"}
    assert len(rows) == len(cells) == LAYERS * 5
    for row in rows:
        cell = cells[int(row["layer"]), int(row["position"])]
        assert (row["pair"], row["site"], row["token"], row["column"]) == ("0", "resid_post", *[cell["token"]] * 2)
        assert float(row["value"]) == pytest.approx(cell["value"], abs=2e-3)
        assert float(row["logprob"]) == pytest.approx(cell["logprobs"][0], abs=2e-3)


def test_a_cell_with_the_pointer_or_the_focus_on_it_shows_its_value(page: Page) -> None:
    page.sweep()
    from selenium.webdriver import ActionChains

    ActionChains(page.browser).move_to_element(page.cell(2, 3)).perform()
    shown = page.readout()
    assert (shown["Site"], shown["Layer"], shown["Token"], shown["Position"]) == ("resid_post", "2", "␣Italy", "3")
    value = page.labels()["resid_post", 2, 3].rpartition(": ")[2]
    assert shown["logit difference"] == value and set(shown) >= {"Change", "Recovered", "log p(␣Paris)"}


def test_a_click_shows_the_cells_top_tokens_beside_the_baselines(page: Page, server: Server) -> None:
    page.sweep()
    page.cell(4, 3).click()
    page.wait(lambda: len(page.all("#top li")) == 20)
    found = events(server, layers=[4], positions=[3], top=10)
    (patched,) = (each["top"] for each in found if each["event"] == "cell")
    plain = next(each["top"] for each in found if each["event"] == "noise" and each["kind"] == "baseline")
    for number, top in ((1, patched), (2, plain)):
        tokens = page.texts(f"#top section:nth-child({number}) code")
        assert tokens[:2] == [token.replace(" ", "␣") for token, _ in top[:2]]  # those after them are almost equal
        assert len(tokens) == 10
    assert page.texts("#top h3") == ["Patched", "Unpatched corrupt"]
    share = page.texts("#top section:first-child li:first-of-type span")[0]
    assert float(share.rstrip("%")) == pytest.approx(100 * np.exp(patched[0][1]), abs=0.2)


def test_cells_arrive_one_by_one_and_cancel_ends_the_sweep_on_the_server(page: Page, server: Server) -> None:
    many = " ".join(["The capital of France is Paris and"] * 30)
    page.fill(clean=f"{many} {CLEAN}", corrupt=f"{many} {CORRUPT}", answer=ANSWER, foil=FOIL)
    for site in ("attn_out", "mlp_out", "resid_mid"):
        page[f"site-{site}"].click()
    page["run"].click()
    counts = "return ['.cell', '.cell.pending'].map((each) => document.querySelectorAll(each).length)"

    def is_partly_filled() -> bool:
        cells, pending = page.run(counts)
        return bool(cells and 0 < pending < cells)

    page.wait(is_partly_filled)
    assert server.ask("GET", "/v1/midstream/gauges", key=KEY)[1]["server"]["sweeps"] == 1
    page["cancel"].click()
    page.wait(lambda: page.text("progress").startswith("Cancelled after"))
    done, total = map(int, re.findall(r"\d+", page.text("progress")))
    assert 0 < done < total and page["run"].is_enabled() and not page["cancel"].is_enabled()

    def is_idle() -> bool:
        gauges = server.ask("GET", "/v1/midstream/gauges", key=KEY)[1]
        own = [gauges["server"][name] for name in ("running_prompts", "sweeps", "runs")]
        return not any(own) and not any(each[name] for each in gauges["workers"] for name in ("requests", "leases"))

    page.wait(is_idle, 20)


def test_an_answer_of_two_tokens_is_an_error_at_its_field(page: Page) -> None:
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer="terrible", foil=FOIL)
    page.wait(lambda: page["answer"].get_attribute("aria-invalid") == "true")
    assert re.fullmatch(r"2 tokens: \w+ \| \w+\. One is needed\.", page.text("answer-note"))
    assert page["answer"].get_attribute("aria-describedby") == "answer-note"
    page["run"].click()
    page.wait(lambda: page["run"].is_enabled())
    assert not page.all("[role=grid]") and page.focused()["id"] == "answer"
    page.wait(page["answer-space"].is_displayed)
    page["answer-space"].click()
    page.wait(lambda: page.text("answer-note") == "␣terrible is token 689")
    assert page["answer"].get_attribute("aria-invalid") is None and not page["answer-space"].is_displayed()
    page["run"].click()
    page.wait(lambda: "noise floor" in page.text("progress"))


def test_the_foils_label_follows_the_metric(page: Page) -> None:
    told = []
    for metric in ("logprob", "recovered", "logit_diff"):
        page.choose("metric", metric)
        told.append(page.text("foil-need"))
    assert told == ["optional", "optional", "required"]
    page.choose("metric", "logprob")
    page["foil"].send_keys(FOIL)
    assert page.text("foil-need") == "optional"  # of a single pair
    page["add"].click()
    assert page.text("foil-need") == "required"  # all pairs have a foil, or none has


def test_what_is_missing_is_said_at_each_field(page: Page) -> None:
    page["site-resid_post"].click()
    page["run"].click()
    page.wait(lambda: page.text("foil-note"))
    wrong = {name: page.text(f"{name}-note") for name in ("clean", "corrupt", "answer", "foil", "sites")}
    assert wrong == {
        "clean": "Enter a prompt.",
        "corrupt": "Enter a prompt.",
        "answer": "Enter an answer of one token.",
        "foil": "The logit difference needs a foil.",
        "sites": "Tick at least one site.",
    }
    assert page.focused()["id"] == "clean"


def test_the_servers_own_error_is_shown_at_the_field_it_names(page: Page) -> None:
    """With several pairs it is shown above the heatmaps: the server does not say which pair it is."""
    with answering(page, "/sweeps", 400, '{"error": {"message": "This foil is odd.", "param": "foil"}}'):
        page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
        page["run"].click()
        page.wait(lambda: page.text("foil-note") == "This foil is odd.")
        page.wait(page["run"].is_enabled)
        assert page["foil"].get_attribute("aria-invalid") == "true" and page.focused()["id"] == "foil"
        page.add(**SPAIN)
        page["run"].click()
        page.wait(lambda: page.text("sweep-alert") == "This foil is odd.")
        assert page.text("foil-note").endswith("is token 1048")


def test_tokens_without_a_counterpart_are_void_with_a_reason(page: Page) -> None:
    page.sweep(corrupt="The capital of the United Kingdom is")
    apart = page.texts("#corrupt-tokens .unaligned")
    assert apart and all(each.endswith("(no counterpart)") for each in apart)
    labels = page.labels()
    voids = [label for label in labels.values() if "void: no token of the other prompt corresponds" in label]
    assert len(voids) == LAYERS * len(apart) == len(page.all(".cell.void"))
    page.cell(0, 3).click()
    assert "No token of the other prompt corresponds." in page.texts("#readout dd")


def test_what_a_user_writes_stays_text(page: Page) -> None:
    hostile = "<img src=x onerror=alert(1)><b>bold</b>"
    page.fill(clean=f"{CLEAN} {hostile}", corrupt=f"{CORRUPT} {hostile}", answer=ANSWER, foil=FOIL)
    assert "".join(page.texts("#clean-tokens li")).replace(" (differs)", "").endswith(hostile.replace(" ", "␣"))
    page["run"].click()
    page.wait(lambda: "noise floor" in page.text("progress"))
    assert not page.all("img, b") and page.texts("[role=columnheader]")


# -------------------------------------------------------------------------------------------------------- several pairs


def ran(text: str, monkeypatch: pytest.MonkeyPatch, name: str = "result") -> Any:
    """Run the code of "Copy as Python" as it is, with the API key in the environment. Returns its variable of this name."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    monkeypatch.setenv("MIDSTREAM_API_KEY", KEY)
    names: dict[str, Any] = {}
    exec(compile(text, "sweep.py", "exec"), names)
    pyplot.close("all")
    names["model"].close()
    return names[name]


def assert_shows(page: Page, values_by_site: dict[str, Any]) -> None:
    """The heatmaps show these values `[layers, columns]`; NaN is void."""
    labels = page.labels()
    assert len(labels) == sum(values.size for values in values_by_site.values())
    for (site, row, column), label in labels.items():
        value = values_by_site[site][row, column]
        if np.isnan(value):
            assert ": void: " in label
        else:
            assert value_of(label) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize(
    "metric, direction",
    [pytest.param("logit_diff", "denoising", marks=pytest.mark.matrix), ("recovered", "noising")],
)
def test_a_sweep_over_several_pairs_agrees_with_the_python_client(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, direction: str
) -> None:
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page["site-mlp_out"].click()
    for name, value in (("metric", metric), ("direction", direction)):
        page[name].find_element("css selector", f"[value={value}]").click()
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
    page.add(**SPAIN)
    page.add(**JAPAN)
    assert page.texts("#pairs .pick span:nth-child(2)") == ["France → Italy", "Spain → Germany", "Japan → China"]
    page.start()
    result = ran(page.copied(tmp_path), monkeypatch)
    assert [pair.answer for pair in result.outline.pairs] == [ANSWER, " Madrid", " Tokyo"]
    assert (result.metric, result.outline.direction) == (metric, direction)

    def header() -> list[str]:
        return page.texts("figure:first-child [role=columnheader]")

    assert page["shown"].get_attribute("value") == "mean"
    assert_shows(page, result.values)
    assert header() == ["The", "␣capital", "␣of", "position 3", "␣is"]
    assert [each.label for each in result.outline.grid.columns] == ["The", " capital", " of", "position 3", " is"]
    page.cell(4, 3).click()
    shown, name = page.readout(), "recovered" if metric == "recovered" else "logit difference"
    assert (shown["Token"], shown["Position"], shown["Pairs"]) == ("differs by pair", "3", "3 of 3")
    site, numbers = (
        shown["Site"],
        {each: float(shown[each].replace("−", "-")) for each in (name, "Change", "Standard error")},
    )
    assert numbers[name] == pytest.approx(result.values[site][4, 3], abs=2e-3)
    assert numbers["Change"] == pytest.approx(result.values[site][4, 3] - result.baseline, abs=2e-3)
    assert numbers["Standard error"] == pytest.approx(result.standard_error[site][4, 3], abs=2e-3)
    assert page.text("top-note").startswith("Choose one pair") and not page.all("#top li")

    for pair, token in enumerate(
        ["␣France", "␣Spain", "␣Japan"] if direction == "noising" else ["␣Italy", "␣Germany", "␣China"]
    ):
        page.show(pair)
        assert_shows(page, {site: values[pair] for site, values in result.by_pair.items()})
        assert header() == ["The", "␣capital", "␣of", token, "␣is"]
        assert page.texts("figure:first-child .label.changed") == [token]
    assert page.readout()["Token"] == token and "log p(␣Tokyo)" in page.readout()
    page.show("mean")
    assert_shows(page, result.values)

    frame, rows = result.to_dataframe(), page.exported(tmp_path)
    assert len(rows) == len(frame) == 3 * 2 * LAYERS * 5
    for row, (_, known) in zip(rows, frame.iterrows(), strict=True):
        assert {*row} == {*frame.columns}
        for column in ("pair", "site", "layer", "position", "token", "column"):
            assert row[column] == str(known[column])
        for column in ("logprob", "foil_logprob", "value", "recovered"):
            assert float(row[column]) == pytest.approx(known[column], abs=2e-3)


def test_an_answer_without_its_space_is_warned_of_above_the_heatmaps(page: Page) -> None:
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER.strip(), foil=FOIL)
    page.start()
    found = dict((each["event"], each) for each in events(page.server, answer=ANSWER.strip()))["baselines"]["warnings"]
    assert page.text("sweep-warning") == found[0] and len(found) == 1 and f"answer={ANSWER!r}" in found[0]
    page.fill(answer=ANSWER)
    page.start()
    assert page.text("sweep-warning") == ""


def test_a_click_runs_the_cell_of_the_shown_pair_again(page: Page, server: Server) -> None:
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
    page.add(**SPAIN)
    page.start()
    page.show(1)
    page.cell(4, 3).click()
    page.wait(lambda: len(page.all("#top li")) == 20)
    found = events(server, **SPAIN, layers=[4], positions=[3], top=10)
    (patched,) = (each["top"] for each in found if each["event"] == "cell")
    assert page.texts("#top section:first-child code")[:2] == [token.replace(" ", "␣") for token, _ in patched[:2]]
    assert {*page.texts("#top .answer code")} == {"␣Madrid"}
    page.show(0)  # these tokens were the other pair's
    assert not page.all("#top li, .cell.chosen")


def test_a_pair_without_a_counterpart_is_left_out_of_the_mean(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the patched prompts need one length."""
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
    page.add(**{**SPAIN, "clean": "The capital of the country Spain is"})
    page.start()
    result = ran(page.copied(tmp_path), monkeypatch)
    assert_shows(page, result.values)
    page.cell(2, 3).click()
    assert page.readout()["Pairs"] == "1 of 2"
    page.show(1)
    assert_shows(page, {"resid_post": result.by_pair["resid_post"][1]})
    assert page.texts(".label.unaligned") == ["␣Germany"]
    rows, frame = page.exported(tmp_path), result.to_dataframe()
    assert len(rows) == len(frame)
    assert [bool(row["void"]) for row in rows] == frame["void"].notna().tolist()


def test_pairs_of_different_lengths_are_an_error_that_names_the_pair(page: Page) -> None:
    longer = {**SPAIN, "corrupt": "The big capital of Germany is"}
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
    page.add(**longer)
    message = "6 tokens, and pair 0 has 5. A sweep over tokens needs corrupt prompts of one length."
    page.wait(lambda: page.text("pairs-note") == f"Pair 1, corrupt prompt: {message}")
    assert page.text("corrupt-note") == message
    page.all("#pairs .pick")[0].click()
    assert page.text("corrupt-note") == "5 tokens"
    page["run"].click()
    page.wait(lambda: page["run"].is_enabled() and page.focused()["id"] == "corrupt")
    assert page["corrupt"].get_attribute("value") == longer["corrupt"] and not page.all("[role=grid]")
    page["direction"].find_element("css selector", "[value=noising]").click()  # patches the clean prompts
    assert not page.text("pairs-note")
    page["direction"].find_element("css selector", "[value=denoising]").click()
    assert page.text("pairs-note")
    page["heads"].click()  # patches all tokens together
    assert not page.text("pairs-note")
    page.start()
    found = events(
        page.server,
        **{name: [SWEEP[name], longer[name]] for name in longer},
        **{"sites": ["attn_z"], "heads": "all", "positions": "together"},
    )
    cells = [each for each in found if each["event"] == "cell"]
    values = np.full((2, LAYERS, len(found[0]["grid"]["heads"])), np.nan)
    for cell in cells:
        values[cell["pair"], cell["index"][0], cell["index"][1]] = cell["value"]
    assert_shows(page, {"attn_z": values.mean(0)})


def test_mistakes_in_any_pair_name_the_pair_and_lead_to_it(page: Page) -> None:
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
    page.add(**{**SPAIN, "answer": "terrible"})
    page.wait(lambda: re.fullmatch(r"Pair 1, answer: 2 tokens: \w+ \| \w+\. One is needed\.", page.text("pairs-note")))
    page["add"].click()
    assert len(page.all("#pairs .pick.error")) == 1  # an empty pair is no mistake before a sweep is asked for
    page["run"].click()
    page.wait(lambda: page["run"].is_enabled() and page.focused()["id"] == "answer")
    assert page["answer"].get_attribute("value") == "terrible" and not page.all("[role=grid]")
    assert page.text("pairs-note").splitlines()[1:] == [
        "Pair 2, clean prompt: Enter a prompt.",
        "Pair 2, corrupt prompt: Enter a prompt.",
        "Pair 2, answer: Enter an answer of one token.",
        "Pair 2, foil: The logit difference needs a foil.",
    ]
    page.fill(answer=" Berlin")
    page.wait(
        lambda: "Pair 1, foil: This is the same token as the answer. Enter another one." in page.text("pairs-note")
    )
    page.fill(answer=" Madrid")
    page.all("#pairs .remove")[2].click()
    page["foil"].send_keys("\b" * 10)
    page["metric"].find_element("css selector", "[value=logprob]").click()
    page.wait(
        lambda: page.text("pairs-note") == "Pair 1, foil: Another pair has a foil, so this one needs a foil, too."
    )
    page.all("#pairs .pick")[0].click()
    page["foil"].send_keys("\b" * 10)
    page.wait(lambda: not page.text("pairs-note"))
    page.start()
    assert len(page.labels()) == LAYERS * 5


def test_pairs_are_kept_in_the_tab_until_they_are_removed(page: Page) -> None:
    assert not page["pairs"].is_displayed() and not page["shown"].is_displayed()
    page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
    page.add(**SPAIN)
    page.add(**JAPAN)
    page.browser.refresh()
    titles = "#pairs .pick span:nth-child(2)"
    page.wait(lambda: page.texts(titles) == ["France → Italy", "Spain → Germany", "Japan → China"])
    assert [page[name].get_attribute("value") for name in SPAIN] == [SWEEP[name] for name in SPAIN]
    assert not page.run("return Object.keys(localStorage).length")
    page.all("#pairs .remove")[1].click()
    assert page.texts(titles) == ["France → Italy", "Japan → China"] and page.text("clean-note") == "5 tokens"
    page.all("#pairs .remove")[0].click()
    assert not page["pairs"].is_displayed() and page["clean"].get_attribute("value") == JAPAN["clean"]
    assert page.focused()["id"] == "add"
    page.browser.refresh()
    page.wait(lambda: page.text("answer-note") == "␣Tokyo is token 1069")
    page.start()
    assert page.texts("[role=columnheader]")[3] == "␣China" and not page["shown"].is_displayed()


# ------------------------------------------------------------------------------------------------- keyboard and themes


def test_the_keyboard_alone_runs_a_sweep_and_reads_a_cell(page: Page) -> None:
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> None:
        for key in keys:
            ActionChains(page.browser).send_keys(key).perform()

    def tab_to(name: str) -> None:
        for _ in range(40):
            press(Keys.TAB)
            focused = page.focused()
            if name in (focused["id"], focused["role"]):
                assert (
                    page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
                )  # a focus ring
                return
        raise AssertionError(name)

    for name, text in (("clean", CLEAN), ("corrupt", CORRUPT), ("answer", ANSWER), ("foil", FOIL)):
        tab_to(name)
        press(text)
    tab_to("site-mlp_out")
    press(Keys.SPACE)
    tab_to("run")
    press(Keys.ENTER)
    page.wait(lambda: "noise floor" in page.text("progress"))
    assert len(page.all("[role=grid]")) == 2
    tab_to("gridcell")
    assert page.focused()["label"].startswith("layer 0, The")
    press(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_RIGHT)
    assert page.focused()["label"].startswith("layer 2, ␣capital")
    press(Keys.END, Keys.ARROW_LEFT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)  # the last one stays
    assert page.focused()["label"].startswith("layer 2, ␣is")
    press(Keys.PAGE_UP, Keys.HOME, Keys.ARROW_DOWN)
    assert page.focused()["label"].startswith("layer 6, The")
    assert page.texts("#readout dd")[1:3] == ["6", "The"]
    press(Keys.ENTER)
    page.wait(lambda: len(page.all("#top li")) == 20)
    tab_to("gridcell")  # of the second figure
    assert (
        page.run("return document.activeElement.closest('figure').querySelector('figcaption').textContent")
        == "resid_post"
    )
    page["tab-tracing"].send_keys(Keys.ARROW_RIGHT)
    assert page["steering"].is_displayed() and not page["tracing"].is_displayed()
    assert page.focused()["id"] == "tab-steering"


def contrast(page: Page, selector: str) -> float:
    """WCAG's contrast of an element's text with the background that it stands on."""
    script = """
        const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const rgba = (colour) => {
          canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
          return [...canvas.getImageData(0, 0, 1, 1).data];
        };
        let it = document.querySelector(arguments[0]);
        const ink = rgba(getComputedStyle(it).color);
        while (rgba(getComputedStyle(it).backgroundColor)[3] < 255) it = it.parentElement;
        return [ink, rgba(getComputedStyle(it).backgroundColor)];"""
    linear = [
        [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in np.array(rgba[:3]) / 255]
        for rgba in page.run(script, selector)
    ]
    light = sorted(float(np.dot(each, (0.2126, 0.7152, 0.0722))) for each in linear)
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(page: Page, theme: str) -> None:
    page.open(theme=theme)
    page.sweep()
    page.cell(4, 3).click()
    page.wait(lambda: page.all("#top li"))
    for selector in (
        "h1",
        "#model",
        "#clean",
        "#clean-note",
        "#answer-note",
        "#run",
        "#progress",
        "figcaption",
        "#readout dt",
        "#top code",
    ):
        assert contrast(page, selector) >= 4.5, selector
    cells = [f"[aria-rowindex='{row}'] [aria-colindex='{column}']" for row in range(1, 9) for column in range(2, 7)]
    assert min(contrast(page, f".grid {cell}") for cell in cells) >= 3.5
    ground = page.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(18, 21, 24)") == (theme == "dark")


def test_the_theme_follows_the_system_until_it_is_chosen(page: Page) -> None:
    def ground() -> Any:
        return page.run("return getComputedStyle(document.documentElement).backgroundColor")

    light = ground()
    page.emulate("dark")
    dark = ground()
    assert light != dark
    page["theme"].click()  # always light
    assert ground() == light and "light" in page["theme"].get_attribute("aria-label")
    page["theme"].click()  # always dark
    page.emulate("light")
    assert ground() == dark
    page.browser.refresh()
    page.wait(lambda: ground() == dark)
    page["theme"].click()
    assert ground() == light


def test_the_page_fits_a_laptops_screen(page: Page, vectors: Path) -> None:
    page["tab-steering"].click()
    page["upload"].send_keys(str(vectors))
    page.wait(lambda: page.text("upload-note") == "Added far.")
    page.open()
    page["tab-tracing"].click()
    page.sweep()
    for tab in ("tracing", "steering", "scores"):
        page[f"tab-{tab}"].click()
        size = "const it = document.documentElement; return [it.scrollWidth, it.scrollHeight, innerWidth, innerHeight]"
        width, height, *screen = page.run(size)
        assert [width, height] == screen == [1280, 720]
        form = page[tab].find_element("tag name", "form")
        assert page.run("return arguments[0].scrollHeight <= arguments[0].clientHeight", form)
        between = """const buttons = arguments[0].lastElementChild, bottom = (each) => each.getBoundingClientRect().bottom;
            const others = [...arguments[0].querySelectorAll("*")].filter((each) => !buttons.contains(each));
            return buttons.getBoundingClientRect().top - Math.max(...others.map(bottom))"""
        assert 0 <= page.run(between, form) <= 16  # the buttons are at their form


# ------------------------------------------------------------------------------------------------------------- API key


def test_the_api_key_is_asked_for_and_kept_in_the_tab_alone(page: Page) -> None:
    page.expected = "capabilities .* 401"
    page.open(key="")
    page.wait(lambda: page.text("model") == "The server asks for an API key.")
    assert page.focused()["id"] == "key" and page["key"].get_attribute("type") == "password"
    page["key"].send_keys("wrong")
    page.wait(lambda: page.text("model") == "This API key was refused.")
    assert page["key"].get_attribute("aria-invalid") == "true" and page.focused()["id"] == "key"
    page.write("key", KEY)
    page.wait(lambda: page.text("model").startswith("demo · 8 layers"))
    stored = page.run(
        "return [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie, location.href]"
    )
    assert [KEY in each for each in stored] == [True, False, False, False]
    page.sweep()


# ------------------------------------------------------------------------------------------------------------ steering


@pytest.fixture
def vectors(tmp_path: Path, server: Server) -> Iterator[Path]:
    numbers = np.random.default_rng(0).normal(size=HIDDEN) * 20
    save_file({"far": numbers.astype(np.float32)}, path := tmp_path / "vectors.safetensors")
    yield path
    server.ask("DELETE", "/v1/midstream/vectors/far", key=KEY)


def text_of(server: Server, scale: float | None, mode: str, prompt: str = CLEAN, tokens: int = 12) -> str:
    """What the server generates by plain HTTP; unsteered if the scale is None."""
    steer = {"kind": "steer", "site": "resid_post", "layers": [3], "vector": "far", "scale": scale}
    body: dict[str, Any] = {"model": "demo", "max_tokens": tokens, "temperature": 0}
    body |= {} if scale is None else {"midstream": {"plan": [steer]}}
    if mode == "completion":
        return str(server.post("/v1/completions", {**body, "prompt": prompt}, key=KEY)[1]["choices"][0]["text"])
    messages = [{"role": "user", "content": prompt}]
    choice = server.post("/v1/chat/completions", {**body, "messages": messages}, key=KEY)[1]["choices"][0]
    return str(choice["message"]["content"])


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_steered_and_unsteered_texts_stream_side_by_side(page: Page, server: Server, vectors: Path, mode: str) -> None:
    from selenium.webdriver import Keys

    page["tab-steering"].click()
    page.wait(lambda: "no vectors yet" in page.text("vector-note"))
    assert not page["vector"].is_enabled()
    page["upload"].send_keys(str(vectors))
    page.wait(lambda: page.text("upload-note") == "Added far.")
    assert page["vector"].get_attribute("value") == "far"
    for name, text in (("layers", "3"), ("prompt", CLEAN), ("tokens", "12")):
        page.write(name, text)
    page["mode"].find_element("css selector", f"[value={mode}]").click()
    page["generate"].click()

    def wait() -> None:
        page.wait(lambda: not page["stop"].is_enabled() and page.text("steered"))

    wait()
    plain, steered = text_of(server, None, mode), text_of(server, 1.0, mode)
    assert (page.text("plain"), page.text("steered")) == (plain, steered) and plain != steered
    assert page.text("steered-note").startswith("far × 1 · ")
    pieces = "return Math.max(...['plain', 'steered'].map((name) => document.getElementById(name).childNodes.length))"
    for _ in range(5):  # they were streamed; vLLM sends several tokens at once if the page lags
        if page.run(pieces) > 2:
            break
        page["generate"].click()
        wait()
    assert page.run(pieces) > 2

    page["scale"].send_keys(Keys.ARROW_LEFT)  # by 0.05, and the steered text follows
    assert page["scale-number"].get_attribute("value") == "0.95"
    page.wait(lambda: page.text("steered-note").startswith("far × 0.95 · "))
    wait()
    assert page.text("steered") == text_of(server, 0.95, mode) and page.text("plain") == plain
    page.write("scale-number", "-12.5" + Keys.TAB)  # further than the slider went
    page.wait(lambda: page.text("steered-note").startswith("far × −12.5 · "))
    wait()
    assert page["scale"].get_attribute("value") == "-12.5"
    assert page.text("steered") == text_of(server, -12.5, mode)


@pytest.mark.parametrize(
    "mode, tab, layer", [("completion", "steering", ("layers", "3, 5")), ("chat", "scores", ("score-layer", "3"))]
)
def test_a_vector_is_made_from_two_prompts(page: Page, mode: str, tab: str, layer: tuple[str, str]) -> None:
    """It is the difference of the rows that plain HTTP captures, and both tabs list it."""
    texts = {"more": "I love this. It is", "less": "I hate this. It is"}
    for name in page.server.ask("GET", "/v1/midstream/vectors", key=KEY)[1]["vectors"]:
        page.server.ask("DELETE", f"/v1/midstream/vectors/{quote(name)}", key=KEY)
    page.open()
    page[f"tab-{tab}"].click()
    assert page["more"].is_displayed()  # without vectors, the form that makes one is open
    page["mode"].find_element("css selector", f"[value={mode}]").click()
    page["make"].click()
    page.wait(lambda: page.text("making-note") == "Enter two prompts and a name.")
    for name, text in {**texts, "name": f"love {mode}", **dict([layer])}.items():
        page.write(name, text)
    page["make"].click()
    page.wait(lambda: page.text("making-note").startswith(f"Made love {mode} from resid_post of layer 3."))
    assert page["vector"].get_attribute("value") == f"love {mode}"
    assert page["score-by"].get_attribute("value") == f"vector:love {mode}"

    def row(text: str) -> np.ndarray:
        given = {"messages": [{"role": "user", "content": text}]} if mode == "chat" else {"prompt": text}
        plan = [{"kind": "capture", "site": "resid_post", "layers": [3], "positions": "last_prompt"}]
        path = "/v1/chat/completions" if mode == "chat" else "/v1/completions"
        body = {"model": "demo", "max_tokens": 1, **given, "midstream": {"plan": plan, "inline": True}}
        status, found = page.server.post(path, body, key=KEY)
        assert status == 200, found
        (entry,) = found["midstream"]["captures"]
        return np.frombuffer(base64.b64decode(entry["data"]), np.float32)

    def made(name: str) -> np.ndarray:
        path = f"{page.server.url}/v1/midstream/vectors/{quote(name)}"
        with urlopen(Request(path, headers={"Authorization": f"Bearer {KEY}"}), timeout=30) as response:
            found = load(response.read())[name]
        page.server.ask("DELETE", f"/v1/midstream/vectors/{quote(name)}", key=KEY)
        return found

    difference = row(texts["more"]) - row(texts["less"])
    np.testing.assert_allclose(made(f"love {mode}"), difference, atol=1e-5)
    length = float(np.linalg.norm(difference))
    told = re.fullmatch(r".* The difference has length ([\d.]+)\.", page.text("making-note"))
    assert told and float(told[1]) == pytest.approx(length, rel=1e-3) and length > 0.1
    page["unit"].click()
    page.write("name", "unit")
    page["make"].click()
    page.wait(lambda: page.text("making-note").startswith("Made unit "))
    np.testing.assert_allclose(made("unit"), difference / length, atol=1e-6)


def test_stop_ends_both_streams(page: Page, server: Server, vectors: Path) -> None:
    page["tab-steering"].click()
    page["upload"].send_keys(str(vectors))
    page.wait(lambda: page.text("upload-note") == "Added far.")
    page["mode"].find_element("css selector", "[value=completion]").click()
    page.write("scale-number", "0.01")
    page.write("prompt", "1 2 3 4")
    page.write("tokens", "500")
    page["generate"].click()
    page["stop"].click()
    page.wait(lambda: not page["stop"].is_enabled())
    page.wait(lambda: server.ask("GET", "/v1/midstream/gauges", key=KEY)[1]["server"]["running_prompts"] == 0, 20)


def test_mistakes_of_steering_are_said_at_their_fields(page: Page, server: Server, vectors: Path) -> None:
    page.expected = "(completions|vectors) .* 40[09]"
    page["tab-steering"].click()
    page["generate"].click()
    assert (
        page.text("vector-note") == "Choose a vector, or upload one." and page.text("prompt-note") == "Enter a prompt."
    )
    page["upload"].send_keys(str(vectors))
    page.wait(lambda: page.text("upload-note") == "Added far.")
    page["upload"].send_keys(str(vectors))
    page.wait(lambda: "is there already" in page.text("upload-note"))
    page["site"].find_element("css selector", "[value=mlp_act]").click()
    page.wait(lambda: page.text("site-note") == "is 512 wide, the vector 256")
    page["site"].find_element("css selector", "[value=resid_post]").click()
    page.write("prompt", CLEAN)
    page.write("layers", "three")
    page["generate"].click()
    assert page.text("layers-note") == "Write all, or layers such as 3, 5-6."
    page.write("layers", "99")
    page["generate"].click()
    page.wait(lambda: "Steer.layers is 99" in page.text("layers-note"))
    assert page["layers"].get_attribute("aria-invalid") == "true"


@contextlib.contextmanager
def answering(page: Page, part: str, status: int, body: str) -> Iterator[None]:
    """Open the page with a server that answers so to requests with a part in their address or body."""
    script = f"""
        const fetching = window.fetch;
        window.fetch = (address, request) => `${{address}} ${{request?.body}}`.includes({json.dumps(part)})
          ? Promise.resolve(new Response({json.dumps(body)}, {{ status: {status} }}))
          : fetching(address, request);"""
    added = page.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        page.open()
        yield
    finally:
        page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_model_without_a_chat_template_gets_completions(page: Page) -> None:
    """vLLM refuses to tokenize messages for such a model."""
    with answering(page, '"messages"', 400, '{"error": {"message": "no chat template"}}'):
        page.wait(lambda: page.run("return document.querySelector('#mode [value=chat]').disabled"))
        assert page["mode"].get_attribute("value") == "completion"


@pytest.mark.parametrize(
    "body, message",
    [
        (
            'event: error\ndata: {"error": {"message": "The engine has ended.", "code": 500}}\n\n',
            "The engine has ended.",
        ),
        (": kept alive\n\n", "The connection ended before the sweep did."),
    ],
)
def test_a_sweep_that_fails_on_its_way_says_why(page: Page, body: str, message: str) -> None:
    with answering(page, "/sweeps", 200, body):
        page.fill(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
        page["run"].click()
        page.wait(lambda: page.text("sweep-alert") == message)
        assert page.text("progress") == "Failed" and page["run"].is_enabled()


# -------------------------------------------------------------------------------------------------------------- scores

PROBE = {"kind": "probe", "site": "resid_post", "layer": 5, "weight": "far", "name": "score", "positions": "all"}
FEATURE = {"kind": "sae", "sae": "random", "do": "capture", "features": 7, "name": "score", "positions": "all"}


@pytest.fixture
def sae(server: Server) -> Iterator[SAE]:
    """On the server, with the name "random"."""
    torch.manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(64, HIDDEN), dim=1)
    weights = {"W_enc": features.T, "b_enc": torch.zeros(64), "W_dec": features, "b_dec": torch.zeros(HIDDEN)}
    config = {"architecture": "standard", "d_in": HIDDEN, "d_sae": 64}
    with Remote(server.url, api_key=KEY) as model:
        model.saes["random"] = made = SAE(config, weights, site="resid_post", layer=3)
        yield made
        del model.saes["random"]


class Strip:
    """The tokens in the tab "Scores", and its form."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def open(
        self, vectors: Path | None = None, mode: str = "completion", tokens: int = 12, prompt: str = CLEAN
    ) -> None:
        page = self.page
        page["tab-scores"].click()
        if vectors is not None:
            page["upload"].send_keys(str(vectors))
            page.wait(lambda: page.text("upload-note") == "Added far.")
            assert page["score-by"].get_attribute("value") == "vector:far"
        page.choose("mode", mode)
        page.write("prompt", prompt)
        page.write("tokens", str(tokens))

    def run(self) -> str:
        """Generate to the end. Returns how it ended."""
        self.page["score-generate"].click()
        self.page.wait(lambda: "generated" in self.page.text("score-progress"))
        return self.page.text("score-progress")

    def tokens(self) -> list[tuple[str, float | None]]:
        """The text and the score of each token. They stand in the order of their positions."""
        script = """return [...document.querySelectorAll("#score-tokens [role=option]")].map((it) =>
            [it.getAttribute("aria-label"), it.classList.contains("unscored")])"""
        found: list[tuple[str, float | None]] = []
        for label, is_unscored in self.page.run(script):
            text, position, score = re.fullmatch(r"(.*), position (\d+): (.*)", label, re.DOTALL).groups()  # type: ignore[union-attr]
            assert int(position) == len(found) and is_unscored == (score in ("not yet", "none")), label
            found.append((text, None if is_unscored else float(score.replace("−", "-"))))
        return found

    def scores(self) -> list[float | None]:
        return [score for _, score in self.tokens()]


@pytest.fixture
def strip(page: Page) -> Strip:
    return Strip(page)


def answer_of(server: Server, probe: dict[str, Any], mode: str = "completion", tokens: int = 12) -> dict[str, Any]:
    """What the server answers to the same request by plain HTTP."""
    body = {"model": "demo", "max_tokens": tokens, "temperature": 0, "midstream": {"plan": [probe]}}
    chat = ("/v1/chat/completions", {"messages": [{"role": "user", "content": CLEAN}]})
    path, given = chat if mode == "chat" else ("/v1/completions", {"prompt": CLEAN})
    status, found = server.post(path, {**body, **given}, key=KEY)
    assert status == 200, found
    return dict(found)


def assert_scores(found: list[float | None], scores: list[list[float]]) -> None:
    """The last token has none."""
    assert found == [*(pytest.approx(each, rel=2e-3, abs=2e-3) for (each,) in scores), None]


@contextlib.contextmanager
def holding_streams(page: Page) -> Iterator[Callable[[int], Any]]:
    """Open the page with streams that wait. The function lets it have so many of their next events."""
    script = """
        const [fetching, encoder] = [window.fetch, new TextEncoder()];
        let [allowed, wake] = [0, () => {}];
        window.allow = (count) => { allowed = count; wake(); };
        const turn = async () => {
          while (!allowed) await new Promise((resolve) => (wake = resolve));
          allowed--;
        };
        window.fetch = async (address, request) => {
          const response = await fetching(address, request);
          if (!String(request?.body).includes('"stream":true')) return response;
          let rest = "";
          const hold = async (text, controller) => {
            const events = (rest + text).split("\\n\\n");
            rest = events.pop();
            for (const event of events) {
              await turn();
              controller.enqueue(encoder.encode(event + "\\n\\n"));
            }
          };
          const abort = (controller) => request.signal.addEventListener("abort", () => controller.error(request.signal.reason));
          const holding = new TransformStream({ start: abort, transform: hold });
          const held = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(holding);
          return new Response(held, { status: response.status, headers: response.headers });
        };"""
    added = page.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        page.open()
        yield lambda count: page.run("window.allow(arguments[0])", count)
    finally:
        page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.parametrize("mode", ["completion", pytest.param("chat", marks=pytest.mark.matrix)])
def test_tokens_are_coloured_while_they_stream(page: Page, strip: Strip, vectors: Path, mode: str) -> None:
    with holding_streams(page) as allow:
        strip.open(vectors, mode)
        for _ in range(5):
            page["score-generate"].click()
            page.wait(lambda: len(strip.tokens()) == 5)  # the prompt's, before any event
            assert strip.scores() == [None] * 5
            allow(1 + (mode == "chat"))  # a chat begins with an event without a token
            page.wait(lambda: len(strip.tokens()) >= 6)
            if len(early := strip.scores()) < 17:  # vLLM sends several tokens at once if the server lags
                break
        assert 6 <= len(early) < 17 and early[-1] is None and None not in early[:-1]
        assert page.text("score-progress") == "Generating…" and page["score-stop"].is_enabled()
        assert page["score-progress"].get_attribute("aria-busy") == "true"
        totals = page.text("score-totals")
        allow(1000)
        page.wait(lambda: "generated" in page.text("score-progress"))
    answer = answer_of(page.server, PROBE, mode)
    scores = answer["midstream"]["scores"]["score"]["scores"]
    assert page.text("score-progress") == "12 tokens generated · ended at the limit of tokens"
    assert_scores(strip.scores(), scores)
    assert early[:-1] == strip.scores()[: len(early) - 1]
    choice = answer["choices"][0]
    text = choice["text"] if mode == "completion" else choice["message"]["content"]
    assert "".join(text for text, _ in strip.tokens()) == (CLEAN + text).replace(" ", "␣")
    assert page.texts(".score.begins")[0] == strip.tokens()[5][0].replace("␣", " ")
    most, mean = (float(each.replace("−", "-")) for each in re.findall(r"−?[\d.]+", page.text("score-totals")))
    assert page.text("score-totals") != totals
    assert [most, mean] == pytest.approx([np.max(scores), np.mean(scores)], rel=1e-3)


def test_colours_diverge_from_zero(page: Page, strip: Strip, vectors: Path) -> None:
    strip.open(vectors)
    strip.run()
    amounts = page.run("""return [...document.querySelectorAll(".score:not(.unscored)")].map((it) =>
        parseFloat(it.style.getPropertyValue("--amount")) * (it.classList.contains("below") ? -1 : 1) / 100)""")
    scores = np.array(strip.scores()[:-1], float)
    assert (scores < 0).any() and (scores > 0).any()
    assert amounts == pytest.approx(
        (scores / np.abs(scores[1:]).max()).clip(-1, 1), abs=2e-3
    )  # the first token widens nothing
    ends = re.findall(r"−?[\d.]+", page["score-gradient"].get_attribute("aria-label"))
    assert [float(each.replace("−", "-")) for each in ends] == [scores[1:].min(), scores[1:].max()]
    page.choose("score-activation", "sigmoid")
    page.write("score-bias", "-100")
    strip.run()
    assert page["score-gradient"].get_attribute("aria-label") == "Colours: score from 0, white, to 1.000, blue"
    scored = answer_of(page.server, {**PROBE, "bias": -100, "activation": "sigmoid"})["midstream"]["scores"]["score"]
    assert_scores(strip.scores(), scored["scores"])


@pytest.mark.parametrize("kind", ["vector", "sae"])
def test_the_copied_code_gives_the_same_scores(
    page: Page, strip: Strip, vectors: Path, sae: SAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.open()  # with the SAE
    strip.open(vectors, "chat" if kind == "vector" else "completion", 6)
    if kind == "sae":
        page.choose("score-by", "sae:random")
        assert page.text("score-by-note") == "64 features of resid_post at layer 3"
        assert page["score-layer"].get_attribute("value") == "3" and not page["score-layer"].is_enabled()
        assert not page["score-bias"].is_displayed()
        page.write("score-feature", "7")
    strip.run()
    output = ran(page.copied(tmp_path, "score-", "scores.py"), monkeypatch, "output")
    assert_scores(strip.scores(), output.scores["score"].tolist())
    assert output.scores.positions["score"] == list(range(10))
    if kind == "sae":
        assert page["score-gradient"].get_attribute("aria-label").startswith("Colours: score from 0, white, to ")
        assert_scores(
            strip.scores(), answer_of(page.server, FEATURE, tokens=6)["midstream"]["scores"]["score"]["scores"]
        )


@pytest.mark.parametrize(
    "prompt, length", [("I", 1), (CLEAN, 5)]
)  # it ends at a generated token, and at one of the prompt
def test_a_probe_that_ends_the_request_is_named_with_its_token(
    page: Page, strip: Strip, vectors: Path, prompt: str, length: int
) -> None:
    strip.open(vectors, prompt=prompt)
    strip.run()
    *tokens, _ = strip.tokens()
    at, (token, score) = max(enumerate(tokens), key=lambda each: each[1][1] or 0.0)
    assert score is not None and (at >= length) == (length == 1)
    page.write("score-above", str(score - 1))
    ending, count = strip.run(), max(0, at + 1 - length)
    assert ending.startswith(f"{count} tokens generated · ended: the score of {token} at position {at} is above ")
    assert [score is not None for score in strip.scores()] == [i <= at for i in range(max(length, at + 1))]


def test_stop_keeps_the_scores_that_have_come(page: Page, strip: Strip, vectors: Path) -> None:
    with holding_streams(page) as allow:
        strip.open(vectors, tokens=400)
        page["score-generate"].click()
        allow(1)
        page.wait(lambda: len(strip.tokens()) >= 6)
        page["score-stop"].click()
        page.wait(lambda: page.text("score-progress").endswith(" generated · stopped"))
        found = strip.scores()
        assert len(found) < 405 and found[-1] is None and None not in found[:-1]
        assert not page["score-stop"].is_enabled() and page["score-copy"].is_displayed()
        gauges = "/v1/midstream/gauges"
        page.wait(lambda: page.server.ask("GET", gauges, key=KEY)[1]["server"]["running_prompts"] == 0)
        page.write("tokens", "2")
        page["score-generate"].click()
        allow(1000)
        page.wait(lambda: page.text("score-progress").startswith("2 tokens generated"))
        assert len(strip.tokens()) == 7


def test_mistakes_of_scores_are_said_at_their_fields(page: Page, strip: Strip, vectors: Path, sae: SAE) -> None:
    page.expected = "completions .* 400"
    page.open()
    strip.open(vectors, prompt="")
    page.write("score-layer", "")
    page["score-generate"].click()
    assert (page.text("prompt-note"), page.text("score-layer-note")) == ("Enter a prompt.", "Enter a number.")
    assert page.focused()["id"] == "score-layer"
    page.choose("score-site", "mlp_act")
    assert page.text("score-site-note") == "is 512 wide, the vector 256"
    page.choose("score-site", "resid_post")
    page.write("prompt", CLEAN)
    page.write("score-layer", "99")
    page["score-generate"].click()
    page.wait(lambda: "Probe.layer is 99" in page.text("score-layer-note"))
    assert page["score-layer"].get_attribute("aria-invalid") == "true" and page.focused()["id"] == "score-layer"
    page.choose("score-by", "sae:random")
    page.write("score-feature", "99")
    page["score-generate"].click()
    page.wait(lambda: page.text("score-feature-note") == "SAE.capture: feature is 99; allowed: 0 to 63.")
    page.write("score-feature", "7")
    page.write("tokens", "4000")
    page["score-generate"].click()
    page.wait(lambda: "max_tokens=4000" in page.text("tokens-note"))
    page.write("tokens", "3")
    page.run("arguments[0].value = 'word '.repeat(600)", page["prompt"])
    page["score-generate"].click()
    page.wait(lambda: "length" in page.text("score-alert"))
    assert page.text("score-progress").endswith("failed")


def test_characters_that_several_tokens_share_do_not_shift_the_scores(page: Page, strip: Strip, sae: SAE) -> None:
    """An event may have several tokens, and vLLM gives the whole character to the token that completes it."""
    hostile = "<b>x</b>"
    first = {"token_ids": [1, 2, 3], "logprobs": {"tokens": ["", "", "日"]}, "prompt_token_ids": [0] * 7}
    scores = [
        {"positions": [*range(9)], "scores": [[i] for i in range(8)] + [[None]]},
        {"positions": [9], "scores": [[9]]},
    ]
    choices = [first, {"token_ids": [4], "logprobs": {"tokens": [hostile]}, "finish_reason": "stop"}]
    chunks = [
        {"choices": [choice], "midstream": {"scores": {"score": each}}}
        for choice, each in zip(choices, scores, strict=True)
    ]
    body = "".join(
        f"data: {json.dumps(each)}\n\n" for each in [*chunks, {"error": {"message": "The engine has ended."}}]
    )
    with answering(page, "/completions", 200, body):
        strip.open(prompt="日本 is")
        page.write("score-feature", "0")
        assert strip.run() == "4 tokens generated · failed"
    labels = page.run("return [...document.querySelectorAll('.score')].map((it) => it.getAttribute('aria-label'))")
    assert labels[:2] == ["⟨E6⟩, position 0: 0", "⟨97⟩, position 1: 1.000"]
    assert labels[6:] == [
        *("␣is, position 6: 6.000", "∅, position 7: 7.000", "∅, position 8: not finite", "日, position 9: 9.000"),
        f"{hostile}, position 10: none",
    ]
    assert page.text("score-alert") == "The engine has ended." and not page.all("#score-tokens b")


def test_the_keyboard_moves_between_tokens(page: Page, strip: Strip, vectors: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    strip.open(vectors, tokens=60, prompt="1 2 3 4 5 6 7 8 9 " * 8)
    strip.run()

    def press(*keys: str) -> str:
        for key in keys:
            ActionChains(page.browser).send_keys(key).perform()
        return page.focused()["label"]

    page["score-generate"].send_keys(Keys.TAB)  # Stop is disabled
    assert page.focused()["role"] == "option"
    tokens = strip.tokens()
    last = len(tokens) - 1
    assert press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT).startswith(f"{tokens[1][0]}, position 1: ")
    assert page.readout("score-readout")["Position"] == "1" and page.readout("score-readout")["Part"] == "prompt"
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tops = "const it = document.activeElement; return [it.offsetTop, it.offsetLeft]"
    (top, left), _ = page.run(tops), press(Keys.ARROW_DOWN)
    lower = page.run(tops)
    assert lower[0] > top and abs(lower[1] - left) < 40
    press(Keys.ARROW_UP)
    assert page.run(tops)[0] == top
    assert press(Keys.END, Keys.ARROW_RIGHT, Keys.ARROW_DOWN).endswith(f"position {last}: none")  # the last one stays
    assert page.readout("score-readout")["Part"] == "generated" and page.readout("score-readout")["Score"] == "none"
    assert press(Keys.HOME).startswith("1, position 0: ")
    assert len(page.all("#score-tokens [tabindex='0']")) == len(page.all("[aria-selected=true].score")) == 1
    ActionChains(page.browser).move_to_element(page.all(".score")[3]).perform()
    assert page.readout("score-readout")["Position"] == "3"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_scored_tokens_are_readable_in_both_themes(page: Page, strip: Strip, vectors: Path, theme: str) -> None:
    page.open(theme=theme)
    strip.open(vectors)
    strip.run()
    page.all(".score")[3].click()
    for selector in (
        "#score-progress",
        "#score-totals",
        "#score-ticks",
        "#score-legend li",
        "#score-readout dt",
        ".score.unscored",
    ):
        assert contrast(page, selector) >= 4.5, selector
    assert min(contrast(page, f".score:nth-child({i + 1})") for i in range(len(strip.tokens()))) >= 3.5
