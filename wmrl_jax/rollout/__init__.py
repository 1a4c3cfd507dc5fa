"""The compiled sampler and the episodes around it."""

from wmrl_jax.rollout.sampler import SampleFn, make_sampler

__all__ = ["SampleFn", "make_sampler"]
