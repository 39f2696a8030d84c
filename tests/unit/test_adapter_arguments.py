"""The argument of calls that chooses adapters (row N5), without an engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest

from midstream import LanguageModel
from midstream.engine.launch import adapter_among, load_first
from midstream.errors import ParameterError
from midstream.requests.arguments import adapter_alone, adapter_in, adapters_of
from midstream.requests.vectors_and_runs import LoadedAdapters
from midstream.settings import WORKER


@dataclass
class adapter:
    """As vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str = "here"
    load_inplace: bool = False


def test_the_argument_is_taken_out_of_the_parameters():
    assert adapter_in({"max_tokens": 1, "model": "red"}, "model") == ("red", {"max_tokens": 1})
    assert adapter_in({"max_tokens": 1}, "lora_request", default=3) == (3, {"max_tokens": 1})
    assert adapter_in({"model": None}, "model", default="red") == (None, {})  # None asks for no adapter
    with pytest.raises(ParameterError, match="lora_request=LoRARequest") as raised:
        adapter_in({"model": "red"}, "lora_request")
    assert raised.value.field == "model"
    with pytest.raises(ParameterError, match="model=NAME"):
        adapter_in({"lora_request": 1}, "model")


def test_a_list_has_an_adapter_for_each_prompt():
    assert adapters_of("red", "model", 2) == ["red", "red"]
    assert adapters_of(["red", None], "model", 2) == ["red", None]
    with pytest.raises(ParameterError, match="2 were given for 3") as raised:
        adapters_of(["red", None], "model", 3)
    assert raised.value.field == "model"
    with pytest.raises(ParameterError, match="one adapter"):
        adapter_alone(["red"], "model", "collect")


def test_a_language_model_has_no_adapters(hf: LanguageModel):
    for name in ("lora_request", "model"):
        with pytest.raises(ParameterError, match="merge_and_unload") as raised:
            hf.generate("The capital of France is", **{name: "red"})
        assert raised.value.field == name
    with pytest.raises(ParameterError, match="merge_and_unload"):
        hf.record("The capital of France is", "resid_post", model="red")


def test_adapters_that_vllm_would_mix_up_are_refused():
    loaded = []

    async def load(given):
        loaded.append(given.lora_name)

    known = LoadedAdapters(load)
    red = adapter("red", 1)
    known.check([red, None, red, adapter("blue", 2)])
    for wrong, match in (
        ([red, adapter("blue", 1)], "number 1"),
        ([red, adapter("red", 2)], "has the number 2"),
        ([adapter("red", 1, load_inplace=True)], "load_inplace"),
    ):
        with pytest.raises(ParameterError, match=match):
            known.check(wrong)
    asyncio.run(known.load([red, None, red]))
    asyncio.run(known.load([red]))
    assert loaded == ["red"]
    with pytest.raises(ParameterError, match="number 1"):
        known.check([adapter("blue", 1)])
    with pytest.raises(ParameterError, match="number 1"):
        known.check([adapter("red", 1, "there")])
    on_a_server = LoadedAdapters(None)
    on_a_server.check([red, adapter("blue", 1)])  # vLLM's front end has numbered them


def test_calls_at_one_time_load_an_adapter_once_and_no_other_of_its_number():
    loaded = []

    async def load(given):
        await asyncio.sleep(0)
        loaded.append(given.lora_name)

    async def run():
        known = LoadedAdapters(load)
        each = [adapter("red", 1), adapter("red", 1), adapter("blue", 1)]
        return await asyncio.gather(*(known.load([one]) for one in each), return_exceptions=True)

    first, second, other = asyncio.run(run())
    assert first is None and second is None and isinstance(other, ParameterError)
    assert loaded == ["red"]


def test_an_adapter_that_failed_to_load_is_loaded_again():
    async def load(given):
        raise ParameterError("no")

    known = LoadedAdapters(load)
    for _ in range(2):
        with pytest.raises(ParameterError, match="no"):
            asyncio.run(known.load([adapter("red", 1)]))
    known.check([adapter("blue", 1)])  # its number is free


class Engine:
    """An `AsyncLLM` whose workers load adapters, except those named "wrong"."""

    errored = False

    def __init__(self, worker: str = WORKER):
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker))
        self.loaded = []

    async def collective_rpc(self, method, args):
        assert method == "midstream_load_adapter"
        name = msgspec.msgpack.decode(*args)["lora_name"]
        self.loaded.append(name)
        return [(None, None), ("its names are wrong" if name == "wrong" else None, None)]


def test_an_engine_loads_an_adapter_before_its_first_request():
    async def request(engine, *args, **kwargs):
        await load_first(engine, adapter_among(args, kwargs))

    engine = Engine()
    for _ in range(2):
        asyncio.run(request(engine, None, adapter("red", 1)))
        asyncio.run(request(engine, lora_request=adapter("red", 1)))
        asyncio.run(request(engine))
    assert engine.loaded == ["red"]
    for _ in range(2):
        with pytest.raises(ParameterError, match="cannot load the adapter 'wrong' from here: its names are wrong"):
            asyncio.run(request(engine, lora_request=adapter("wrong", 2)))
    assert engine.loaded == ["red", "wrong", "wrong"]
    other = Engine("vllm.v1.worker.cpu_worker.CPUWorker")
    asyncio.run(request(other, lora_request=adapter("red", 1)))
    assert not other.loaded, "an engine without midstream's workers cannot be asked"
