"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen weights.

`attach` puts adapters beside a base and gives parameters that every family's functions take: the
base is shared, so policy, reference and world model are one copy of it and adapters of their own.
Products are computed as `x W + (x A) B`, no merged weight is made and no gradient of the base::

    adapters = init_adapters(key, base, rank=8, targets="layers/(q|v)")
    logits = model.hidden(attach(base, adapters, scale=2.0), tokens) @ ...
    grads = jax.grad(lambda adapters: loss(attach(base, adapters, scale=2.0)))(adapters)
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.errors import UserError
from wmrl_jax.models.layers import LowRank


class Adapter(NamedTuple):
    """One weight's adapter.

    Attributes:
      a: float32 [..., in, rank].
      b: float32 [..., rank, out], zero at first.
    """

    a: jax.Array
    b: jax.Array


def init_adapters(key: jax.Array, params: Any, *, rank: int, targets: str) -> Any:
    """Adapters of the matrices whose path matches, as a dict by path, "layers/q" for instance.

    At first they change nothing: A is normal with variance 1 / in, B is zero.

    Args:
      key: decides A.
      params: the base, or its shapes; leaves [..., in, out].
      rank: r.
      targets: regular expression that the whole path must match; `LoraConfig` has one for every
        projection of attention, linear attention and feed-forward.

    Raises:
      UserError: no matrix matches, or a rank that is not below a matrix's sizes.
    """
    adapters = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = "/".join(str(part.key) for part in path)
        if leaf.ndim < 2 or not re.fullmatch(targets, name):
            continue
        *lead, rows, columns = leaf.shape
        if not 1 <= rank <= min(rows, columns):
            raise UserError(
                f"a LoRA rank of {rank} does not fit {name}, which is {rows} x {columns}"
            )
        own = jax.random.fold_in(key, len(adapters))
        a = jax.random.normal(own, (*lead, rows, rank)) / math.sqrt(rows)
        adapters[name] = Adapter(a, jnp.zeros((*lead, rank, columns)))
    if not adapters:
        raise UserError(f"no weight's path matches the LoRA targets {targets!r}")
    return adapters


def attach(base: Any, adapters: Any, *, scale: float | jax.Array) -> Any:
    """The base's parameters with adapters beside the weights that have one.

    Args:
      base: parameters; no gradient flows into them.
      adapters: from `init_adapters`.
      scale: alpha / rank; multiplies what the adapters add.
    """

    def beside(path: Any, leaf: jax.Array) -> Any:
        leaf = jax.lax.stop_gradient(leaf)
        adapter = adapters.get("/".join(str(part.key) for part in path))
        return leaf if adapter is None else LowRank(leaf, adapter.a, adapter.b * scale)

    return jax.tree_util.tree_map_with_path(beside, base)


def merge(params: Any) -> Any:
    """Plain parameters: every `LowRank` weight multiplied out, for decoding and for export."""
    return jax.tree.map(
        lambda leaf: leaf.merged() if isinstance(leaf, LowRank) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, LowRank),
    )
