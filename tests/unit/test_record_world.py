"""What acts on the world outside ends the recording of a body before it acts, and the caller's variables stay as they are (rows L2, L6).

Row L1.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import contextvars
import datetime
import functools
import importlib
import io
import itertools
import locale
import logging
import os
import pathlib
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from recorded import FIND, LENGTH, WIDTH, V, checked, found, lowered, planned, said, steer

from midstream.errors import TraceError
from midstream.lowering import taping
from midstream.lowering.tiers import Tier
from midstream.trace import saves


def state_of_the_world():
    """What code may change in this process."""
    return {
        "python's random numbers": random.getstate(),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "numpy's random numbers": str(np.random.get_state()),
        "threads": len(sys._current_frames()),
        **{name: each for name, each in os.environ.items() if not name.startswith(("PYTEST_", "TORCH"))},
        "folder": os.getcwd(),
        "profiler": sys.getprofile(),
        "path": list(sys.path),
        "switches": sys.getswitchinterval(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "torch's prints": vars(torch._tensor_str.PRINT_OPTS).copy(),
        "numpy's errors": np.geterr(),
        "excepthook": sys.excepthook,
        "builtins": len(vars(builtins)),
    }


@pytest.fixture(autouse=True)
def _the_world_stays_as_it_is():
    """Code is recorded as for the user's calls, in a process of its own."""
    token = FIND.set(taping.lowered_requests)
    before = state_of_the_world()
    yield
    FIND.reset(token)
    after = state_of_the_world()
    assert {name: after.get(name) for name in before | after if after.get(name) != before.get(name)} == {}


# The world outside.


def test_random_numbers_end_the_recording():
    """The fixture above compares the states of their generators."""

    def by_torch(model):
        model.layers_output[2] += torch.randn(WIDTH)

    def like_a_value(model):
        model.layers_output[2] += torch.rand_like(model.layers_output[2])

    def in_place(model):
        model.layers_output[2] += torch.empty(WIDTH).uniform_()

    def of_a_value(model):
        return torch.bernoulli(model.layers_output[2].sigmoid())

    def a_permutation(model):
        return torch.randperm(3)

    def dropout(model):
        model.layers_output[2] += torch.nn.functional.dropout(V, 0.5)

    def dropout_of_a_value(model):
        return torch.nn.functional.dropout(model.layers_output[2], 0.5)

    def a_new_layer(model):
        return torch.nn.Linear(WIDTH, 2)(model.layers_output[2])

    def sampled(model):
        return torch.multinomial(model.logits.softmax(-1), 1)

    def seeded(model):
        torch.manual_seed(0)

    def a_generator(model):
        model.layers_output[2] += torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))

    def by_random(model):
        model.layers_output[2] += random.random() * V

    def chosen(model):
        model.layers_output[random.choice([1, 2])] += V

    def shuffled(model):
        random.shuffle([1, 2, 3])

    def python_seeded(model):
        random.seed(0)

    def by_numpy(model):
        model.layers_output[2] += float(np.random.randn()) * V

    def numpy_seeded(model):
        np.random.seed(0)

    def numpy_shuffled(model):
        np.random.shuffle([1, 2, 3])

    def a_new_generator(model):
        model.layers_output[2] += float(np.random.default_rng().normal()) * V

    def a_legacy_generator(model):
        model.layers_output[2] += float(np.random.RandomState().randn()) * V

    def by_secrets(model):
        return secrets.token_hex(4)

    def by_uuid(model):
        return str(uuid.uuid4()), str(uuid.uuid1())

    def by_the_system(model):
        return os.urandom(3)

    for body in [body for body in locals().values() if callable(body)]:
        given = found(body)
        assert given.tier is Tier.FORWARD and not given.edits, body.__name__


def test_a_seed_that_is_set_already_ends_the_recording():
    def by_random(model):
        random.seed(0)

    def by_numpy(model):
        np.random.seed(0)

    for body in (by_random, by_numpy) * 2:
        assert found(body).tier is Tier.FORWARD


