"""Code of traces is recorded in a process of its own: it ends with the caller, survives what the code does, and leaves the caller's process
alone (row U1).
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from recorded import FIND, LENGTH, MODEL, WIDTH, V, found, lowered, model, said, steer
from torch.overrides import TorchFunctionMode
from torch_settings import default_dtype

from midstream.errors import PlanError, TraceError
from midstream.lowering import taping
from midstream.lowering.functions import with_programs
from midstream.lowering.tiers import Tier
from midstream.plan.ops import Apply
from midstream.plan.values import ModelFacts, Plan
from midstream.trace.code import RETURNED, FunctionProgram
from midstream.trace.shipping import ship


@pytest.fixture(autouse=True)
def _by_the_process():
    token = FIND.set(taping.lowered_requests)
    yield
    FIND.reset(token)


def adds(model):
    model.layers_output[2] += V


def process():
    assert taping._running is not None
    return taping._running._process


def wait_for(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def forks():
    pid = process().pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


# Its life.


def run_script(text, **options):
    text = "from recorded import FIND, V, found, said\nfrom midstream.lowering import taping\n" + textwrap.dedent(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", "import sys, os\n" + text]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, **options)


STARTED = """
    FIND.set(taping.lowered_requests)
    def adds(model):
        model.layers_output[2] += V
    assert found(adds).edits
    pid = taping._running._process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        print(pid, *file.read().split(), flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "returns", "busy"])
def test_it_ends_with_the_caller(how):
    busy = """
        import threading
        def endless(model):
            while True:
                pass
        threading.Thread(target=lambda: (FIND.set(taping.lowered_requests), found(endless)), daemon=True).start()
    """
    script = STARTED + (textwrap.indent(textwrap.dedent(busy), "    ") if how == "busy" else "")
    caller = run_script(script + ("" if how == "returns" else "    sys.stdin.read()\n"), stdin=subprocess.PIPE)
    pids = caller.stdout.readline().split()
    assert len(pids) > 1 and all(map(is_there, pids))
    if how != "returns":
        time.sleep(0.5)
        caller.kill()
    caller.wait()
    wait_for(lambda: not any(map(is_there, pids)), 20)


def test_a_process_that_has_ended_is_started_again():
    found(adds)
    first = process()
    for pid in (*forks(), first.pid):
        os.kill(int(pid), signal.SIGKILL)
    assert said(found(adds)) == [steer(V)]  # known
    given = found(lambda m: adds(m))
    assert process() is not first and said(given) == [steer(V)]


def test_a_fork_of_the_caller_starts_its_own():
    caller = run_script(
        STARTED
        + """
    child = os.fork()
    if child == 0:
        given = found(lambda m: adds(m))
        print(taping._running._process.pid != pid, [name for name, *_ in said(given)], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    given = found(lambda m: (adds(m), 1)[1])
    print(taping._running._process.pid == pid, [name for name, *_ in said(given)], flush=True)
"""
    )
    out = caller.communicate()[0].splitlines()
    assert out[1:] == ["True ['Steer']", "True ['Steer']"]


def test_forks_of_older_codes_end_and_their_codes_can_still_be_asked():
    def body(model, tracer, factor):
        return [factor, *(model.layers_output[2][-1] for _ in tracer.iter[:])]

    def bodies():
        for factor in range(taping._FORKS + 3):

            def one(model, tracer, factor=factor):
                return [factor, *(model.layers_output[2][-1] for _ in tracer.iter[:])]

            yield one

    every = [found(one, steps=6) for one in bodies()]
    wait_for(lambda: len(forks()) <= taping._FORKS + 1)
    rows = {("resid_post", 2): torch.ones(2, WIDTH)}
    for number, given in enumerate(every):
        assert given.tier is Tier.CLIENT
        assert given.client_trace.outcome(rows, 2).values[RETURNED][0] == number


