"""CUDA graphs by what acts, on a GPU and on one model runner: prints one line a check and exits 1 on a failure.

python tests/gpu/check_graphs.py --runner v2 --float32

Three other engines give the answers: a stock one for plain requests, an uncompiled one for plans, and one with room for all graphs, for
plans that change. They run in processes of their own. The engine under test runs in this process, so that the graphs and PyTorch's memory
can be looked at. With --float32, tokens have to be equal; without it, an engine that compiles rounds in other places than an uncompiled
one, and most of them have to be.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

PROMPT, OTHER = "The Eiffel Tower is in the city of", "The capital of France is"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
STEPS, SIZES = 16, (1, 2, 3, 8)  # tokens of a request; batches of so many plain requests
LIMIT = 32 << 20  # bytes of graphs
SEATS = 8  # requests at a time
END_SECONDS = 120  # within which the engine and this process have to end
CHANGES = 48  # batches of plans that differ, over and over
Rows = list[tuple[int, float]]  # a request's tokens, each with its logprob


def vector(width: int, seed: int = 1) -> Any:
    import torch

    v = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return v * (40 / v.norm())


def plan_at(site: str, width: int) -> list[Any]:
    """Steers one layer, and captures all positions at three: also the steps between which a graph is recorded."""
    from midstream import Capture, Steer

    steer = Steer(site, layers=3, vector=vector(width))
    return [steer, Capture(site, layers=[2, 3, 7], positions="all", when="after")]


def plain_batches(llm: Any) -> dict[int, list[Rows]]:
    """By size, what a batch of plain requests generates."""
    from vllm import SamplingParams

    found = {}
    for size in SIZES:
        prompts = [[PROMPT, OTHER][i % 2] + " and" * (i // 2) for i in range(size)]
        outputs = llm.generate(prompts, SamplingParams(**GREEDY, max_tokens=STEPS, logprobs=1), use_tqdm=False)
        found[size] = [rows(output) for output in outputs]
    return found


def rows(output: Any) -> Rows:
    (only,) = output.outputs
    return [(token, each[token].logprob) for token, each in zip(only.token_ids, only.logprobs, strict=True)]


def arriving_and_leaving(llm: Any, width: int, planned: bool) -> list[list[int]]:
    """Three times as many requests as there are seats, of many lengths. Every third one is plain; the others steer at one site or two."""
    from vllm import SamplingParams

    from midstream import Steer
    from midstream.settings import BUILDABLE

    prompts, given = [], []
    pairs = itertools.cycle(itertools.combinations(BUILDABLE, 2))
    for i in range(3 * SEATS):
        sites = [] if i % 3 == 0 else [BUILDABLE[i % 5]] if i % 3 == 1 else next(pairs)
        plan = [Steer(site, layers=[1 + i % 6], vector=vector(width, i), scale=0.5) for site in sites]
        extra = {"extra_args": {"midstream": plan}} if plan and planned else {}
        prompts.append(f"{[PROMPT, OTHER][i % 2]}{' and' * (i % 5)}")
        given.append(SamplingParams(**GREEDY, max_tokens=4 + 7 * i % 37, **extra))
    outputs = llm.generate(prompts, given, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def program_plan(width: int) -> list[Any]:
    """A program with a matrix, a gate and a captured program."""
    import torch

    from midstream import Apply, Capture, Probe, Steer, When

    matrix = torch.randn(width, 24, generator=torch.Generator().manual_seed(5)) / width**0.5
    bend = Apply("mlp_out", layers=[2, 5], program=lambda h: h + 0.5 * (h @ matrix.to(h)).tanh() @ matrix.T.to(h))
    probe = Probe("resid_post", layer=3, weight=vector(width, 7), name="p")
    gate = When(probe, above=0.0, then=[Steer("resid_post", layers=3, vector=vector(width, 8))])
    return [bend, gate, Capture("mlp_out", layers=[2, 5], positions="all", when="after")]


def changing(model: Any, number: int) -> list[list[int]]:
    """Tokens of one to eight requests whose plans act at one to three sites, some of them by programs."""
    from midstream import Steer
    from midstream.settings import BUILDABLE

    width, size = model.hidden_size, 1 + number * 5 % SEATS
    sites = [each for count in (1, 2, 3) for each in itertools.combinations(BUILDABLE, count)][number * 7 % 25]
    plans = [
        [Steer(site, layers=[(number + i) % 7], vector=vector(width, number * 16 + i), scale=0.3) for site in sites]
        for i in range(size)
    ]
    if number % 3 == 0:
        plans[-1] += program_plan(width)
    outputs = model.generate([PROMPT, OTHER] * size, plan=[*plans, *[None] * size], max_tokens=6 + number % 5, **GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def spoil_freed_memory() -> int:
    """Fill the memory that PyTorch's allocator holds as free with NaN, in every pool. Returns its bytes."""
    import torch

    torch.cuda.synchronize()
    count = 0
    for segment in torch.cuda.memory_snapshot():
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                there = SimpleNamespace(
                    __cuda_array_interface__={
                        "shape": (block["size"],),
                        "typestr": "|u1",
                        "data": (at, False),
                        "version": 3,
                    }
                )
                torch.as_tensor(there, device="cuda").fill_(255)
                count += block["size"]
            at += block["size"]
    torch.cuda.synchronize()
    return count


