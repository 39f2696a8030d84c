"""midstream's server as a model provider of inspect_ai: evaluations run with a plan, and their logs contain activations.

    plan = Plan.of([Steer("resid_post", layers=5, vector=direction), Capture("resid_post", layers=7)])
    model = get_model("midstream/demo", base_url="http://localhost:8000/v1", api_key="my-key", plan=plan.to_json())
    (log,) = eval(task, model=model)
    read_captures(log.samples[0].output)["resid_post", 7]   # [positions, hidden]

inspect_ai finds this module by the entry point `midstream` in its group `inspect_ai`.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import AsyncIterable, AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelCall, ModelOutput, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import APIStatusError, HttpxBinaryResponseContent
from safetensors import safe_open
from safetensors.torch import load, save_file

from midstream.capture.rows import Captured
from midstream.errors import CaptureError, PlanError
from midstream.settings import NAME


class MidstreamAPI(OpenAICompatibleAPI):
    """A model that `midstream serve` serves, by its route of chat completions.

    The response's field `midstream` becomes `ModelOutput.metadata["midstream"]`, without handles, which expire.

    Args:
        model_name: the name that the server gives the model.
        base_url: with `/v1`. Default: the environment variable MIDSTREAM_BASE_URL.
        api_key: default: the environment variable MIDSTREAM_API_KEY. Not needed for a server without keys.
        plan: every request's plan, as JSON (`Plan.to_json()`) or as plain data; or the request's whole field `midstream`, with `plan` and
            `answers`. A key of the field in `GenerateConfig.extra_body["midstream"]` replaces that key for one request.
        captures_dir: a directory for captured rows: one safetensors file for each request. By default the rows go into the log, in
            base64, and more than 1 MiB in one request is an error.
        model_args: as in inspect_ai's provider `openai-api`.

    Raises:
        PlanError: `plan` is not JSON. Plans that the server refuses raise it in `generate`, and are not tried again.
        CaptureError: in `generate`: the log or the server has no room for the rows.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        plan: Any = None,
        captures_dir: str | None = None,
        **model_args: Any,
    ) -> None:
        self._field = field_of(plan)
        self._directory = None if captures_dir is None else Path(captures_dir).expanduser().absolute()
        key = api_key or os.environ.get("MIDSTREAM_API_KEY") or "none"
        super().__init__(
            model_name, base_url, key, config or GenerateConfig(), service=NAME, responses_api=False, **model_args
        )
        # inspect_ai's cache identifies a request by the base URL and the config, so a URL fragment, which is never sent, tells plans apart.
        if self._field:
            self.base_url = f"{self.base_url}#{sha256(json.dumps(self._field).encode()).hexdigest()}"

    def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
        params = super().completion_params(config, tools)
        extra = params.get("extra_body", {})
        if field := {**self._field, **field_of(extra.get(NAME))}:
            params["extra_body"] = {**extra, NAME: {"inline": True, **field}}
        return params

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        result = await super().generate(input, tools, tool_choice, config)
        if not isinstance(result, tuple) or not isinstance(output := result[0], ModelOutput):
            return result
        found: Any = (result[1].response or {}).pop(NAME, None)  # the log needs it only once
        if found:
            await self._keep(found.get("captures", []))
            output.metadata = {**(output.metadata or {}), NAME: found}
        return result

    async def stream_completion(self, stream: AsyncIterable[Any]) -> Any:
        found = {}

        async def chunks() -> AsyncIterator[Any]:
            async for chunk in stream:
                found.update((chunk.model_extra or {}).get(NAME, {}))
                yield chunk

        completion = await super().stream_completion(chunks())
        if found:
            setattr(completion, NAME, found)
        return completion

    def handle_bad_request(self, ex: APIStatusError) -> ModelOutput | Exception:
        if str(ex.param).startswith(NAME) and isinstance(ex.body, dict):
            # A returned error would show the whole request.
            raise PlanError(f"{ex.param}: {ex.body.get('message')}") from ex
        return super().handle_bad_request(ex)

    async def _keep(self, entries: list[dict[str, Any]]) -> None:
        """Put the rows of each capture where the log finds them: into the entry itself, or into a file that the entry names."""
        tensors = {}
        for entry in entries:
            handle = entry.pop("handle")
            if self._directory is None:
                if "data" not in entry:
                    raise CaptureError(
                        "The captures of one request are over 1 MiB, which is too much for the log. Give the model a directory "
                        "for them: captures_dir=..., or -M captures_dir=..."
                    )
                continue
            name = f"{entry['choice']}.{entry['site']}.{entry['layer']}.{entry['when']}"
            tensors[name] = tensor_of(entry) if "data" in entry else await self._download(handle)
            entry.pop("data", None)
            entry["tensor"] = name
        if tensors and self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = self._directory / f"{uuid.uuid4().hex}.safetensors"
            save_file(tensors, file)
            for entry in entries:
                entry["file"] = str(file)

    async def _download(self, handle: str | None) -> torch.Tensor:
        if handle is None:
            raise CaptureError(
                "The captures of one request exceed the server's limit: capture less, or start it with a larger "
                "MIDSTREAM_CAPTURE_BYTES."
            )
        path = f"/{NAME}/captures/{handle}"
        file = await self.client.get(path, cast_to=HttpxBinaryResponseContent)
        await self.client.delete(path, cast_to=object)
        return load(file.content)["rows"]


