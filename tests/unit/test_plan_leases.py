"""Leases of recorded runs (issue 3, E5, E10): who is cancelled while the workers answer holds nothing afterwards."""

import asyncio

import pytest

from midstream.client.async_ import Stream
from midstream.client.runs import Runs
from midstream.client.submission import Requests
from midstream.client.vllm import VLLM


class Model:
    """The workers' side of the leases, and what a stream asks of its model before it submits."""

    release_runs_later = VLLM.release_runs_later

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
        model = Model()
        waiting = asyncio.ensure_future(Stream(model, lambda: Requests([], [], [], [], [], ["a"], [])))
        while not model.leases:
            await asyncio.sleep(0)
        waiting.cancel()
        asyncio.get_running_loop().call_later(0.05, model.answered.set)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return model.leases

    assert asyncio.run(run()) == 0