def write_answers(part: str, path: str, engine: dict[str, Any]) -> None:
    """What the stock engine, or the uncompiled one, says."""
    import torch

    from midstream import VLLM, demo_model
    from midstream.settings import BUILDABLE

    if part == "stock":
        from vllm import LLM

        llm = LLM(demo_model(), **engine, max_num_seqs=SEATS)
        width = llm.llm_engine.vllm_config.model_config.get_hidden_size()
        torch.save({"plain": plain_batches(llm), "alone": arriving_and_leaving(llm, width, planned=False)}, path)
        return
    if part == "roomy":
        with VLLM(demo_model(), **engine, max_num_seqs=SEATS, graph_bytes=8 << 30) as model:
            torch.save({"changing": [changing(model, number) for number in range(CHANGES)]}, path)
        return
    with VLLM(demo_model(), **{**engine, "enforce_eager": True}, max_num_seqs=SEATS) as model:
        sites = {site: planned(model, plan_at(site, model.hidden_size)) for site in BUILDABLE}
        sites["programs"] = planned(model, program_plan(model.hidden_size))
        together = arriving_and_leaving(model.engine, model.hidden_size, planned=True)
        torch.save({"sites": sites, "together": together}, path)


def planned(model: Any, plan: list[Any]) -> tuple[list[list[int]], dict[int, Any]]:
    """Tokens of four requests, of which the first and the third have a plan, and what the first one captures by layer."""
    outputs = model.generate([PROMPT, OTHER] * 2, plan=[plan, None] * 2, max_tokens=STEPS, **GREEDY)
    captured = {layer: rows_TH for (_, layer), rows_TH in outputs[0].captures.items()}
    return [list(output.outputs[0].token_ids) for output in outputs], captured


