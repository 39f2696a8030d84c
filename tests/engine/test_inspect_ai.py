"""inspect_ai evaluates the bundled model on `midstream serve`. The oracle is the same request by the openai client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from safetensors.torch import load
from servers import KEYS, Server

from midstream import Capture, Patch, Plan
from midstream.errors import CaptureError, PlanError
from midstream.inspect_ai import read_captures

CAPITALS = {"France": "Paris", "Italy": "Rome"}
NO_COUNTRY = {"kind": "patch", "site": "resid_post", "layer": 0, "position": 3, "source": {"zeros": True}}
CAPTURE = {"kind": "capture", "site": "resid_post", "layers": [2, 5], "positions": "all_prompt"}
EVERY_LAYER = {"kind": "capture", "site": "resid_post", "positions": "all_prompt"}
LONG = "The capital of France is" + " a city, and the capital of Italy is" * 20  # over 1 MiB at all layers
KEY = KEYS[0]


@pytest.fixture
def server(traces_server: Server) -> Server:
    return traces_server


Evaluate = Callable[..., EvalLog]


@pytest.fixture
def evaluate(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Runs a tiny evaluation; the arguments are the model's, and `by`, its solver. The log is read back from its file."""
    monkeypatch.setenv("MIDSTREAM_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("MIDSTREAM_API_KEY", KEY)
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path / "cache"))

    def run(by: Solver | None = None, prompts: dict[str, str] | None = None, **arguments: Any) -> EvalLog:
        questions = prompts or {f"The capital of {country} is": city for country, city in CAPITALS.items()}
        samples = [Sample(input=question, target=answer) for question, answer in questions.items()]
        task = Task(dataset=samples, solver=by or generate(max_tokens=2, temperature=0.0), scorer=includes())
        (log,) = eval(task, model=get_model("midstream/demo", **arguments), log_dir=str(tmp_path), display="none")
        return read_eval_log(log.location)

    return run


def accuracy(log: EvalLog) -> float:
    assert log.status == "success" and log.results is not None, log.error
    return log.results.scores[0].metrics["accuracy"].value


def outputs(log: EvalLog) -> list[ModelOutput]:
    assert log.status == "success" and log.samples, log.error
    return [sample.output for sample in log.samples]


def rows(server: Server, prompt: str, plan: list[dict[str, Any]]) -> list[torch.Tensor]:
    """The captures of a chat by the openai client, downloaded."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)
    messages: Any = [{"role": "user", "content": prompt}]
    answer: Any = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=2, temperature=0.0, extra_body={"midstream": {"plan": plan}}
    )
    handles = [entry["handle"] for entry in answer.midstream["captures"]]
    return [load(server.ask("GET", f"/v1/midstream/captures/{each}", key=KEY)[1])["rows"] for each in handles]


@pytest.mark.parametrize("form", ["json", "data", "field"])
def test_a_plan_changes_the_score(evaluate: Evaluate, form: str) -> None:
    forms: dict[str, Any] = {
        "json": Plan.of(Patch("resid_post", layer=0, position=3, source="zeros")).to_json(),
        "data": [NO_COUNTRY],
        "field": {"plan": [NO_COUNTRY], "answers": [" London"]},
    }
    assert accuracy(evaluate()) == 1.0
    log = evaluate(plan=forms[form])
    assert accuracy(log) == 0.0
    assert ((outputs(log)[0].metadata or {}).get("midstream", {}).get("answers") is not None) == (form == "field")


def test_a_sample_has_a_plan_of_its_own(evaluate: Evaluate) -> None:
    @solver
    def by_country() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            plan = [] if "France" in state.input_text else [NO_COUNTRY]
            return await generate(state, max_tokens=2, temperature=0.0, extra_body={"midstream": {"plan": plan}})

        return solve

    for model in ({}, {"plan": [NO_COUNTRY]}):  # a request's plan replaces the model's
        assert [output.completion.split(".")[0] for output in outputs(evaluate(by_country(), **model))] == [
            " Paris",
            " London",
        ]


@pytest.mark.parametrize("where", ["log", "files", "stream"])
def test_the_log_keeps_the_activations_of_the_openai_client(
    server: Server, evaluate: Evaluate, tmp_path: Path, where: str
) -> None:
    more: dict[str, Any] = {"log": {}, "files": {"captures_dir": str(tmp_path / "rows")}, "stream": {"stream": True}}
    found = outputs(evaluate(plan=[NO_COUNTRY, CAPTURE], **more[where]))
    assert len(found) == len(CAPITALS)
    for country, output in zip(CAPITALS, found, strict=True):
        captures = read_captures(output)
        want = rows(server, f"The capital of {country} is", [NO_COUNTRY, CAPTURE])
        assert list(captures) == [("resid_post", 2), ("resid_post", 5)]
        for key, expected in zip(captures, want, strict=True):
            torch.testing.assert_close(captures[key], expected, rtol=1e-5, atol=1e-5)
            assert captures.positions[key] == [0, 1, 2, 3, 4]


def test_large_captures_go_to_files(server: Server, evaluate: Evaluate, tmp_path: Path) -> None:
    log = evaluate(plan=[EVERY_LAYER], prompts={LONG: "x"})
    assert log.status == "error" and "captures_dir=" in log.error.message  # type: ignore[union-attr]
    (output,) = outputs(evaluate(plan=[EVERY_LAYER], prompts={LONG: "x"}, captures_dir=str(tmp_path / "rows")))
    captures = read_captures(output)
    assert len(captures) == 8 and sum(each.nbytes for each in captures.values()) > 1 << 20
    for tensor, expected in zip(captures.values(), rows(server, LONG, [EVERY_LAYER]), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
    for file in (tmp_path / "rows").iterdir():
        file.unlink()
    with pytest.raises(CaptureError, match="is gone"):
        read_captures(output)["resid_post", 0]


def test_an_output_without_captures_says_so(evaluate: Evaluate) -> None:
    with pytest.raises(CaptureError, match="needs a Capture"):
        read_captures(outputs(evaluate())[0])


def test_captures_without_rows_are_empty(evaluate: Evaluate) -> None:
    generated = {**CAPTURE, "positions": "all_generated"}
    output = outputs(evaluate(generate(max_tokens=1, temperature=0.0), plan=[generated]))[0]
    assert read_captures(output)["resid_post", 5].shape == (0, 256)


def test_a_plan_that_the_server_refuses_is_a_readable_error(evaluate: Evaluate) -> None:
    log = evaluate(plan=[{"kind": "capture", "site": "resid"}])
    assert log.status == "error" and log.error is not None and log.samples
    assert log.error.message.startswith(
        "PlanError(\"midstream.plan[0]: interventions[0]: Capture.site is 'resid'; allowed:"
    )
    assert all(len(sample.error_retries or []) == 0 for sample in log.samples)


@pytest.mark.parametrize("plan", [Plan.of(Capture("resid_post")), [Capture("resid_post")], "no JSON"])
def test_a_plan_that_is_not_json_is_refused(evaluate: Evaluate, plan: Any) -> None:
    """inspect_ai would take two models for one if their plans differ in what is not JSON."""
    with pytest.raises(PlanError, match="to_json"):
        evaluate(plan=plan)


def test_the_cache_tells_plans_apart(evaluate: Evaluate) -> None:
    cached = generate(max_tokens=2, temperature=0.0, cache=True)
    assert [accuracy(evaluate(cached, plan=plan)) for plan in ([], [NO_COUNTRY], [], [NO_COUNTRY])] == [1, 0, 1, 0]
