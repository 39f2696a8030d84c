"""What a client's connection does before its requests run: leases of recorded runs (E5, E10), and what the scheduler needs (F6)."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from midstream import Patch, Plan, RecordedRun
from midstream.capture.rows import NO_ROUTES
from midstream.plan.compile import ScheduledPlan
from midstream.plan.values import ModelFacts
from midstream.requests.invokes import PreparedPlan
from midstream.requests.vectors_and_runs import LoadedAdapters, Runs, Vectors
from midstream.runtime import request
from midstream.runtime.request import PlanRequest
from midstream.vllm.engine import EngineConnection, EngineRequest
from midstream.vllm.stream import EngineStream

RUN = RecordedRun("a", "a", (1,), ("resid_post",), (0,), (0,))


class Connection(EngineConnection):
    """Without an engine: the workers' side of the leases."""

    def __init__(self) -> None:
        self.leases = 0
        self.answered = asyncio.Event()
        self.vectors, self.runs, self.adapters = Vectors(), Runs(self._ask, None), LoadedAdapters(None)
        self._sending, self._interrupted = asyncio.Lock(), []

    async def _ask(self, what, ids, by):
        self.leases += by
        if by > 0:
            await self.answered.wait()
        return [[]]

    async def start(self):
        pass


def test_a_stream_that_is_cancelled_while_the_workers_answer_gives_its_leases_back():
    """Seen failing where the release was arranged after the answer."""

    async def run():
        connection = Connection()
        plan = Plan.of(Patch("resid_post", layer=0, position=0, source=RUN))
        prepared = PreparedPlan(plan, [1], NO_ROUTES, ModelFacts())
        requests = [EngineRequest({}, None, None, prepared, None, {})]
        waiting = asyncio.ensure_future(EngineStream(connection, lambda: requests))
        async with asyncio.timeout(10):
            while not connection.leases:
                await asyncio.sleep(0)
        waiting.cancel()
        asyncio.get_running_loop().call_later(0.05, connection.answered.set)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return connection.leases

    assert asyncio.run(run()) == 0


def test_what_the_scheduler_needs_of_a_clients_plan_is_made_on_another_thread(monkeypatch):
    """The event loop of a server, which serves all clients, finds it on admission."""
    made = []
    of = ScheduledPlan.of
    seen = SimpleNamespace(of=lambda *arguments: made.append(threading.current_thread().name) or of(*arguments))
    monkeypatch.setattr(request, "ScheduledPlan", seen)
    plan = Plan.of(Patch("resid_post", layer=0, position=0, source=np.ones(8)))
    params = SimpleNamespace(extra_args=PlanRequest(request.packed(plan), 2, checked=True).to_extra_args())
    connection = object.__new__(EngineConnection)
    connection.config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    prepared = PreparedPlan(plan, [1, 2, 3], NO_ROUTES, ModelFacts())
    asyncio.run(connection._as_strangers([EngineRequest({}, params, None, prepared, None, {})]))
    assert [name.partition("_")[0] for name in made] == ["midstream-plans"]
    payload = PlanRequest.of(params)
    assert payload.shares and payload.for_scheduler(3, 2, "cpu").scheduled and len(made) == 1
