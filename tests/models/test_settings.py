"""Settings of an engine, and which vLLM it may be. Rows D3, L5."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial

import pytest

from midstream.engine.seams import check_vllm_version
from midstream.errors import MidstreamError, UnknownSiteError, UnsupportedVersionError
from midstream.settings import BUILDABLE, Settings, chosen_graph_sites


def test_settings_survive_vllms_config():
    class Config:
        additional_config = Settings(allow_traces=True, rename={"blocks": "layers"}).to_config({"another": 1})

    assert Config.additional_config["another"] == 1
    assert Settings.of(Config) == Settings(allow_traces=True, rename={"blocks": "layers"})


def test_traces_are_off_unless_the_operator_allows_them():
    assert not Settings().allow_traces


@pytest.mark.engine
def test_settings_enter_the_key_of_the_compile_cache():
    """Design section 4: else a cached model without the site op would be served. The key must not differ from start to start."""
    from vllm.config import VllmConfig

    stock, ours, again = (VllmConfig(additional_config=c) for c in ({}, Settings().to_config(), Settings().to_config()))
    assert stock.compute_hash() != ours.compute_hash() == again.compute_hash()
    assert VllmConfig(additional_config=Settings(graph_sites=()).to_config()).compute_hash() != ours.compute_hash()


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1rc1"])
def test_supported_versions(version):
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.25.3", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(UnsupportedVersionError, match=r"0\.26 to 0\.33") as refusal:
        check_vllm_version(version)
    assert version in str(refusal.value)


def test_midstreams_own_engine_arguments_cannot_be_taken():
    from midstream.engine.launch import llm_arguments

    with pytest.raises(MidstreamError, match="worker_cls"):
        llm_arguments("model", Settings(), {"worker_cls": "other.Worker"})


@pytest.mark.parametrize(("ranks", "kept"), [(1, False), (2, True), (None, True)])
def test_an_old_script_that_gives_graph_sites_is_told(ranks, kept):
    """Without tensor parallelism the argument has no effect, also on the key of the compile cache."""
    told = pytest.warns(DeprecationWarning, match="Leave it out") if ranks != 2 else nullcontext()
    with told:
        sites = chosen_graph_sites(["resid_pre"], ranks)
    assert sites == (("resid_pre",) if kept else Settings().graph_sites)
    with warnings.catch_warnings(action="error"):
        assert chosen_graph_sites(None, ranks) == ("resid_post",)


def test_all_sites_are_built_in_except_under_tensor_parallelism():
    assert Settings(graph_sites=()).sites_in_graphs(1) == BUILDABLE
    assert Settings().sites_in_graphs(2) == ("resid_post",) and Settings(graph_sites=()).sites_in_graphs(2) == ()


@pytest.mark.engine
@pytest.mark.parametrize("site", ["mlp_in", "nowhere"])
def test_a_graph_site_that_cannot_be_built_in_is_said_before_anything_starts(site):
    """Also for an engine that does not compile. Seen failing where the workers alone looked, and those that compile."""
    from midstream import VLLM, engine_arguments

    for make in (engine_arguments, partial(VLLM, "no/model", enforce_eager=True)):
        with pytest.raises(UnknownSiteError, match=f"graph_sites has '{site}'.*resid_pre, resid_mid, resid_post"):
            make(graph_sites=("resid_post", site))