def test_numbers_of_a_seeded_generator_are_what_they_always_are():
    generator = np.random.default_rng(1)

    def made_in_the_body(model):
        model.layers_output[2] += float(np.random.default_rng(3).normal()) * V

    def the_callers(model):
        model.layers_output[2] += float(generator.normal()) * V

    expected = float(np.random.default_rng(3).normal())
    assert said(planned(made_in_the_body)[0]) == [steer(expected * V)]
    assert said(planned(the_callers)[0]) == [steer(float(np.random.default_rng(1).normal()) * V)]
    assert all(each.tier is Tier.FORWARD for each in lowered([[the_callers]] * 2, [LENGTH] * 2, [2, 2]))


def test_what_acts_on_the_world_or_depends_on_it_ends_the_recording_before(tmp_path):
    path, free = str(tmp_path / "made"), os.environ.get("HOME")
    log, ran = logging.getLogger("recorded"), []
    log.propagate = False

    def sleeps(model):
        time.sleep(100)

    def a_clock(model):
        return time.time(), time.perf_counter(), time.monotonic()

    def a_date(model):
        return datetime.datetime.now().isoformat()

    def by_the_hour(model):
        model.layers_output[2] += (2 if datetime.datetime.now().year > 2000 else 3) * V

    def by_the_day(model):
        model.layers_output[2] += (datetime.date.today().year > 2000) * V

    def by_local_time(model):
        model.layers_output[2] += (time.localtime().tm_year > 2000) * V

    def by_secrets(model):
        model.layers_output[2] += secrets.randbelow(1) * V

    def by_bytes_of_the_system(model):
        model.layers_output[2] += len(os.urandom(3)) * V

    def opens(model):
        with open(path, "w") as file:
            file.write("x")

    def writes_by_pathlib(model):
        pathlib.Path(path).write_text("x")

    def makes_a_folder(model):
        os.makedirs(path)

    def lists_a_folder(model):
        return os.listdir("/")

    def reads_a_file(model):
        return open(__file__).read()

    def saves(model):
        torch.save(V, path)

    def saves_an_array(model):
        np.save(path, np.ones(3))

    def loads(model):
        return torch.load(path)

    def a_socket(model):
        socket.create_connection(("127.0.0.1", 9), timeout=1)

    def the_host(model):
        return socket.gethostname()

    def a_process(model):
        subprocess.run(["touch", path])

    def a_shell(model):
        os.system(f"touch {path}")

    def a_fork(model):
        if os.fork() == 0:
            os._exit(0)

    def its_number(model):
        return os.getpid()

    def a_thread(model):
        threading.Thread(target=open, args=(path, "w")).start()

    def a_pool(model):
        with ThreadPoolExecutor() as pool:
            pool.submit(open, path, "w")

    def the_environment(model):
        os.environ["MADE_BY_A_RECORDING"] = "1"

    def leaves_the_environment(model):
        del os.environ["HOME"]

    def the_folder(model):
        os.chdir("/")

    def leaves(model):
        sys.exit(1)

    def the_default_dtype(model):
        torch.set_default_dtype(torch.float64)

    def a_profiler(model):
        sys.setprofile(None)
        open(path, "w").close()

    def a_tracer(model):
        sys.settrace(lambda *_: None)

    def logs(model):
        log.warning("x")

    def warns(model):
        warnings.warn("x", stacklevel=1)

    def real_output(model):
        sys.__stdout__.write("x")

    def a_files_number(model):
        os.write(1, b"x")

    def compiled_text(model):
        exec("import os; os.system('touch ' + path)", {"path": path})

    def after_an_import_that_fails(model):
        with contextlib.suppress(ImportError):
            import there_is_no_such_module  # noqa: F401
        open(path, "w").close()

    def within_a_sort(model):
        sorted([1, 2], key=lambda _: os.getpid())

    def in_another_function(model):
        def inner():
            yield open(path, "w")  # noqa: SIM115

        return [*inner()]

    assert free and not ran
    for body in [body for body in locals().values() if callable(body)]:
        given = found(body)
        # What a recording has changed, or that two of them differ, has no line.
        line = 0 if body in (a_tracer, the_default_dtype) else body.__code__.co_firstlineno
        assert given.tier is Tier.FORWARD and not given.edits, body.__name__
        assert int(given.reason.split()[1].rstrip(":")) >= line, (body.__name__, given.reason)
        assert not os.path.exists(path), body.__name__


