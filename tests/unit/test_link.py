"""Links between ranks (rows E10 and E12): the others fetch the values that a rank publishes, and nothing stays behind.

Ranks are threads of this process, or processes of their own; the values expected are closed forms that both sides compute.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from limits import least

from midstream.errors import EngineClosedError, MidstreamError, NeverReachedError, StageFailedError, TraceError
from midstream.ranks.link import Link, ReadyValue, _Used, _Value
from midstream.transport import messages

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
def linked(size):
    """The links of `size` ranks, each a thread for the time of its making."""
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        links = list(pool.map(lambda rank: Link(rank, exchange.of(rank), "pipeline", "127.0.0.1"), range(size)))
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
        messages.machine_name = lambda: f"machine {rank}"
    link = Link(rank, exchange_over([pipe] * size, rank), "pipeline", "127.0.0.1")
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
    before = messages.machine_name
    if machines:
        messages.machine_name = lambda: "machine 0"
    try:
        pipes = [end[0] for end in ends]
        link = Link(0, exchange_over(pipes, 0), "pipeline", "127.0.0.1")
    finally:
        messages.machine_name = before

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
            link.end(body, NeverReachedError("over"))
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


def test_a_fetch_brings_the_published_value(pair):
    """E10: dtypes, shapes and structure are kept, whether the request or the value comes first."""
    early = pair[1].fetch(0, "a", 1)
    assert not early.done
    pair[0].publish("a", 1, sample())
    assert_same(wait(early), sample())
    assert_same(wait(pair[1].fetch(0, "a", 1)), sample())
    assert_same(wait(pair[1].fetch(0, "a", 1, ref=("list", 2))), sample()["list"][2])
    assert_same(wait(pair[1].fetch(0, "a", 1, ref=("pair", 0))), sample()["pair"].hidden)
    finish(pair, "a")


def test_one_answer_settles_all_open_fetches_of_a_value(pair):
    fetches = [pair[1].fetch(0, "a", 1) for _ in range(2)]
    pair[0].publish("a", 1, sample(), readers=[1])
    for fetch in fetches:
        assert_same(wait(fetch), sample())
    finish(pair, "a")


def test_a_fetch_gives_the_same_value_again(pair):
    pair[0].publish("a", 1, torch.ones(2))
    fetch = pair[1].fetch(0, "a", 1)
    assert wait(fetch) is fetch.wait()
    finish(pair, "a")


def test_fetching_a_missing_part_raises(pair):
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


def test_ending_a_body_answers_fetches_of_values_that_were_never_published(pair):
    """E12: fetches before and after the end raise the owner's reason."""
    early = pair[1].fetch(0, "a", 1)
    eventually(lambda: pair[0].gauges()["parked_requests"] == 1)
    pair[0].publish("a", 2, torch.ones(1))
    pair[0].end("a", NeverReachedError("the request ended at token 3"))
    with pytest.raises(NeverReachedError, match="ended at token 3"):
        wait(early)
    with pytest.raises(NeverReachedError, match="ended at token 3"):
        wait(pair[1].fetch(0, "a", 5))
    assert wait(pair[1].fetch(0, "a", 2)) == 1  # what was published stays for those that still run
    pair[1].end("a", NeverReachedError("over"))
    for link in pair:
        eventually(lambda link=link: is_idle(link))
        with pytest.raises(NeverReachedError):
            wait(link.fetch(1 - link.rank, "a", 2))
        assert is_idle(link)


def test_other_ranks_learn_that_a_body_failed(pair):
    """E12: without a request, and as the answer to one."""
    assert pair[1].failure_of("a") is None
    fetch = pair[1].fetch(0, "a", 1)
    pair[0].end("a", StageFailedError("it raised"))
    with pytest.raises(StageFailedError, match="it raised"):
        wait(fetch)
    eventually(lambda: isinstance(pair[1].failure_of("a"), StageFailedError))
    finish(pair, "a")


def test_errors_do_not_keep_the_objects_of_their_readers(pair):
    """D7: the reason of an ended body is kept for a while, without the frames that it was raised through."""

    class Large:
        pass

    def read():
        large = Large()
        seen.append(weakref.ref(large))
        pair[0].fetch(1, "a", 1).wait()

    seen = []
    finish(pair, "a")
    with pytest.raises(NeverReachedError, match="over"):
        read()
    gc.collect()
    assert seen[0]() is None


