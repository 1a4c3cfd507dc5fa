"""Every test runs on eight CPU devices: the flags must be set before jax is imported."""

import os

from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

# A first example compiles, and machines are shared: an example's time says nothing here.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