@pytest.mark.parametrize("how", ["partial", "map", "class", "array", "tensor"])
def test_a_file_is_not_made_by_a_call_of_a_call(tmp_path, how):
    path = str(tmp_path / "made")

    def by_partial(model):
        functools.partial(open, path, "w")().close()

    def by_map(model):
        for file in map(open, [path], ["w"]):
            file.close()

    def by_class(model):
        io.FileIO(path, "w").close()

    def by_array(model):
        np.ones(3).tofile(path)

    def by_tensor(model):
        torch.from_file(path, shared=True, size=8)

    bodies = {"partial": by_partial, "map": by_map, "class": by_class, "array": by_array, "tensor": by_tensor}
    given = found(bodies[how])
    assert not os.path.exists(path) and given.tier is Tier.FORWARD


@pytest.mark.parametrize("how", ["random", "starmap", "time", "default"])
def test_clocks_and_random_numbers_are_seen_in_a_call_of_a_call(how):
    def by_partial(model):
        model.layers_output[2] += functools.partial(random.random)() * V

    def by_starmap(model):
        model.layers_output[2] += sum(itertools.starmap(random.random, [()])) * V

    def by_a_clock(model):
        model.layers_output[2] += (functools.partial(time.time)() > 0) * V

    def by_a_default(model):
        stamps = collections.defaultdict(time.time)
        model.layers_output[2] += (stamps["now"] > 0) * V

    before = random.getstate()
    try:
        bodies = {"random": by_partial, "starmap": by_starmap, "time": by_a_clock, "default": by_a_default}
        assert found(bodies[how]).tier is Tier.FORWARD and random.getstate() == before
    finally:
        random.setstate(before)