class Checks:
    """The checks, each a method `check_*` on one engine, in the order of their names."""

    def __init__(self, model: Any, answers: dict[str, Any], exact: bool, graphs: bool, seconds: float) -> None:
        self.model, self.answers, self.exact, self.graphs, self.seconds = model, answers, exact, graphs, seconds
        self.tolerance = 2e-4 if exact else 6e-2
        core = model.engine.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        self.own = self.graphs_in_place()
        self.before = plain_batches(model.engine)

    def graphs_in_place(self) -> dict[Any, Any]:
        """What vLLM holds graphs in, and the dictionary that each of them uses."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        found = {wrapper: wrapper.concrete_cudagraph_entries for wrapper in CUDAGraphWrapper._all_instances}
        manager = getattr(self.worker.model_runner, "cudagraph_manager", None)  # the V2 runner's
        return found | ({manager: manager.graphs} if manager is not None else {})

    def displaced(self) -> list[str]:
        """The holders of graphs that do not use vLLM's own, and the set that they use."""
        held = self.worker._runner.graphs
        sets = held._sets.items() if held is not None else ()
        found = []
        for holder, own in self.own.items():
            if (now := self.graphs_in_place()[holder]) is not own:
                whose = [sorted(acting) for acting, each in sets if each._graphs.get(holder) is now]
                kind = getattr(getattr(holder, "runtime_mode", None), "name", "FULL")
                batches = sorted(str(getattr(each, "num_tokens", each)) for each in now)
                found.append(f"{type(holder).__name__} ({kind}): graphs of {whose or 'a dropped set'} for {batches}")
        return found

    def after_each(self) -> None:
        """Between two calls vLLM's own graphs are in place, and plain requests are bit for bit as at the start."""
        if (held := self.worker._runner.graphs) is not None:
            self.worker._runner.prepare(self.worker._runner.watched)
            assert not self.displaced(), "not vLLM's own graphs"
            assert not held._impossible, "graphs that could not be recorded"
        assert plain_batches(self.model.engine) == self.before, "plain requests"

    def after_failure(self) -> str:
        """What acts, and which graphs there are; the requests that are left are aborted."""
        engine = self.model.engine.llm_engine
        left = list(engine.output_processor.request_states)
        lines = [f"requests left: {left}", f"gauges: {self.model.gauges()[0]}"]
        if (held := self.worker._runner.graphs) is not None:
            lines += [
                f"acting: {sorted(held.acting)}; in use: {sorted(held._used)}; watched: {self.worker._runner.watched!r}"
            ]
            displaced = self.displaced()
            lines += [f"displaced: {each}" for each in displaced[:3]] + [f"displaced in all: {len(displaced)}"]
            for name in ("_recorded", "_due", "_impossible"):
                keys = [(sorted(acting), kind, str(batch)) for acting, kind, batch in getattr(held, name)]
                lines.append(f"{name[1:]}: {keys}")
        with contextlib.suppress(Exception):
            engine.abort_request(left, internal=True)
        return "\n".join(f"        {line}" for line in lines)

    def gauge(self, name: str) -> int:
        return int(self.model.gauges()[0][name])

    @property
    def recorded(self) -> list[Any]:
        held = self.worker._runner.graphs
        return list(held._recorded) if held is not None else []

    def same(self, found: list[int], expected: list[int], what: Any) -> None:
        """Equal tokens; without --float32 the first ones."""
        until = len(expected) if self.exact else min(3, len(expected))
        assert found[:until] == expected[:until], (what, found, expected)

    def close(self, a: Any, b: Any, until: int) -> None:
        a, b = a[:until].float().cpu(), b[:until].float().cpu()
        difference = ((a - b).abs().max() / b.abs().max()).item()
        assert difference <= self.tolerance, f"relative difference {difference:.2e} over {self.tolerance:.0e}"

    def check_a_plain_requests_are_as_on_a_stock_engine(self) -> None:
        """And nothing is recorded for them."""
        stock = self.answers["plain"]
        furthest = 0.0
        for size in SIZES:
            for mine, theirs in zip(self.before[size], stock[size], strict=True):
                self.same([token for token, _ in mine], [token for token, _ in theirs], size)
                for (a, x), (b, y) in zip(mine, theirs, strict=True):
                    if a != b:
                        break
                    furthest = max(furthest, abs(x - y))
        print(f"        plain: bit for bit as stock: {self.before == stock}; logprobs differ by at most {furthest:.1e}")
        assert furthest <= (1e-4 if self.exact else 0.3)
        assert self.gauge("graph_recordings") == 0 and self.gauge("graphs") == 0

    def check_b_graphs_are_recorded_when_they_are_needed(self) -> None:
        """The first two steps of a batch do without; plain requests and a batch that has its graph have none recorded."""
        from midstream import Steer

        plan = [Steer("mlp_out", layers=[2], vector=vector(self.model.hidden_size))]

        def run(tokens: int, plan: Any = plan) -> list[int]:
            (output,) = self.model.generate([PROMPT], plan=plan, max_tokens=tokens, **GREEDY)
            return list(output.outputs[0].token_ids)

        counts = [self.gauge("graph_recordings")]
        found = []
        for tokens, given in ((2, plan), (8, plan), (8, plan), (8, None), (STEPS, plan)):
            found.append(run(tokens, given))
            counts.append(self.gauge("graph_recordings"))
        print(f"        recordings after each call: {counts}; graphs {[(sorted(k[0]), k[1]) for k in self.recorded]}")
        if self.graphs:
            assert counts[1] == counts[0] < counts[2] and counts[3] == counts[4]
            assert self.recorded and all(acting == {"mlp_out"} for acting, _, _ in self.recorded)
            each = self.gauge("graph_bytes") / len(self.recorded)
            print(f"        a graph counts for {each / 2**20:.2f} MiB")
        self.same(found[2], found[1], "recorded or not")
        self.same(found[4][:8], found[2], "recorded or not")

    def check_c_plans_at_each_site(self) -> None:
        """As on an uncompiled engine: without graphs, then with them; nothing leaves the compiled forward; neighbours are alone."""
        before, starts = self.gauge("off_graph_steps"), {}
        for site in self.answers["sites"]:
            for turn in range(3):
                begin = time.perf_counter()
                self.compare(site)
                starts[site, turn] = time.perf_counter() - begin
            if self.graphs and site != "programs":
                assert frozenset([site]) in {acting for acting, _, _ in self.recorded}
        assert self.gauge("off_graph_steps") == before
        took = {site: [round(1000 * starts[site, turn]) for turn in range(3)] for site in self.answers["sites"]}
        print(f"        milliseconds by site, three times: {took}")

    def compare(self, site: str) -> None:
        """Requests with the plan of a site, or with programs, are as on the uncompiled engine."""
        tokens, captured = self.answers["sites"][site]
        width = self.model.hidden_size
        found, rows_TH = planned(self.model, program_plan(width) if site == "programs" else plan_at(site, width))
        for mine, theirs in zip(found, tokens, strict=True):
            self.same(mine, theirs, site)
        differs = [a != b for a, b in zip(found[0], tokens[0], strict=True)]
        assert rows_TH.keys() == captured.keys()
        for layer, expected in captured.items():
            until = len(expected) - STEPS + 1 + (differs.index(True) if True in differs else STEPS - 1)
            self.close(rows_TH[layer], expected, until)

    def check_d_requests_arrive_and_leave(self) -> None:
        """Recordings in the middle of live requests leave all tokens as they are, those of plain requests and of planned ones."""
        before = self.gauge("graph_recordings")
        alone, together = self.answers["alone"], self.answers["together"]
        for _ in range(6):
            found = arriving_and_leaving(self.model.engine, self.model.hidden_size, planned=True)
            for i, mine in enumerate(found):
                self.same(mine, together[i], i)
                if i % 3 == 0:
                    self.same(mine, alone[i], i)
            self.after_each()
        recordings = self.gauge("graph_recordings") - before
        kinds = sorted({kind for _, kind, _ in self.recorded})
        print(f"        {recordings} recordings beside live requests; kinds of graphs held: {kinds}")
        assert not self.graphs or (recordings > 5 and kinds)

    def check_e_pieces_are_recorded_too(self) -> None:
        """Batches of prompts and tokens that come again: their pieces are replayed with the kernel in them."""
        from vllm import SamplingParams

        from midstream import Steer

        plan = [Steer("attn_out", layers=[2, 5], vector=vector(self.model.hidden_size), scale=0.5)]
        length = len(self.model.tokenizer(PROMPT)["input_ids"])
        given = SamplingParams(**GREEDY, max_tokens=1, extra_args={"midstream": plan})
        found = []
        for _ in range(9):  # its graphs may have been dropped before
            (output,) = self.model.engine.generate([PROMPT], given, use_tqdm=False)
            found.append(list(output.outputs[0].token_ids))
        assert found == [found[0]] * 9
        pieces = [key for key in self.recorded if key[1] == "PIECEWISE" and key[0] == {"attn_out"}]
        print(f"        prompt of {length} tokens: {[key[2] for key in pieces]}")
        assert not self.graphs or pieces

    def check_f_graphs_keep_within_their_bytes(self) -> None:
        """More sets and batches than there is room for: all right, within the limit, and no memory is lost."""
        import torch

        from midstream import Steer
        from midstream.settings import BUILDABLE

        width = self.model.hidden_size
        sets = [each for count in (1, 2, 3) for each in itertools.combinations(BUILDABLE, count)]
        free, found, most = [], {}, 0
        for turn in range(3):
            for number, sites in enumerate(sets):
                plan = [Steer(site, layers=[number % 7], vector=vector(width, number), scale=0.3) for site in sites]
                size = 1 + number % 4
                outputs = self.model.generate([PROMPT] * size, plan=plan, max_tokens=6, **GREEDY)
                for output in outputs:
                    tokens = list(output.outputs[0].token_ids)
                    self.same(tokens, found.setdefault(sites, tokens), (sites, turn))
                most = max(most, self.gauge("graphs"))
                assert self.gauge("graph_bytes") <= LIMIT
            if self.graphs:
                torch.cuda.synchronize()
                free.append((torch.cuda.mem_get_info()[0] >> 20, torch.cuda.memory_reserved() >> 20))
        print(f"        at most {most} graphs of {len(sets)} sets; {self.gauge('graph_recordings')} recordings")
        print(f"        MiB free on the device and reserved by PyTorch after each turn: {free}")
        if self.graphs:
            assert 0 < most < self.gauge("graph_recordings")
            assert free[2][1] - free[0][1] <= 32 and free[0][0] - free[2][0] <= 64

    def check_g_freed_memory_may_hold_anything(self) -> None:
        """Graphs are dropped and plans unloaded; freed memory is filled with NaN and given back. Every answer stays."""
        import torch

        if not self.graphs:
            return
        held = self.worker._runner.graphs
        for turn, part in enumerate((1.0, 0.5, 0.0, 1.0)):
            plain_batches(self.model.engine)  # the worker hears of the last planned requests' end
            self.worker._runner.prepare(self.worker._runner.watched)
            keys = list(held._recorded)
            for key in keys[: round(part * len(keys))]:
                held._drop(key)
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved()
            spoilt = spoil_freed_memory()
            if turn != 2:
                torch.cuda.empty_cache()
            after = torch.cuda.memory_reserved()
            print(
                f"        {round(part * len(keys))} of {len(keys)} graphs dropped, {spoilt / 2**20:.1f} MiB filled, "
                f"{(before - after) / 2**20:.1f} MiB given back"
            )
            assert part < 1.0 or (self.gauge("graphs") == 0 == self.gauge("graph_bytes") and not held._sets)
            assert spoilt and after <= before
            assert plain_batches(self.model.engine) == self.before, "plain requests"
            for site in self.answers["sites"]:
                for _ in range(3):
                    self.compare(site)
            for number in range(6):
                assert changing(self.model, number) == self.answers["changing"][number] or not self.exact, number

    def check_gg_plans_that_change_all_the_time(self) -> None:
        """Graphs are dropped all the time, beside an engine that drops none; freed memory is filled with NaN meanwhile."""
        if not self.graphs:
            return
        end, turns, before = time.monotonic() + self.seconds, 0, self.gauge("graph_recordings")
        while time.monotonic() < end:
            for number, expected in enumerate(self.answers["changing"]):
                for mine, theirs in zip(changing(self.model, number), expected, strict=True):
                    self.same(mine, theirs, (turns, number))
                assert self.gauge("graph_bytes") <= LIMIT
            spoil_freed_memory()
            turns += 1
        print(f"        {turns * CHANGES} batches, {self.gauge('graph_recordings') - before} recordings")
        assert turns and self.gauge("graph_recordings") > before

    def check_h_a_trace_beside_a_plan(self) -> None:
        """The trace's code runs in the forward; the plan acts at another site of the same steps."""
        from midstream import Steer

        plan = [Steer("mlp_out", layers=[2], vector=vector(self.model.hidden_size), scale=0.5)]

        def halve(model: Any, tracer: Any) -> Any:
            found = []
            for _ in tracer.iter[:4]:
                model.layers_output[4][:] = model.layers_output[4].tanh() * 20
                found.append(model.logits.clone())
            return found

        alone = self.model.run(halve, OTHER, max_tokens=6, **GREEDY)
        for _ in range(2):
            self.model.plan = plan
            (steered,) = self.model.generate([PROMPT], max_tokens=6, **GREEDY)
            both = self.model.run(halve, OTHER, max_tokens=6, **GREEDY)
            self.model.plan = None
            assert len(both) == len(alone) == 4 and not both[0].equal(alone[0])
            (again,) = self.model.generate([PROMPT], plan=plan, max_tokens=6, **GREEDY)
            self.same(list(again.outputs[0].token_ids), list(steered.outputs[0].token_ids), "plan of all, or of one")

    def check_i_rows_are_captured_once_while_graphs_are_recorded(self) -> None:
        """The senders copy rows to the host on other streams and threads meanwhile. Every row is as on its own."""
        from midstream import Capture
        from midstream.settings import BUILDABLE

        for number, site in enumerate(BUILDABLE):
            plan = [Capture(site, positions="all"), Capture(BUILDABLE[number - 1], layers=[0], positions="all")]
            outputs = self.model.generate([PROMPT] * 5, plan=plan, max_tokens=40, **GREEDY)
            (alone,) = self.model.generate([PROMPT], plan=plan, max_tokens=40, **GREEDY)
            tokens = list(alone.outputs[0].token_ids)
            for output in outputs:
                self.same(list(output.outputs[0].token_ids), tokens, site)
                differs = [a != b for a, b in zip(output.outputs[0].token_ids, tokens, strict=True)]
                until = len(alone.captures[site, 3]) - 39 + (differs.index(True) if True in differs else 39)
                for layer in range(self.model.num_layers):
                    self.close(output.captures[site, layer], alone.captures[site, layer], until)

    def check_y_steps_with_and_without_a_plan(self) -> None:
        """Prints how long a step takes once all is recorded."""
        from midstream import Steer

        plan = [Steer("mlp_out", layers=[2], vector=vector(self.model.hidden_size))]
        times: dict[str, list[float]] = {"plain": [], "mlp_out": []}
        for _ in range(4):
            for name, given in (("plain", None), ("mlp_out", plan)):
                begin = time.perf_counter()
                self.model.generate([PROMPT] * SEATS, plan=given, max_tokens=128, **GREEDY)
                times[name].append((time.perf_counter() - begin) / 128)
        print(f"        ms a step: { ({name: round(1000 * min(each), 3) for name, each in times.items()}) }")

    def check_z_plain_requests_are_bit_for_bit_as_before(self) -> None:
        assert plain_batches(self.model.engine) == self.before
        left = {k: v for k, v in self.model.gauges()[0].items() if v and not k.endswith(("_steps", "_growths"))}
        left = {k: v for k, v in left.items() if not k.startswith("graph") and k != "queued_bytes"}
        assert not left, left


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=["stock", "uncompiled", "roomy"], help=argparse.SUPPRESS)
    parser.add_argument("--answers", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=120, help="how long plans change all the time")
    arguments = parsed(parser)
    engine = engine_arguments(arguments)
    if arguments.part:
        write_answers(arguments.part, arguments.answers, engine)
        return 0
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)  # who cuts the run off sees where it was
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        paths = {part: str(Path(directory) / part) for part in ("stock", "uncompiled", "roomy")}
        others = [
            subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--part", part, "--answers", path])
            for part, path in paths.items()
        ]
        import torch

        from midstream import VLLM, demo_model

        answers: dict[str, Any] = {}
        for other, path in zip(others, paths.values(), strict=True):
            if other.wait() != 0:
                print(f"FAILED  {path}: the engine that gives the answers ended with {other.returncode}")
                return 1
            answers |= torch.load(path, weights_only=False)
        print(f"answers after {time.perf_counter() - begin:.0f} s", flush=True)
        model = VLLM(demo_model(), **engine, max_num_seqs=SEATS, graph_bytes=LIMIT)
        print(f"engine after {time.perf_counter() - begin:.0f} s", flush=True)
        graphs = not (arguments.eager or arguments.cpu)
        checks = Checks(model, answers, arguments.exact, graphs, arguments.seconds)
        with model:
            failed = run_checks(checks, arguments.runner)
            print(f"checks after {time.perf_counter() - begin:.0f} s", flush=True)
            faulthandler.dump_traceback_later(END_SECONDS, exit=True)  # and if it does not end, where it is
    print(f"engine closed after {time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