def test_value_that_cannot_be_pickled_is_an_error_where_it_is_used(pair):
    pair[0].publish("a", 1, (torch.ones(2), {"lock": threading.Lock()}))
    with pytest.raises(MidstreamError, match=r"type lock lies on rank 0"):
        wait(pair[1].fetch(0, "a", 1))
    assert_same(wait(pair[1].fetch(0, "a", 1, ref=(0,))), torch.ones(2))
    finish(pair, "a")


def test_values_are_kept_until_every_rank_has_ended_the_body():
    """D7: and not longer."""
    with linked(3) as links:
        links[0].publish("a", 1, torch.ones(1000))
        links[0].publish("b", 1, torch.ones(10))
        assert links[0].gauges()["published_bytes"] == 4040
        for link in links[:2]:
            link.end("a", NeverReachedError("over"))
        wait(links[2].fetch(0, "a", 1))
        assert links[0].gauges()["published"] == 2
        links[2].end("a", NeverReachedError("over"))
        eventually(lambda: links[0].gauges()["published_bytes"] == 40)
        finish(links, "b")


def test_readers_bound_how_long_a_value_is_kept():
    with linked(3) as links:
        early = links[1].fetch(0, "a", 1)
        eventually(lambda: links[0].gauges()["parked_requests"] == 1)
        links[0].publish("a", 1, torch.ones(3), readers=[1, 2])
        wait(early)
        assert links[0].gauges()["published"] == 1
        wait(links[2].fetch(0, "a", 1))
        eventually(lambda: links[0].gauges()["published"] == 0)
        with pytest.raises(MidstreamError, match="no rank was to fetch it again"):
            wait(links[2].fetch(0, "a", 1))
        finish(links, "a")


def test_dropped_bodies_leave_nothing_and_do_not_come_back(pair):
    """E12: the ranks see an abort one after the other."""
    waiting = pair[0].fetch(1, "a", 7)
    early = pair[1].fetch(0, "a", 2)
    eventually(lambda: pair[0].gauges()["parked_requests"] == 1 == pair[1].gauges()["parked_requests"])
    pair[0].publish("a", 1, torch.ones(3))
    pair[0].drop(["a", "never heard of"])
    assert is_idle(pair[0])
    for fetch in (waiting, early, pair[1].fetch(0, "a", 1), pair[0].fetch(1, "a", 1)):
        with pytest.raises(NeverReachedError, match="aborted"):
            wait(fetch)
    pair[0].publish("a", 3, torch.ones(3))
    pair[1]._post(0, _Value(1, "a", 9, (), False, "p"), torch.ones(3))
    pair[1]._post(0, _Used(1, [("a", "p", ())]))
    pair[1].drop(["a", "never heard of"])
    pair[1].publish("b", 1, 0)
    wait(pair[0].fetch(1, "b", 1))  # by now rank 0 has seen all of it
    finish(pair, "b")


