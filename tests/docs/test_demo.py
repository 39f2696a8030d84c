"""Issue 2, `Seen done when`, and issue 3, point 10: the demo runs on CPU vLLM, and what it prints is true.

Its numbers are compared with plain transformers and forward hooks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EIFFEL = "The Eiffel Tower is in the city of"
FRANCE, ITALY = "The capital of France is", "The capital of Italy is"

pytestmark = pytest.mark.engine


def in_session(session: int) -> list[str]:
    """Command lines of the processes of a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((stat.parent / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return found


@pytest.fixture(scope="module")
def demo() -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), kept.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-m", "midstream.cli", "demo"], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert in_session(process.pid) == []
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Plain:
    """The bundled model by transformers and forward hooks alone."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from midstream import demo_model

        self.model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(demo_model())
        self.layers = self.model.model.layers
        self.paris, self.rome = (self.tokenizer(city)["input_ids"][0] for city in (" Paris", " Rome"))

    def logits(self, prompt: str, module: Any = None, hook: Callable[..., Any] | None = None) -> torch.Tensor:
        """The next token's logits, with a hook on one module."""
        handle = module.register_forward_hook(hook) if module is not None else None
        try:
            with torch.no_grad():
                return self.model(torch.tensor([self.tokenizer(prompt)["input_ids"]])).logits[0, -1]
        finally:
            if handle is not None:
                handle.remove()


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


def section(demo: subprocess.CompletedProcess[str], number: int) -> list[str]:
    return re.split(r"^\d\. ", demo.stdout, flags=re.MULTILINE)[number].splitlines()


def test_demo_succeeds_and_is_short(demo: subprocess.CompletedProcess[str]) -> None:
    assert demo.returncode == 0, demo.stderr[-4000:]
    assert len(demo.stdout.splitlines()) < 100
    assert max(map(len, demo.stdout.splitlines())) <= 120
    assert "\033" not in demo.stdout + demo.stderr  # no colour where nobody looks


def test_demo_shows_progress_and_no_wall_of_warnings(demo: subprocess.CompletedProcess[str]) -> None:
    lines = demo.stderr.splitlines()
    assert any("starting vLLM" in line for line in lines)
    assert sum(not line.startswith("  ") for line in lines) <= 5, demo.stderr


def test_demo_reads(demo: subprocess.CompletedProcess[str], plain: Plain) -> None:
    norms: dict[int, float] = {}
    for layer in (0, 3, 5, 7):

        def keep(_: Any, __: Any, out: Any, layer: int = layer) -> None:
            norms[layer] = (out[0] if isinstance(out, tuple) else out)[0, -1].norm().item()

        plain.logits(EIFFEL, plain.layers[layer], keep)
    shown = {int(line.split()[0]): float(line.split()[3]) for line in section(demo, 1) if re.match(r" +\d ", line)}
    assert shown == pytest.approx(norms, rel=1e-3)


def test_demo_logit_lens_shows_where_paris_appears(demo: subprocess.CompletedProcess[str]) -> None:
    tops = [line.split("'")[1] for line in section(demo, 2) if "layer " in line and "top" in line]
    assert len(tops) == 8
    assert tops[4:] == [" Paris"] * 4
    assert " Paris" not in tops[:4]


def test_demo_ablation_changes_paris(demo: subprocess.CompletedProcess[str], plain: Plain) -> None:
    probs = plain.logits(EIFFEL, plain.layers[0].mlp, lambda _, __, out: torch.zeros_like(out)).softmax(-1)
    lines = {line.partition("->")[0].strip(): line for line in section(demo, 3)}
    assert "' Paris'" in lines["nothing"]
    assert repr(plain.tokenizer.decode(probs.argmax())) in lines["MLP of layer 0"]
    assert "' Paris'  " not in lines["MLP of layer 0"]
    assert float(lines["MLP of layer 0"].split()[-1]) == pytest.approx(probs[plain.paris].item(), abs=2e-3)


def test_demo_steering_moves_paris(demo: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in section(demo, 4) if "steered:" in line]
    assert len(lines) == 2
    for line in lines:
        unsteered, _, steered = line.partition("steered:")
        assert "' Paris" in unsteered
        assert "' Rome" in steered


def test_demo_patch_is_what_hooks_give(demo: subprocess.CompletedProcess[str], plain: Plain) -> None:
    rows = [line.split() for line in section(demo, 5) if re.match(r" +\d ", line)]
    assert [len(row) for row in rows] == [6] * 8
    for layer, position in ((0, 3), (4, 3), (5, 3), (3, 4), (7, 4)):
        kept: list[torch.Tensor] = []

        def keep(_: Any, __: Any, out: Any, kept: list[torch.Tensor] = kept) -> None:
            kept.append((out[0] if isinstance(out, tuple) else out).clone())

        def put(_: Any, __: Any, out: Any, kept: list[torch.Tensor] = kept, position: int = position) -> Any:
            changed = (out[0] if isinstance(out, tuple) else out).clone()
            changed[0, position] = kept[0][0, position]
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        plain.logits(FRANCE, plain.layers[layer], keep)
        logits = plain.logits(ITALY, plain.layers[layer], put)
        expected = (logits[plain.paris] - logits[plain.rome]).item()
        assert float(rows[layer][1 + position]) == pytest.approx(expected, abs=0.06)


def planned_lines(demo: subprocess.CompletedProcess[str], start: str) -> list[str]:
    return [line.strip() for line in section(demo, 6) if line.strip().startswith(start)]


def opinions(plain: Plain) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The streams leaving each layer at the last token, `[layers, prompts, hidden]`: of kind prompts and of unkind ones; and whether a
    prompt has the verbs that the probe is fitted on."""
    from midstream.bundled import demo_contrast

    pairs = demo_contrast()
    streams = [
        [plain.model(**plain.tokenizer(pair[side], return_tensors="pt"), output_hidden_states=True) for pair in pairs]
        for side in ("positive", "negative")
    ]
    last = (
        len(plain.layers) - 1
    )  # transformers gives the last layer's behind the norm; the probes of the others are compared
    kind, unkind = (
        torch.stack([torch.stack([out.hidden_states[layer + 1][0, -1] for out in side]) for layer in range(last)])
        for side in streams
    )
    return kind, unkind, torch.tensor([" love " in pair["positive"] for pair in pairs])


@torch.no_grad()
def test_issue3_10_demo_probes_captures(demo: subprocess.CompletedProcess[str], plain: Plain) -> None:
    """How often the probe is right, with transformers' own hidden states."""
    kind, unkind, fitted = opinions(plain)
    shown = [float(share.rstrip("%")) / 100 for share in planned_lines(demo, "50%")[0].split()]
    for layer, share in enumerate(shown[:-1]):
        up, down = kind[layer][fitted].mean(0), unkind[layer][fitted].mean(0)
        middle = (up - down) @ (up + down) / 2
        right = [(kind[layer][~fitted] @ (up - down) > middle), (unkind[layer][~fitted] @ (up - down) < middle)]
        assert share == pytest.approx(torch.cat(right).float().mean().item(), abs=0.02), layer
    assert shown[5:] == [1.0] * 3
    assert max(shown[:3]) < 0.6


@torch.no_grad()
def test_issue3_10_demo_steers_and_ablates_by_plan(demo: subprocess.CompletedProcess[str], plain: Plain) -> None:
    """The answers that forward hooks give."""
    kind, unkind, fitted = opinions(plain)
    direction = (kind[5][fitted] - unkind[5][fitted]).mean(0)
    unit = direction / direction.norm()

    def answer(prompt: str, layers: list[int], change: Callable[[torch.Tensor], torch.Tensor]) -> str:
        def hook(_: Any, __: Any, out: Any) -> Any:
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        handles = [plain.layers[layer].register_forward_hook(hook) for layer in layers]
        try:
            return repr(plain.tokenizer.decode(plain.logits(prompt).argmax()))
        finally:
            for handle in handles:
                handle.remove()

    lines = [
        line for line in planned_lines(demo, "") if " ...  " in line and ("steered:" in line or "ablated:" in line)
    ]
    assert [line.partition(" ...")[0] for line in lines] == [
        "I think this film is",
        "I dislike this hotel, it was",
        FRANCE,
    ]
    for line in lines:
        prompt, said = line.partition(" ...")[0], re.findall(r"' \w+'", line)
        changed = (
            answer(prompt, [5], lambda h: h - 0.5 * direction)
            if "steered:" in line
            else answer(prompt, list(range(8)), lambda h: h - (h @ unit)[..., None] * unit)
        )
        assert said == [answer(prompt, [], torch.Tensor.clone), changed]


def test_issue3_10_demo_sweeps(demo: subprocess.CompletedProcess[str], plain: Plain) -> None:
    """The heatmap's numbers, with forward hooks."""
    rows = [line for line in planned_lines(demo, "") if re.match(r"\d  .*\.\d\d", line)]
    shown = {int(row.split()[0]): [float(cell.rstrip("~")) for cell in row.split()[1:]] for row in rows}
    assert list(shown) == [7, 6, 5, 4, 3, 2, 1, 0] and any("~" in row for row in rows)
    for layer, module in enumerate(plain.layers):
        kept: list[torch.Tensor] = []

        def keep(_: Any, __: Any, out: Any, kept: list[torch.Tensor] = kept) -> None:
            kept.append((out[0] if isinstance(out, tuple) else out).clone())

        plain.logits(FRANCE, module, keep)
        for position, value in enumerate(shown[layer]):

            def put(_: Any, __: Any, out: Any, kept: list[torch.Tensor] = kept, position: int = position) -> Any:
                changed = (out[0] if isinstance(out, tuple) else out).clone()
                changed[0, position] = kept[0][0, position]
                return (changed, *out[1:]) if isinstance(out, tuple) else changed

            logits = plain.logits(ITALY, module, put)
            assert value == pytest.approx((logits[plain.paris] - logits[plain.rome]).item(), abs=0.02)
    (best,) = planned_lines(demo, "noise floor")
    assert best.endswith("recovers 100%")


def test_demo_difference_table(demo: subprocess.CompletedProcess[str]) -> None:
    rows = {line.split()[0]: float(line.split()[1]) for line in section(demo, 7) if re.search(r"\de[-+]\d+$", line)}
    assert {
        "token_embeddings",
        "layers_input",
        "layers_output",
        "attentions_output",
        "mlps_output",
        "attn_z",
        "logits",
        "planned_captures",
    } <= set(rows)
    assert all(0 <= difference <= 1e-4 for difference in rows.values())
    assert rows["planned_captures"] > 0
    assert sum(difference > 0 for difference in rows.values()) >= 6  # two implementations, not one compared with itself


def test_demo_fails_when_the_two_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hf: Any
) -> None:
    """With transformers on both sides and one of them edited, the exit status says so."""
    from midstream import LanguageModel, demo_model
    from midstream.commands import demo

    class Edited(LanguageModel):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    edited = Edited(demo_model(), dtype=torch.float32)
    edited.module.model.layers[3].mlp.down_proj.weight.data *= 1.001
    for name in ("read", "logit_lens", "ablate", "steer", "patch", "plans"):
        monkeypatch.setattr(demo, name, lambda *_: None)
    monkeypatch.setattr(demo, "ENVIRONMENT", {})  # meant for a process of its own
    monkeypatch.setattr(demo, "start", lambda eager: (edited, hf))
    assert demo.main([]) == 1
    assert "They differ" in capsys.readouterr().out