def test_several_threads_tape_at_once():
    def tape(factor):
        FIND.set(taping.lowered_requests)
        results[factor] = said(found(lambda model: model.layers_output[2].add_(factor * V)))

    results = {}
    threads = [threading.Thread(target=tape, args=(factor,)) for factor in range(1, 9)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == {factor: [steer(factor * V)] for factor in range(1, 9)}


# What the code does there.


def test_code_that_ends_its_process_runs_in_the_forward():
    def leaves(model):
        os._exit(1)

    def crashes(model):
        model.layers_output[2].apply_(lambda x: x + 1)

    def is_killed(model):
        signal.raise_signal(signal.SIGKILL)

    def runs_out_of_stack(model):
        nested = []
        for _ in range(1_000_000):
            nested = [nested]
        return repr(nested) and nested

    for body in (leaves, crashes, is_killed):
        for _ in range(2):
            given = found(body)
            assert given.tier is Tier.FORWARD and not given.edits, body.__name__
            assert "it ends the process in which it is taped" in given.reason
        text = taping.explained(FunctionProgram(body), MODEL)
        assert "it ends the process in which it is taped" in text and "runs in the forward" in text
    found(runs_out_of_stack)
    assert said(found(adds)) == [steer(V)]


def test_code_that_does_not_end_runs_in_the_forward(monkeypatch):
    monkeypatch.setattr(taping, "_SECONDS", 2.0)

    def loops(model):
        while True:
            pass

    def waits(model):
        threading.Event().wait()

    for body in (loops, waits):
        begin = time.monotonic()
        assert "takes more than 2 seconds" in found(body).reason
        assert 1.5 < time.monotonic() - begin < 30
        begin = time.monotonic()
        assert found(body).tier is Tier.FORWARD and time.monotonic() - begin < 1
    assert said(found(lambda m: adds(m))) == [steer(V)]
    wait_for(lambda: len(forks()) <= taping._FORKS + 1)


def test_without_the_process_code_runs_in_the_forward(monkeypatch):
    monkeypatch.setattr(taping, "_running", None)
    monkeypatch.setattr(taping, "_unavailable", (0.0, ""))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    def body(model):
        model.layers_output[1] += V

    with pytest.warns(RuntimeWarning, match="cannot be started"):
        assert found(body).tier is Tier.FORWARD
    with pytest.raises(PlanError, match="cannot be started"):
        with_programs(Plan.of([Apply("resid_post", layers=1, program=lambda h: h * 2)]), FACTS)
    monkeypatch.undo()
    FIND.set(taping.lowered_requests)
    assert said(found(body)) == [steer(V, 1)]


def test_a_process_that_fails_at_its_start_is_told_and_not_started_again_and_again(monkeypatch):
    starts = []
    popen = subprocess.Popen

    def counted(*args, **options):
        starts.append(args)
        return popen(*args, **options)

    monkeypatch.setattr(taping, "_running", None)
    monkeypatch.setattr(taping, "_unavailable", (0.0, ""))
    monkeypatch.setattr(taping, "_RUN", "raise SystemExit('it has no memory')")
    monkeypatch.setattr(taping.subprocess, "Popen", counted)
    for body in (adds, lambda m: m.layers_output[1].add_(V)):
        with pytest.warns(RuntimeWarning, match="run in the forward.*it has no memory"):
            assert found(body, known=model()).tier is Tier.FORWARD
    assert len(starts) <= 2
    monkeypatch.undo()
    assert found(adds, known=model()).edits


def test_a_message_that_is_interrupted_ends_the_process_and_the_next_one_tapes(monkeypatch):
    """Seen by reading: the rest of the message was awaited, and later messages were taken for it."""
    assert found(adds, known=model()).edits
    before, send = process().pid, taping.taper.send

    def half(sock, message, *rest, **options):
        if message[0] is taping.taper.Taper.model:
            sock.sendall(b"\0" * 5)
            raise KeyboardInterrupt
        send(sock, message, *rest, **options)

    monkeypatch.setattr(taping.taper, "send", half)
    with pytest.raises(KeyboardInterrupt):
        found(adds, known=model())
    monkeypatch.undo()
    assert found(adds, known=model()).edits and process().pid != before


def test_a_long_path_of_modules_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/there/is/no/folder/{i:060}" for i in range(4000))])
    monkeypatch.setattr(taping, "_running", None)
    assert found(adds, known=model()).edits


def test_a_path_that_changes_after_the_start_is_no_obstacle(tmp_path, monkeypatch):
    """Seen before: a recording looked at the new folders, and ended as code that acts on the world outside."""
    assert found(adds, known=model()).edits
    monkeypatch.syspath_prepend(tmp_path)
    assert found(adds, known=model()).edits


def test_findings_of_many_calls_do_not_pile_up():
    known = model()
    for length in range(5, 45):
        lowered([[adds]] * 40, [length] * 40, [2] * 40, known)
    (code,) = known.recorded.values()
    assert sum(map(len, code._found.values())) <= taping._MOST_FOUND


def test_ctrl_c_leaves_and_the_next_code_is_taped():
    def waits(model):
        threading.Event().wait()

    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        found(waits)
    assert said(found(lambda m: adds(m))) == [steer(V)]


# The caller's process.


def test_prints_of_other_threads_all_come(capsys):
    lines, stop = [], threading.Event()

    def prints():
        while not stop.is_set():
            print(f"line {len(lines)}")
            lines.append(1)
            time.sleep(0.001)

    thread = threading.Thread(target=prints)
    thread.start()
    for number in range(6):
        found(lambda model, number=number: print(number) or model.layers_output[2].mul_(number))
    stop.set()
    thread.join()
    assert capsys.readouterr().out.splitlines() == [f"line {number}" for number in range(len(lines))]


def test_random_numbers_and_variables_of_other_threads_are_not_set_back():
    module = sys.modules[__name__]
    module.COUNTED, drawn, stop = 0, [], threading.Event()

    def counts():
        while not stop.is_set():
            module.COUNTED += 1
            drawn.append((random.random(), float(np.random.rand())))
            time.sleep(0.0005)

    random.seed(1)
    np.random.seed(1)
    thread = threading.Thread(target=counts)
    thread.start()
    for number in range(6):
        found(lambda model, number=number: COUNTED + number + random.random())  # noqa: F821
    stop.set()
    thread.join()
    random.seed(1)
    np.random.seed(1)
    assert drawn == [(random.random(), float(np.random.rand())) for _ in drawn]
    assert len(drawn) == module.COUNTED


def test_settings_of_the_process_stay_as_they_are():
    def appends(model):
        sys.path.append("/nowhere")

    def of_devices(model):
        torch.set_default_device("meta")

    def of_dtypes(model):
        torch.set_default_dtype(torch.float64)

    def of_the_environment(model):
        os.environ["MADE_BY_CODE"] = "1"

    path = list(sys.path)
    for body in (appends, of_devices, of_dtypes, of_the_environment):
        assert found(body).tier is Tier.FORWARD, body.__name__
    assert (
        sys.path == path
        and torch.get_default_device().type == "cpu"
        and torch.empty(1).device.type == "cpu"
        and torch.get_default_dtype() is torch.float32
    )
    assert "MADE_BY_CODE" not in os.environ


def test_each_code_sees_the_process_as_it_began(tmp_path, monkeypatch):
    """The state that one code leaves is not seen by the next: the engine may run the one and not the other."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "counting_package.py").write_text(
        "class Counts:\n    made = 0\n    def __init__(self):\n        Counts.made += 1\n        self.number = Counts.made\n"
        "FLAGS = set()\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr("midstream.trace.saves._INSTALLED", (str(tmp_path),))
    import counting_package

    def counts(model):
        return counting_package.Counts().number

    def sets(model):
        counting_package.FLAGS.add("set")
        return len(counting_package.FLAGS)

    def reads(model):
        return sorted(counting_package.FLAGS)

    assert found(counts).tier is Tier.FORWARD and counting_package.Counts.made == 0
    found(sets)
    assert not counting_package.FLAGS
    given = found(reads)
    assert given.tier is Tier.PLAN and given.client_trace.outcome({}, 1).values[RETURNED] == []


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (functools.partial(default_dtype, torch.float64), "torch.float64, and a trace's code"),
        (functools.partial(torch.autocast, "cpu", torch.bfloat16), "torch.autocast is on here"),
        (Watching, "Watching is active here"),
    ],
)
def test_settings_of_the_caller_that_would_not_reach_the_code_are_refused(setting, said):
    """Seen failing: `torch.zeros(1).dtype` was float32, and a matmul under autocast ran in float32, in silence."""
    with setting(), pytest.raises(TraceError, match=said):
        found(lambda model: torch.zeros(1))
    with torch.device("cpu"):
        assert found(lambda model: str(torch.get_default_dtype())).tier is Tier.PLAN


def test_what_the_code_prints_does_not_come_from_the_recording(capfd):
    def body(model):
        print("printed")
        os.system("true")

    def writes(model):
        print("written", file=sys.stderr)
        model.layers_output[2] += V

    assert found(body).tier is Tier.FORWARD and found(writes).tier is Tier.BEHIND
    assert capfd.readouterr() == ("", "")


def test_a_module_of_the_callers_is_not_imported_or_changed(tmp_path, monkeypatch):
    (tmp_path / "my_probe_module.py").write_text(
        "import torch\nSEEN = []\nV = torch.ones(8)\n\ndef probe(model):\n    SEEN.append(1)\n    model.layers_output[2] += V\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_probe_module

    assert said(found(my_probe_module.probe)) == [steer(torch.ones(8))] and not my_probe_module.SEEN


def test_later_codes_find_an_installed_module_imported(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "slow_package.py").write_text(
        "import os\nHOME = os.getpid()\n\ndef scale(h):\n    return h * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr("midstream.trace.saves._INSTALLED", (str(tmp_path),))
    import slow_package

    def home(model, number):
        slow_package.scale(model.layers_output[1])
        return number, slow_package.HOME

    homes = []
    for number in range(3):
        given = found(lambda model, number=number: home(model, number))
        homes.append(given.client_trace.outcome({}, 1).values[RETURNED][1])
    assert homes[0] != homes[1] == homes[2] == process().pid


# Tensors, functions, the tokenizer.


def test_large_tensors_are_sent_once_and_again_when_they_change():
    big = torch.randn(WIDTH, 40_000)

    def scores(model):
        return (model.layers_output[1] @ big)[:, :2]

    def others(model):
        return (model.layers_output[2] @ big)[:, :3]

    before = dict(taping._process()._weights)
    first = found(scores)
    after = dict(taping._process()._weights)
    found(others)
    assert len(after) == len(before) + 1 and taping._process()._weights.keys() == after.keys()
    (program,) = first.saved_rows.programs.values()
    assert any(torch.equal(torch.tensor(each.numbers).view(each.shape), big) for each in program.constants)
    big.mul_(2)
    (program,) = found(scores).saved_rows.programs.values()
    assert any(torch.equal(torch.tensor(each.numbers).view(each.shape), big) for each in program.constants)
    assert len(taping._process()._weights) == len(after) + 1


def test_a_large_constant_comes_back_as_the_callers_own_bytes():
    big = torch.randn(WIDTH, 40_000)

    def scores(model):
        return (model.layers_output[1] @ big)[:, :2]

    given = found(scores)
    (program,) = given.saved_rows.programs.values()
    (constant,) = [each for each in program.constants if each.nbytes > 1 << 20]
    code = ship([[FunctionProgram(scores)]])
    assert any(constant.data is weight.data for weight in code.weights.values())


def test_old_tensors_are_dropped(monkeypatch):
    monkeypatch.setattr(taping, "_WEIGHT_BYTES", 4 << 20)
    for number in range(4):
        big = torch.full((WIDTH, 60_000), float(number))
        found(lambda model, big=big: (model.layers_output[1] @ big)[:, :2])
        assert sum(taping._process()._weights.values()) <= 4 << 20


def test_code_gets_the_tokenizer_when_it_asks_for_it():
    asked = []

    def tokenizer():
        asked.append(1)
        return {"word": 3}

    known = model()
    object.__setattr__(known, "tokenizer", tokenizer)

    def uses(model):
        model.layers_output[2] *= model.tokenizer["word"]

    assert said(found(adds, known=known)) == [steer(V)] and not asked
    assert found(uses, known=known).edits == found(lambda m: m.layers_output[2].mul_(3)).edits != ()
    assert asked == [1]

    def fails():
        raise OSError("no such file")

    other = model()
    object.__setattr__(other, "tokenizer", fails)
    assert "its code raises TraceError" in found(uses, known=other).reason


FACTS = ModelFacts(4, {("resid_post", layer): WIDTH for layer in range(4)}, "float32")


def test_a_function_of_a_plan_runs_in_the_process():
    def doubled(h):
        return h * 2 + V

    plan = with_programs(Plan.of([Apply("resid_post", layers=[1, 2], program=doubled)]), FACTS)
    assert not plan.has_functions

    def crashes(h):
        os._exit(1)

    with pytest.raises(PlanError, match="it ends the process in which it is taped"):
        with_programs(Plan.of([Apply("resid_post", layers=1, program=crashes)]), FACTS)

    def mixes(h):
        return h - h.mean(0)

    with pytest.raises(PlanError, match=rf"line {mixes.__code__.co_firstlineno + 1} of the function"):
        with_programs(Plan.of([Apply("resid_post", layers=1, program=mixes)]), FACTS)


def test_a_function_whose_module_cannot_be_sent_is_refused(tmp_path, monkeypatch):
    """The process would import the module anew, with other values in its variables."""
    (tmp_path / "with_a_lock.py").write_text(
        "import threading\nLOCK, SCALE = threading.Lock(), 1.0\ndef f(h):\n    with LOCK:\n        return h * SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import with_a_lock

    with_a_lock.SCALE = 3.0
    with pytest.raises(PlanError, match="cannot be sent"):
        with_programs(Plan((Apply("resid_post", layers=2, program=with_a_lock.f),)), FACTS)


def test_several_requests_of_one_call():
    given = lowered([[adds], [adds]], [LENGTH, 3], [2, 4])
    assert [said(each) for each in given] == [[steer(V)]] * 2


def test_the_second_call_asks_nothing(monkeypatch):
    def body(model):
        return model.layers_output[2][-1]

    first = found(body)

    def fails(*_):
        raise AssertionError

    monkeypatch.setattr(taping._Session, "ask", fails)
    assert found(body) is first
