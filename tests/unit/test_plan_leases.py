"""Leases of recorded runs (issue 3, E5, E10): who is cancelled while the workers answer holds nothing afterwards."""

import asyncio

import pytest

from midstream import Patch, Plan, RecordedRun
from midstream.capture.rows import NO_ROUTES
from midstream.plan.values import ModelFacts
from midstream.requests.invokes import PreparedPlan
from midstream.requests.vectors_and_runs import LoadedAdapters, Runs, Vectors
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
