"""Every test runs on eight CPU devices: the flags must be set before jax is imported."""

import gc
import os

import pytest
from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

# A first example compiles, and machines are shared: an example's time says nothing here.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory():
    """Drops compiled programs once a worker holds many: a thousand tests would keep 5 GB."""
    yield
    import jax

    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > 2 << 30:
        jax.clear_caches()
        gc.collect()