@pytest.mark.slow
def test_many_bodies_leave_memory_flat(pair):
    """D7, E12: for bodies that end, that are dropped, and whose values are not fetched."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def run(body, way):
        for number in range(3):
            pair[0].publish(body, number, torch.full((100_000,), float(number)), place="p")
            if way != "not fetched":
                assert wait(pair[1].fetch(0, body, number))[0] == number
        pair[1].fetch(0, body, 99)
        for link in pair:
            link.drop([body]) if way == "dropped" else link.end(body, NeverReachedError("over"))

    for i in range(500):
        run(f"body {i}", ("ended", "dropped", "not fetched")[i % 3])
        if i == 100:
            before = resident()
    for link in pair:
        eventually(lambda link=link: is_idle(link))
    assert resident() - before < 40 << 20  # 400 bodies had 480 MB in all


def test_waived_values_are_forgotten_before_the_body_is_over(pair):
    """C11: whether they are waived before or after they are published. Other values stay, and a body that is over waives nothing."""
    finish(pair, "over")
    pair[0].publish("a", 0, torch.ones(3), place="p")
    pair[0].publish("a", 1, torch.ones(3), place="p")
    pair[1].waive(0, {"a": [0, 2], "over": [5]})
    assert wait(pair[1].fetch(0, "a", 1)) is not None  # by now rank 0 has seen it
    assert pair[0].gauges()["published"] == 1
    pair[0].publish("a", 2, torch.ones(3), place="p")
    pair[0].publish("a", 3, torch.ones(3), place="p")
    assert pair[0].gauges()["published"] == 2
    assert torch.equal(wait(pair[1].fetch(0, "a", 3)), torch.ones(3))
    with pytest.raises(TraceError, match="no rank was to fetch it again"):
        wait(pair[1].fetch(0, "a", 2))
    finish(pair, "a")


@pytest.mark.parametrize("late", [False, True], ids=["published before", "published after"])
def test_a_rank_that_has_ended_the_body_need_not_waive(late):
    with linked(3) as links:
        links[0].publish("other", 0, 1)
        if not late:
            links[0].publish("a", 0, torch.ones(3))
        links[1].waive(0, {"a": [0]})
        links[2].end("a", NeverReachedError("over"))
        assert [wait(link.fetch(0, "other", 0)) for link in links[1:]] == [1, 1]  # by now rank 0 has seen both
        if late:
            links[0].publish("a", 0, torch.ones(3))
        assert links[0].gauges()["published"] == 1
        finish(links, "a", "other")


def test_a_fetch_of_a_value_that_is_waived_meanwhile_is_answered(pair):
    """This happens if a body is ended during a fetch that another body waits for, too."""
    fetch = pair[1].fetch(0, "a", 0)
    pair[1].waive(0, {"a": [0]})
    eventually(lambda: pair[0].gauges()["parked_requests"] == 1)
    pair[0].publish("a", 0, torch.ones(3))
    assert torch.equal(wait(fetch), torch.ones(3))
    finish(pair, "a")


def test_fetching_a_refused_value_raises_and_others_arrive(pair):
    """Before and after it is refused. Waiving a later value does not change the error."""
    before = pair[1].fetch(0, "a", 0)
    pair[0].refuse("a", 0, StageFailedError("no such module"))
    pair[0].publish("a", 1, torch.ones(3))
    pair[1].waive(0, {"a": [1]})
    for fetch in (before, pair[1].fetch(0, "a", 0)):
        with pytest.raises(StageFailedError, match="no such module"):
            wait(fetch)
    pair[0].publish("a", 2, torch.ones(3))
    assert torch.equal(wait(pair[1].fetch(0, "a", 2)), torch.ones(3))
    finish(pair, "a")


def test_a_fetch_that_waits_does_not_hold_up_those_of_other_threads(pair):
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(pair[1].fetch(0, "a", 1).wait)
        time.sleep(0.05)
        assert pool.submit(_published_and_fetched, pair, 0).result(5) == 0
        pair[0].publish("a", 1, 1)
        assert waiting.result(WAIT) == 1
    finish(pair, "a")


def _published_and_fetched(pair, number):
    pair[0].publish("a", number, number)
    return pair[1].fetch(0, "a", number).wait()


def test_wait_any_returns_with_the_first(pair):
    fetches = [pair[1].fetch(0, "a", number) for number in range(3)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair[1].wait_any, fetches)
        pair[0].publish("a", 1, "here")
        waiting.result(WAIT)
    assert [fetch.done for fetch in fetches] == [False, True, False]
    finish(pair, "a")


def test_one_rank_alone_keeps_nothing():
    with linked(1) as (link,):
        link.publish("a", 1, torch.ones(3))
        link.end_step()
        link.end("a", NeverReachedError("over"))
        assert is_idle(link)


# ----------------------------------------------------------------------------------------------------- sent ahead


def step(pair, number, body="a", ref=(), fetch=True, place="p"):
    """One step: rank 0 publishes a value and rank 1 uses it. Returns whether the value was there already."""
    pair[0].publish(body, number, (torch.full((3,), float(number)), -number), place=place)
    eventually(lambda: pair[0]._senders[1].queued_bytes == 0)
    if not fetch:
        return None
    time.sleep(0.01)  # for what is on its way
    fetch = pair[1].fetch(0, body, number, ref)
    there = fetch.done
    expected = (torch.full((3,), float(number)), -number)
    assert_same(wait(fetch), expected if ref == () else expected[ref[0]])
    pair[1].end_step()
    eventually(lambda: pair[1]._senders[0].queued_bytes == 0)
    time.sleep(0.01)
    return there


def test_after_a_fetch_the_next_value_of_the_place_is_sent_ahead(pair):
    assert [step(pair, number) for number in range(5)] == [False, True, True, True, True]
    assert [step(pair, number, body="b", ref=(1,)) for number in range(4)] == [False, True, True, True]
    assert not step(pair, 7, ref=(1,)), "another part of it is not"
    assert not step(pair, 8, place="q"), "another place is not"
    finish(pair, "a", "b")


def test_each_fetch_causes_at_most_one_unused_value(pair):
    sent = pair[0]._senders[1].stats["messages"]
    assert not any(step(pair, number, fetch=number % 2) for number in range(9))
    assert pair[0]._senders[1].stats["messages"] - sent == 4 + 4  # answers, and the values after them
    assert pair[1].gauges()["sent_ahead"] == 1, "only the newest value of a place is kept"
    finish(pair, "a")


@pytest.mark.parametrize("waives", [True, False])
def test_sending_ahead_stops_at_the_first_unused_value(pair, waives):
    """D7: the unused value is dropped when it is waived or the body ends."""
    for number in range(3):
        step(pair, number)
    sent = pair[0]._senders[1].stats["messages"]
    for number in range(3, 16):
        step(pair, number, fetch=False)
        time.sleep(0.01)
        if waives:
            pair[1].waive(0, {"a": [number]})
    assert pair[0]._senders[1].stats["messages"] == sent + 1
    assert pair[1].gauges()["sent_ahead"] == (0 if waives else 1)
    assert step(pair, 16) is False
    pair[1].end("a", NeverReachedError("over"))
    assert pair[1].gauges()["sent_ahead"] == 0
    finish(pair, "a")


def test_a_value_is_not_sent_ahead_to_a_rank_that_has_requested_it(pair):
    for number in range(3):
        step(pair, number)
    early = pair[1].fetch(0, "a", 3)
    eventually(lambda: pair[0].gauges()["parked_requests"] == 1)
    sent = pair[0]._senders[1].stats["messages"]
    assert not step(pair, 3, fetch=False)
    assert_same(wait(early)[1], -3)
    assert pair[0]._senders[1].stats["messages"] == sent + 1, "not twice"
    assert step(pair, 4)
    finish(pair, "a")


def test_a_value_sent_ahead_answers_an_open_fetch(pair):
    """The owner may send the value ahead before the request reaches it."""
    early = pair[1].fetch(0, "a", 3)
    pair[0]._answer((1, ()), "a", 3, ReadyValue(torch.ones(3), {}), "p")
    assert_same(wait(early), torch.ones(3))
    assert pair[1].gauges()["sent_ahead"] == 0
    finish(pair, "a")


# ------------------------------------------------------------------------------------------------------ processes


def _publish_sample(link):
    link.publish("a", 1, sample())
    link.publish("a", 2, (threading.Lock(),))
    link.end("a", NeverReachedError("over there"))


@pytest.mark.parametrize("machines", [False, True], ids=["one machine", "several machines"])
def test_other_processes(machines):
    """E10: by Unix socket, or by TCP between machines, while the owner's own thread is busy."""
    with processes(_publish_sample, size=3, machines=machines) as (link, _, results):
        for rank in (1, 2):
            assert_same(wait(link.fetch(rank, "a", 1)), sample())
            with pytest.raises(MidstreamError, match=f"type lock lies on rank {rank}"):
                wait(link.fetch(rank, "a", 2))
            with pytest.raises(NeverReachedError, match="over there"):
                wait(link.fetch(rank, "a", 3))
        assert results() == [None, None]
        assert (link._receiver.address["tcp"] is not None) == machines
        link.end("a", NeverReachedError("over"))
        eventually(lambda: is_idle(link))


