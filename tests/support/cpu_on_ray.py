"""vLLM's CPU platform, told that Ray may place its workers. A platform plugin of vLLM's, which the tests of Ray put in its way.

vLLM's own says `current platform cpu does not support ray`: it has no resource that Ray could count. Here one is the GPU that the tests'
Ray nodes claim to have.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

OTHER_HOSTS = "MIDSTREAM_TEST_OTHER_HOSTS"  # set: each Ray node is to be taken for another host, so that nothing can go by Unix sockets


def install(directory: Path) -> None:
    """Make an installed distribution of this module, for processes that have `directory` in PYTHONPATH."""
    info = directory / "cpu_on_ray-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-on-ray\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\ncpu_on_ray = cpu_on_ray:platform\n")


def platform() -> str:
    if os.environ.get(OTHER_HOSTS):
        _call_nodes_hosts()
    return "cpu_on_ray.Platform"


def _call_nodes_hosts() -> None:
    from midstream.transport import messages

    def machine() -> str:
        import ray

        return ray.get_runtime_context().get_node_id() if ray.is_initialized() else "the client's"

    messages.machine_name = machine


def __getattr__(name: str) -> Any:
    if name != "Platform":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    class Platform(CpuPlatform):
        ray_device_key = "GPU"

    return Platform
