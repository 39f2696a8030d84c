"""Which traces keep to the sites in the compiled forward: a wrong yes would leave a read that is never reached."""

from __future__ import annotations

import math

import pytest
import torch

from midstream.trace.program import FunctionProgram, keeps_to_graph_sites


class Model:
    """Stands where a client's model does among a function's variables."""

    def __midstream_reference__(self):
        return ("model",)


model = Model()
vector = torch.ones(4)


def with_a_default(m, layer=3, scale=vector):
    return m.layers_output[layer] * scale


first, second = (lambda m: m.layers_output[1] + vector), (lambda m: m.mlps_output[1] + vector)


def other_site(m):
    return m.mlps_output[2]


def steer(m, tracer):
    for _ in tracer.iter[:]:
        m.layers_output[3] += vector * math.sqrt(2)


def several(m):
    return torch.stack([m.layers_output[i] for i in range(m.num_layers)]), m.logits


def nested(m):
    return (lambda: m.layers_output[2])()


def global_model(m):
    return model.layers_output[3]


def logits_written(m):
    m.logits += 1


def module(m):
    return m.model.layers[3].output


def handed_on(m):
    return other_site(m)


def by_name(m):
    return getattr(m, "mlps_output")[1]  # noqa: B009


def renamed(m):
    n = m
    return n.mlps_output[1]


def from_locals(m):
    return locals()["m"].mlps_output[0]


def imports(m):
    import inspect

    return inspect.currentframe().f_locals["m"].mlps_output[0]


def relative_import(m):
    from .math import reach

    return reach(), m.layers_output[3]


def cached(m, tracer):
    return tracer.cache()


def global_module(m):
    return model.mlps_output[3]


@pytest.mark.parametrize("fn", [steer, several, nested, global_model, logits_written, with_a_default, first])
def test_keeps_to_graph_sites(fn):
    assert keeps_to_graph_sites(FunctionProgram(fn))


@pytest.mark.parametrize(
    "fn",
    [
        other_site,
        module,
        handed_on,
        by_name,
        renamed,
        from_locals,
        cached,
        global_module,
        imports,
        relative_import,
        second,
        max,
    ],
)
def test_may_reach_further(fn):
    assert not keeps_to_graph_sites(FunctionProgram(fn))
