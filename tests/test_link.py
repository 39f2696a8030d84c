"""Links between ranks (rows E10 and E12): what one rank publishes is what the others fetch, and nothing stays behind.

Ranks are threads of this process, or processes of their own; the values expected are closed forms that both sides compute.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from midstream.engine import wire
from midstream.errors import EngineClosedError, MidstreamError, NeverReachedError
from midstream.ranks.link import Link

torch.set_num_threads(1)

WAIT = 30  # seconds; a shared machine may be slow
Pair = namedtuple("Pair", "hidden residual")


# ------------------------------------------------------------------------------------------------------ the ranks


class Exchange:
    """An all-gather among threads."""

    def __init__(self, size):
        self._each = [None] * size
        self._barrier = threading.Barrier(size, timeout=WAIT)

    def of(self, rank):
        def exchange(item):
            self._each[rank] = item
            self._barrier.wait()
            each = list(self._each)
            self._barrier.wait()
            return each

        return exchange


@contextmanager
def linked(size, **kwargs):
    """The links of `size` ranks, each a thread for the time of its making."""
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        links = list(pool.map(lambda rank: Link(rank, exchange.of(rank), "pipeline", **kwargs), range(size)))
    try:
        yield links
    finally:
        for link in links:
            link.close()


@pytest.fixture
def pair():
    with linked(2) as links:
        yield links


def exchange_over(pipes, rank):
    """An all-gather among processes: rank 0 collects."""

    def exchange(item):
        if rank:
            pipes[rank].send(item)
            return pipes[rank].recv()
        each = [item, *(pipe.recv() for pipe in pipes[1:])]
        for pipe in pipes[1:]:
            pipe.send(each)
        return each

    return exchange


def _run_rank(rank, size, pipe, function, machines):
    if machines:
        wire.machine = lambda: f"machine {rank}"
    link = Link(rank, exchange_over([pipe] * size, rank), "pipeline", host="127.0.0.1" if machines else None)
    try:
        pipe.send(("result", function(link)))
        assert pipe.recv() == "close"
    finally:
        link.close()


@contextmanager
def processes(function, size=2, machines=False):
    """This process is rank 0, with a link to ranks that run `function(link)`. Yields it, the processes and their results.

    `machines`: each rank takes itself to be on a machine of its own.
    """
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=_run_rank, args=(rank, size, ends[rank][1], function, machines), daemon=True)
        for rank in range(1, size)
    ]
    for process in ranks:
        process.start()
    before = wire.machine
    if machines:
        wire.machine = lambda: "machine 0"
    try:
        pipes = [end[0] for end in ends]
        link = Link(0, exchange_over(pipes, 0), "pipeline", host="127.0.0.1" if machines else None)
    finally:
        wire.machine = before

    def results():
        assert all(pipe.poll(WAIT) for pipe in pipes[1:])
        return [pipe.recv()[1] for pipe in pipes[1:]]

    try:
        yield link, ranks, results
    finally:
        for pipe in pipes[1:]:
            with suppress(OSError):
                pipe.send("close")
        link.close()
        for process in ranks:
            process.join(WAIT)
            process.kill()


def eventually(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait(fetch):
    """The fetch's value, but never a hang."""
    eventually(lambda: fetch.done)
    return fetch.wait()


def is_idle(link):
    return not any(link.gauges().values())


def finish(links, *bodies):
    for link in links:
        for body in bodies:
            link.end(body, "over")
    for link in links:
        eventually(lambda link=link: is_idle(link))


# ------------------------------------------------------------------------------------------------------- the values


def sample():
    ints = torch.arange(7)
    return {
        "pair": Pair(torch.arange(12.0).reshape(3, 4).bfloat16(), None),
        "list": [ints, ints > 3, (torch.zeros(0, 5), "text", 2)],
        "strided": torch.arange(20, dtype=torch.int32).reshape(4, 5).T[1:],
        "big": torch.arange(200_000, dtype=torch.float16).reshape(2, -1),
    }


def assert_same(given, expected):
    assert type(given) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert given.dtype == expected.dtype and given.device.type == "cpu"
        assert given.shape == expected.shape and torch.equal(given, expected)
    elif isinstance(expected, dict):
        assert list(given) == list(expected)
        for key, item in expected.items():
            assert_same(given[key], item)
    elif isinstance(expected, (tuple, list)):
        assert len(given) == len(expected)
        for mine, theirs in zip(given, expected, strict=True):
            assert_same(mine, theirs)
    else:
        assert given == expected


def test_a_fetch_brings_what_was_published(pair):
    """E10: dtypes, shapes and structure arrive as they were, whether the request is first or the value."""
    early = pair[1].fetch(0, "a", 1)
    assert not early.done
    pair[0].publish("a", 1, sample())
    assert_same(wait(early), sample())
    assert_same(wait(pair[1].fetch(0, "a", 1)), sample())
    assert_same(wait(pair[1].fetch(0, "a", 1, ref=("list", 2))), sample()["list"][2])
    assert_same(wait(pair[1].fetch(0, "a", 1, ref=("pair", 0))), sample()["pair"].hidden)
    finish(pair, "a")


def test_a_fetch_gives_the_same_value_again(pair):
    pair[0].publish("a", 1, torch.ones(2))
    fetch = pair[1].fetch(0, "a", 1)
    assert wait(fetch) is fetch.wait()
    finish(pair, "a")


def test_part_that_is_not_there(pair):
    pair[0].publish("a", 1, (torch.ones(2),))
    with pytest.raises(IndexError):
        wait(pair[1].fetch(0, "a", 1, ref=(3,)))
    pair[0].publish("a", 2, None)
    with pytest.raises(TypeError):
        wait(pair[1].fetch(0, "a", 2, ref=(0,)))
    finish(pair, "a")


def test_several_bodies_and_numbers_do_not_mix():
    with linked(3) as links:
        for owner, link in enumerate(links):
            for body in ("a", "b"):
                for number in range(3):
                    link.publish(body, number, (owner, body, number))
        for link in links:
            for owner in {0, 1, 2} - {link.rank}:
                for body in ("a", "b"):
                    for number in range(3):
                        assert wait(link.fetch(owner, body, number)) == (owner, body, number)
        finish(links, "a", "b")


def test_ends_of_a_body_answer_what_was_never_published(pair):
    """E12: the reason that the owner gives, for requests before and after its end."""
    early = pair[1].fetch(0, "a", 1)
    eventually(lambda: pair[0].gauges()["parked_requests"] == 1)
    pair[0].publish("a", 2, torch.ones(1))
    pair[0].end("a", "the request ended at token 3")
    with pytest.raises(NeverReachedError, match="ended at token 3"):
        wait(early)
    with pytest.raises(NeverReachedError, match="ended at token 3"):
        wait(pair[1].fetch(0, "a", 5))
    assert wait(pair[1].fetch(0, "a", 2)) == 1  # what was published stays for those that still run
    pair[1].end("a", "over")
    for link in pair:
        eventually(lambda link=link: is_idle(link))
        with pytest.raises(NeverReachedError):
            wait(link.fetch(1 - link.rank, "a", 2))
        assert is_idle(link)


def test_value_that_cannot_be_pickled_is_an_error_where_it_is_used(pair):
    pair[0].publish("a", 1, (torch.ones(2), {"lock": threading.Lock()}))
    with pytest.raises(MidstreamError, match=r"type lock lies on rank 0"):
        wait(pair[1].fetch(0, "a", 1))
    assert_same(wait(pair[1].fetch(0, "a", 1, ref=(0,))), torch.ones(2))
    finish(pair, "a")