@modelapi(name=NAME)
def provider() -> type[ModelAPI]:
    return MidstreamAPI


def field_of(given: Any) -> dict[str, Any]:
    """The request's field `midstream`, from a plan or from such a field, as JSON or plain data. Raises PlanError for anything else."""
    try:
        data = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError) as error:
        message = f"The plan must be JSON, because inspect_ai distinguishes models by it: give it as plan.to_json() ({error})."
        raise PlanError(message) from error
    return (
        data if isinstance(data, dict) and "interventions" not in data else {"plan": data} if data is not None else {}
    )


def read_captures(output: ModelOutput, choice: int = 0) -> Captured:
    """The activations that a model call captured, from an output in a log or in a running evaluation.

        for sample in read_eval_log(path).samples:
            captures = read_captures(sample.output)
            captures["resid_post", 5]              # CPU tensor [positions, width], in the model's dtype
            captures.positions["resid_post", 5]    # [0, 1, 2, ...]

    Args:
        output: the output of a model call. A sample has that of its last call as `sample.output`, and the others in its events, as
            `event.output`.
        choice: which choice, if the request had several (`num_choices`).

    Raises CaptureError if the output has no captures, if its file is gone, or if the log was read without its attachments.
    """
    found = (output.metadata or {}).get(NAME, {}).get("captures", [])
    entries = [entry for entry in found if entry["choice"] == choice]
    if not entries:
        raise CaptureError(f"The output has no captures of choice {choice}: its plan needs a Capture.")
    planes = {(entry["site"], entry["layer"], entry["when"]): entry for entry in entries}
    tensors = {plane: tensor_of(entry) for plane, entry in planes.items()}
    return Captured.of("in the log", tensors, {key: each["positions"] for key, each in planes.items()})


def tensor_of(entry: dict[str, Any]) -> torch.Tensor:
    """The rows of one capture, `[positions, width]`."""
    if "file" in entry:
        if not Path(entry["file"]).exists():
            raise CaptureError(f"The file of these captures is gone: {entry['file']}.")
        with safe_open(entry["file"], "pt") as file:
            return file.get_tensor(entry["tensor"])
    if entry["data"].startswith("attachment://"):
        raise CaptureError("The log was read without its attachments: read_eval_log(path, resolve_attachments=True).")
    data, dtype = bytearray(base64.b64decode(entry["data"])), getattr(torch, entry["dtype"])
    rows = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return rows.reshape(entry["shape"])
