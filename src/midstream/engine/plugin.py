"""vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Check the vLLM version and prepare this process. An engine that was not started by midstream is left as it is."""
    from midstream.engine.admission import check_requests
    from midstream.engine.patches import apply
    from midstream.engine.prefix_cache import heed_plans
    from midstream.engine.versions import check_vllm_version

    check_vllm_version()
    apply()
    check_requests()
    heed_plans()