SETTINGS = {
    "path": (lambda: sys.path.append("/nowhere"), lambda: sys.path[-1] == "/nowhere", lambda: sys.path.remove("/nowhere")),
    "prints": (
        lambda: torch.set_printoptions(precision=2),
        lambda: torch._tensor_str.PRINT_OPTS.precision == 2,
        lambda: torch.set_printoptions(precision=4),
    ),
    "errors": (lambda: np.seterr(all="raise"), lambda: np.geterr()["over"] == "raise", lambda: np.seterr(all="warn", under="ignore")),
    "warnings": (
        lambda: warnings.simplefilter("once"),
        lambda: warnings.filters[0][0] == "once",
        lambda: warnings.filters.pop(0),
    ),
    "threads": (
        lambda: threading.Thread(target=print).start(),
        lambda: threading.active_count() > len(sys._current_frames()),
        lambda: threading._limbo.clear(),
    ),
    "switches": (lambda: sys.setswitchinterval(0.1), lambda: sys.getswitchinterval() > 0.05, lambda: sys.setswitchinterval(0.005)),
    "locale": (
        lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
        lambda: locale.setlocale(locale.LC_NUMERIC) == "C.UTF-8",
        lambda: locale.setlocale(locale.LC_NUMERIC, "C"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_process_stay(setting):
    change, is_changed, undo = SETTINGS[setting]

    def body(model):
        change()

    try:
        found(body)
        assert not is_changed()
    finally:
        while is_changed():
            undo()


def test_what_is_printed_is_held_back(capsys):
    def body(model, tracer):
        for step in tracer.iter[:]:
            print("step", step)
            print(model.layers_output[2].shape, file=sys.stderr)
            sys.stdout.write("written")
            model.layers_output[2] += V

    given = checked(body, steps=1)
    capsys.readouterr()  # of the plain run
    assert said(given) == [steer(V)] and given.tier is Tier.BEHIND
    assert found(body).tier is Tier.BEHIND
    assert capsys.readouterr() == ("", "")


# Variables of the caller.


def test_the_callers_variables_are_as_they_were():
    vector, array, listed, named, count = V.clone(), np.ones(WIDTH), [1, [2]], {"a": V.clone()}, 0
    grown = collections.Counter()

    class Box:
        total = 0
        seen: list = []

        def __init__(self):
            self.v = V.clone()

    box = Box()

    def body(model, seen=[], v=V.clone()):  # noqa: B006, B008
        nonlocal count, listed
        count += 1
        vector.mul_(2)
        array[:] = 0
        listed[1].append(3)
        listed = []
        named["a"] += 1
        named["b"] = 1
        grown.update("abc")
        Box.total += 1
        Box.seen.append(1)
        box.v += 1
        box.new = 3
        body.calls = 1
        seen.append(1)
        v *= 2
        model.layers_output[2] += vector + float(array.sum()) + len(seen) * v

    given = found(body)
    assert said(given) == [steer(4 * V)]
    assert torch.equal(vector, V) and array.sum() == WIDTH and listed == [1, [2]] and count == 0
    assert named.keys() == {"a"} and torch.equal(named["a"], V) and not grown
    assert (Box.total, Box.seen, vars(box).keys()) == (0, [], {"v"}) and torch.equal(box.v, V)
    assert not hasattr(body, "calls") and body.__defaults__[0] == [] and torch.equal(body.__defaults__[1], V)


MODULE = """
import torch

V = torch.ones(8)
SEEN = []
COUNT = 0


def probe(model):
    V.div_(V.norm())
    SEEN.append(1)
    model.layers_output[2] += V


def counts(model):
    global COUNT
    COUNT += 1
    if COUNT > 2:
        model.layers_output[2] += V
"""


@pytest.mark.parametrize("name", ["probe", "counts"])
def test_variables_of_the_callers_modules_are_as_they_were(name, tmp_path, monkeypatch):
    home = f"module_of_{name}_that_is_recorded"
    (tmp_path / f"{home}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(home)
    for _ in range(2):
        given = found(getattr(module, name))
        assert torch.equal(module.V, torch.ones(8)) and not module.SEEN and module.COUNT == 0
        assert given.tier is Tier.FORWARD or said(given) == ([steer(torch.ones(8) / 8**0.5)] if name == "probe" else [])


def test_a_copied_object_that_ends_does_not_act():
    ended = []
    sys.modules[__name__].ENDED = ended

    class Noisy:
        def __del__(self):
            getattr(sys.modules.get("test_record_world"), "ENDED", []).append(1)

    noisy = Noisy()

    def body(model):
        return noisy is None

    found(body)
    assert not ended


def test_a_context_variable_is_named(tmp_path, monkeypatch):
    """Its value belongs to the caller's context. A module that has one goes to the engine by name."""
    (tmp_path / "with_a_context.py").write_text(
        "import torch\nfrom contextvars import ContextVar\nFACTOR = ContextVar('factor', default=2.0)\n"
        "def scaled(h):\n    return h * FACTOR.get()\ndef rectified(h):\n    return torch.ops.aten.relu(h)\n"
        "def held(h, op=torch.ops.aten.relu.default, of=torch.ops.aten):\n    return of.neg(op(h))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("with_a_context")

    def scales(model):
        model.layers_output[2] = module.scaled(model.layers_output[2])

    given = found(scales)
    assert given.tier is Tier.FORWARD
    assert "it uses FACTOR, a ContextVar, which cannot be sent, so the engine imports its module" in given.reason
    factor = contextvars.ContextVar("factor", default=2.0)

    def uses_its_own(model):
        model.layers_output[2] *= factor.get()

    with pytest.raises(TraceError, match=r"uses a value, factor, that cannot be sent to the engine.*ContextVar"):
        found(uses_its_own)
    rectified, held = module.rectified, module.held

    def by_torch_ops(model):
        model.layers_output[1] = rectified(model.layers_output[1])
        model.layers_output[2] = held(model.layers_output[2])
        model.layers_output[3] = torch.ops.aten.tanh.default(model.layers_output[3])

    planned(by_torch_ops)


def test_the_value_of_an_installed_packages_context_variable_is_that_of_another_process(tmp_path, monkeypatch):
    """As in the engine: the value that the caller's context has stays there."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed_with_a_context.py").write_text(
        "from contextvars import ContextVar\nFACTOR = ContextVar('factor', default=2.0)\ndef factor():\n    return FACTOR.get()\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(saves, "_INSTALLED", (*saves._INSTALLED, str(tmp_path)))
    module = importlib.import_module("installed_with_a_context")
    module.FACTOR.set(3.0)

    def scales(model):
        model.layers_output[2] += module.factor() * V

    assert said(found(scales)) == [steer(2 * V)]
