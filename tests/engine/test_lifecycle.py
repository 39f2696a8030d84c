"""Lifecycle: closing, Ctrl-C, a killed client, aborts, preemption, n > 1, stops, 500 traces."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from clients import Client, check_preempted
from engines import alive
from oracle import Plain, close

from midstream import LanguageModel

if TYPE_CHECKING:
    from midstream import VLLM

FRANCE, EIFFEL = "The capital of France is", "The Eiffel Tower is in the city of"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.engine
def test_ctrl_c_leaves_the_engine_usable_and_then_nothing_behind(client: Callable[..., Client]) -> None:
    """Terminals and notebooks send SIGINT to the whole group. The first is caught by the script, the second ends it."""
    script = client("interrupt")
    script.wait_for("first")
    os.killpg(script.process.pid, signal.SIGINT)
    script.wait_for("second", 60)
    assert script.output.read_text().splitlines() == ["interrupted", "clean Paris False"]
    segments = script.shared_memory()
    assert segments and script.sockets() and len(script.processes()) > 1  # what is looked for below is seen here
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.process.wait(45) != 0  # 4 s on an idle machine
    assert "results channel" not in (script.directory / "errors").read_text()
    assert "KeyboardInterrupt" in (script.directory / "errors").read_text()
    assert script.all_ended()
    assert not segments & set(os.listdir("/dev/shm"))
    assert not script.sockets()


@pytest.mark.engine
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="SIGKILL"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.matrix),  # the client has no handler for it
    ],
)
def test_a_killed_client_takes_its_workers_with_it(client: Callable[..., Client], how: signal.Signals) -> None:
    script = client("kill", is_forked=False)  # and its processes are spawned, as users have them
    script.wait_for("first")
    segments, (made,) = script.shared_memory(), script.directory.glob("midstream-*")
    assert segments and len(script.processes()) > 1
    assert made.stat().st_mode & 0o777 == 0o700
    script.process.send_signal(how)
    script.process.wait()
    assert script.all_ended()
    assert not segments & set(os.listdir("/dev/shm"))
    assert not script.sockets() and not made.exists()


@pytest.mark.engine
def test_an_engine_that_is_forgotten_ends_and_is_freed(client: Callable[..., Client]) -> None:
    script = client("drop", is_forked=False)  # its frame must be the one that imports vLLM
    script.wait_for("dropped")
    assert script.output.read_text().split() == ["freed"]
    assert script.all_but_the_client_ended()
    assert not script.sockets() and not list(script.directory.glob("midstream-*"))


@pytest.mark.matrix  # test_apart.py preempts traces, and test_plan_differential.py plans
@pytest.mark.engine
def test_preempted_requests_are_as_if_they_had_run_alone(client: Callable[..., Client]) -> None:
    """Recomputed positions carry the edits that were made to them, also those of a body that is done."""
    check_preempted(client("preempt"), "steer_every_step", "steer_the_prompt", "choose_tokens", "steered_by_two")


# On the shared engine.


def interrupt_when(mark: Path) -> threading.Thread:
    """Sends this process SIGINT as soon as the file is there."""

    def wait() -> None:
        while not mark.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.engine
def test_an_interrupted_trace_is_taken_off_the_engine(engine: VLLM, plain: Plain, tmp_path: Path) -> None:
    mark, before = tmp_path / "begun", engine.gauges()[0]["traced_steps"]
    thread = interrupt_when(mark)
    with pytest.raises(KeyboardInterrupt):
        with engine.trace(max_tokens=400, **GREEDY) as tracer:
            for _ in range(20):  # more than run at once
                with tracer.invoke(FRANCE):
                    for step in tracer.iter[:]:
                        engine.layers_output[3] += 0.0
                        if step == 3:
                            mark.touch()
    thread.join()
    assert not alive(engine)
    assert engine.gauges()[0]["traced_steps"] - before < 390
    with engine.trace(FRANCE, temperature=0.0):
        hidden = engine.layers_output[3].save()
    close(hidden, plain.run(FRANCE).sites["resid_post", 3])


def test_ctrl_c_in_a_body_is_the_callers(hf: LanguageModel, plain: Plain) -> None:
    """In process, the body runs on the thread that a KeyboardInterrupt comes to: it is no error of the body's."""
    with pytest.raises(KeyboardInterrupt) as caught:
        with hf.trace(FRANCE):
            signal.raise_signal(signal.SIGINT)
    assert type(caught.value) is KeyboardInterrupt
    with hf.trace(FRANCE):
        hidden = hf.layers_output[3].save()
    close(hidden, plain.run(FRANCE).sites["resid_post", 3])


@pytest.mark.engine
def test_each_of_n_samples_has_a_body_of_its_own(engine: VLLM, plain: Plain) -> None:
    with engine.trace(FRANCE, max_tokens=8, n=3, seed=1, temperature=1.5, ignore_eos=True) as tracer:
        hidden = engine.layers_output[3].save()
        ids = list().save()
        for _ in tracer.iter[:]:
            ids.append(engine.samples.item())
    samples = [list(sample.token_ids) for sample in tracer.result.outputs]
    assert ids == samples and len(set(map(tuple, samples))) == 3
    assert len(hidden) == 3
    for one in hidden:
        close(one, plain.run(FRANCE).sites["resid_post", 3])