STEPS, WIDTH = 30, 3_000_000  # 12 MB each way and step: more than sockets hold


def _talk(link):
    """Both ranks wait for each other's value of the step, then for that of the step before."""
    total, peer = 0.0, 1 - link.rank
    for number in range(STEPS):
        asked = link.fetch(peer, "a", number)
        link.publish("a", number, torch.full((WIDTH if number % 10 == 0 else 3,), float(number + link.rank)))
        total += asked.wait()[-1].item()
        if number:
            total += link.fetch(peer, "a", number - 1).wait()[-1].item()
    link.end("a", NeverReachedError("over"))
    return total


@pytest.mark.parametrize("machines", [False, True], ids=["one machine", "several machines"])
def test_two_ranks_that_fetch_from_each_other_do_not_deadlock(machines):
    """E10: neither rank's own thread serves the other."""
    with processes(_talk, machines=machines) as (link, _, results), ThreadPoolExecutor(1) as pool:
        mine = pool.submit(_talk, link).result(WAIT)
        (theirs,) = results()
        expected = [sum(n + r for n in range(STEPS)) + sum(n + r for n in range(STEPS - 1)) for r in (0, 1)]
        assert [theirs, mine] == expected
        eventually(lambda: is_idle(link))


def _nothing(link):
    return os.getpid()


