"""Leases of recorded runs (issue 3, E5, E10): who is cancelled while the workers answer holds nothing afterwards."""

import asyncio

import pytest

from midstream.client.vectors_and_runs import Runs
from midstream.client.vllm_async import OutputStream
from midstream.client.vllm_engine import EngineConnection
from midstream.client.vllm_requests import EngineRequests


class Connection:
    """The workers' side of the leases, and the methods that a stream calls before it submits its requests."""

    release_runs_later = EngineConnection.release_runs_later

    def __init__(self) -> None:
        self.leases = 0
        self.answered = asyncio.Event()
        self.runs = Runs(self._ask, True)

    async def _ask(self, what, ids, by):
        self.leases += by
        if by > 0:
            await self.answered.wait()
        return [[]]

    async def start(self):
        return self

    async def send_vectors(self):
        pass


def test_a_stream_that_is_cancelled_while_the_workers_answer_gives_its_leases_back():
    """Seen failing where the release was arranged after the answer."""

    async def run():
        connection = Connection()
        requests = EngineRequests([], [], [], [], [], [], ["a"])
        waiting = asyncio.ensure_future(OutputStream(connection, lambda: requests))
        while not connection.leases:
            await asyncio.sleep(0)
        waiting.cancel()
        asyncio.get_running_loop().call_later(0.05, connection.answered.set)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return connection.leases

    assert asyncio.run(run()) == 0