@pytest.mark.engine
def test_samples_and_invokes_count_together_at_a_barrier(engine: VLLM, plain: Plain) -> None:
    """A trace that must be in one step waits for as many requests as it has, every sample counted."""
    with engine.trace(max_tokens=2, n=2, temperature=1.0) as tracer:
        barrier = tracer.barrier(4)
        with tracer.invoke(FRANCE):
            barrier()
            one = engine.layers_output[3].save()
        with tracer.invoke(EIFFEL):
            barrier()
            other = engine.layers_output[3].save()
    for hidden, prompt in ((one, FRANCE), (other, EIFFEL)):
        assert len(hidden) == 2
        close(hidden[1], plain.run(prompt).sites["resid_post", 3])


@pytest.mark.engine
@pytest.mark.parametrize("stop", ["eos", "token", "length"])
def test_the_body_sees_no_step_past_the_end(engine: VLLM, stop: str) -> None:
    eos = engine.tokenizer.eos_token_id
    last = eos if stop == "eos" else 700
    params: dict[str, Any] = {"stop_token_ids": [700], "ignore_eos": True} if stop == "token" else {}
    params |= {"max_tokens": 5 if stop == "length" else 50}
    with engine.trace(FRANCE, temperature=0.0, **params) as tracer:
        ids = list().save()
        for step in tracer.iter[:]:
            if step == 4:
                engine.logits[0, last] += 1000.0
            ids.append(engine.samples.item())
    (sample,) = tracer.result.outputs
    assert ids == list(sample.token_ids) and len(ids) == 5
    assert (ids[-1] == last) and sample.finish_reason == ("length" if stop == "length" else "stop")


@dataclass
class Held:
    """What a process holds: tensors, objects of any kind, and megabytes once the allocator has returned what is free."""

    tensors: int
    objects: int
    megabytes: float

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        rollup = Path("/proc/self/smaps_rollup").read_text()
        pss = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        objects = gc.get_objects()
        return cls(sum(issubclass(type(each), torch.Tensor) for each in objects), len(objects), pss / 1000)


def growths(model: VLLM, windows: int, keep: list[Any] | None = None) -> list[Held]:
    """What the worker and this process together gain in each window of 20 traces, 100 requests. `keep` takes one save a trace."""
    sizes = []
    for window in range(windows + 1):
        for _ in range(20 if window else 2):
            with model.trace(max_tokens=2, **GREEDY) as tracer:
                for prompt in (FRANCE, EIFFEL, FRANCE, EIFFEL, FRANCE):
                    with tracer.invoke(prompt):
                        every = [model.layers_output[i].save() for i in range(model.num_layers)].save()
                        model.layers_output[7] += 0.1
            assert [len(each) for each in every] == [model.num_layers] * 5
            if keep is not None:
                keep.append(every[-1][0])
        del tracer, every
        with model.trace(FRANCE, temperature=0.0) as tracer:
            worker = vars(Held.now()).save()
        del tracer
        here = vars(Held.now())
        sizes.append({name: here[name] + worker[name] for name in here})
        del worker, here
    return [Held(**{name: b[name] - a[name] for name in a}) for a, b in itertools.pairwise(sizes)]


def leaks(grown: list[Held]) -> bool:
    """Whether every window leaves an object of each trace, or half of the 7 MB that it saves. Caches and allocators grow in some alone."""
    return min(each.objects for each in grown) >= 20 or min(each.megabytes for each in grown) > 3.5


@pytest.mark.engine
def test_memory_is_flat_over_500_requests(engine: VLLM) -> None:
    """C10."""
    receiver = engine._connection.receiver
    assert receiver is not None
    before = receiver.dropped  # of requests that other tests gave up
    assert not leaks(grown := growths(engine, 5)), grown
    assert not alive(engine)
    assert receiver.open_mailboxes == 0 and receiver.dropped == before


@pytest.mark.matrix
@pytest.mark.engine
def test_one_save_kept_of_every_trace_is_seen_as_a_leak(engine: VLLM) -> None:
    """Else the test above would prove nothing."""
    assert leaks(grown := growths(engine, 2, keep=[])), grown


@pytest.mark.engine
def test_a_compiled_engine_is_itself_again_after_traces(compiled: VLLM, plain: Plain) -> None:
    def outputs() -> list[Any]:
        made = compiled.generate([FRANCE, EIFFEL], max_tokens=24, logprobs=3, **GREEDY)
        return [
            (o.outputs[0].token_ids, [{t: p.logprob for t, p in step.items()} for step in o.outputs[0].logprobs])
            for o in made
        ]

    def counts() -> tuple[int, int]:
        gauges = compiled.gauges()[0]
        return gauges["traced_steps"], gauges["uncompiled_steps"]

    baseline, (traced, uncompiled) = outputs(), counts()
    assert counts() == (traced, uncompiled)
    with compiled.trace(FRANCE, max_tokens=4, **GREEDY) as tracer:
        down = compiled.model.layers[3].mlp.down_proj.output[0].save()  # a module that is not a site
        for _ in tracer.iter[:]:
            compiled.mlps_output[3] = torch.zeros_like(compiled.mlps_output[3])
    edits = {("mlp_out", 3): torch.zeros_like}
    assert list(tracer.result.outputs[0].token_ids) == plain.generate(FRANCE, 4, edits)
    close(down, plain.run(FRANCE).sites["mlp_out", 3])
    assert counts() == (traced + 4, uncompiled + 4)
    assert outputs() == baseline
    assert counts() == (traced + 4, uncompiled + 4)