@pytest.mark.parametrize("machines", [False, True], ids=["one machine", "several machines"])
def test_a_rank_that_died_is_an_error_within_a_second(machines):
    """E12: for waiting fetches and later ones. Fetches from other ranks go on."""
    assert least(lambda: time_to_notice(machines), 1.0) < 1


def time_to_notice(machines: bool) -> float:
    with processes(_nothing, size=3, machines=machines) as (link, ranks, results):
        results()
        fetch, other = link.fetch(1, "a", 1), link.fetch(2, "a", 1)
        link.publish("b", 1, torch.ones(3))
        start = time.monotonic()
        os.kill(ranks[0].pid, signal.SIGKILL)
        with pytest.raises(EngineClosedError, match="rank 1 has gone"):
            wait(fetch)
        noticed = time.monotonic() - start
        with pytest.raises(EngineClosedError, match="rank 1 has gone"):
            wait(link.fetch(1, "a", 2))
        assert not other.done
        link.publish("a", 3, torch.ones(3))
    return noticed


def test_a_rank_that_was_closed_is_an_error(pair):
    fetch = pair[0].fetch(1, "a", 1)
    pair[1].close()
    with pytest.raises(EngineClosedError, match="rank 1 has gone"):
        wait(fetch)
    with pytest.raises(EngineClosedError, match="rank 1 has gone"):
        wait(pair[0].fetch(1, "a", 2))
    pair[0].publish("b", 1, torch.ones(3))
    pair[0].end("a", NeverReachedError("over"))
    pair[0].end("b", NeverReachedError("over"))
    assert is_idle(pair[0])


def test_closing_wakes_waiting_fetches(pair):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair[0].fetch(1, "a", 1).wait)
        pair[0].close()
        pair[0].close()
        with pytest.raises(EngineClosedError):
            waiting.result(WAIT)
    with pytest.raises(EngineClosedError):
        wait(pair[0].fetch(1, "a", 1))


def test_a_peer_whose_connection_breaks_is_gone(pair):
    """If a connection breaks in one direction, fetches in both directions end."""
    fetches = [pair[0].fetch(1, "a", 1), pair[1].fetch(0, "a", 1)]
    eventually(lambda: pair[0].gauges()["parked_requests"] == 1 == pair[1].gauges()["parked_requests"])
    pair[0]._senders[1]._sock.shutdown(2)
    for fetch in fetches:
        with pytest.raises(EngineClosedError):
            wait(fetch)


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_values_move_to_the_host_while_they_are_sent(pair):
    """D7: `end_step` frees the device's memory. Values sent before, during and after the move are the same."""
    device = torch.device("cuda")
    torch.ones(1, device=device)
    before = torch.cuda.memory_allocated()
    fetches = []
    for number in range(50):
        torch.cuda._sleep(1_000_000)  # the device lags behind
        x_TH = torch.full((512, 1024), float(number), device=device, dtype=torch.bfloat16)
        pair[0].publish("a", number, {"x": x_TH, "pair": Pair(x_TH, torch.arange(number + 1, device=device))})
        del x_TH
        fetches.append((number, pair[1].fetch(0, "a", number)))
        if number % 3 == 0:
            pair[0].end_step()
            fetches += [(older, pair[1].fetch(0, "a", older)) for older in (number, number // 2)]
    pair[0].end_step()
    torch.cuda.synchronize()
    for number, fetch in fetches:
        value = wait(fetch)
        assert value["x"].dtype == torch.bfloat16 and (value["x"] == number).all()
        assert_same(value["pair"].residual, torch.arange(number + 1))
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert all(value.is_pinned() for value in pair[0]._bodies["a"].values[3].content.value["pair"])
    finish(pair, "a")
