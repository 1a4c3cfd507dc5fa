import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.models.microbatch import summed_gradients
from wmrl_jax.models.rows import GroupedRows
from wmrl_jax.train.mesh import by_group, make_mesh


def batch(groups: int, group_size: int) -> GroupedRows:
    rng = np.random.default_rng(0)
    sizes = ((groups, 4), (groups,), (groups, group_size, 3), (groups, group_size))
    return GroupedRows(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in sizes))


def loss(params: jax.Array, part: GroupedRows) -> tuple[jax.Array, jax.Array]:
    values = jnp.sin(part.completions * params).sum(-1) * part.prompt_lengths[:, None]
    return jnp.sum(values), jnp.sum(part.lengths > 0, dtype=jnp.float32)


@pytest.mark.parametrize(("groups", "group_size"), [(8, 8), (12, 4), (6, 1), (1, 16)])
def test_parts_add_up_to_the_whole(groups: int, group_size: int) -> None:
    params, rows = jnp.asarray([0.3, -1.0, 2.0]), batch(groups, group_size)

    value, count, grads = summed_gradients(loss, params, rows)

    (expected, expected_count), expected_grads = jax.value_and_grad(loss, has_aux=True)(
        params, rows
    )
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert count == expected_count
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-4, atol=1e-5)


def test_sharded_groups_add_up_without_moving() -> None:
    mesh = make_mesh()
    params, rows = jnp.asarray([0.3, -1.0, 2.0]), batch(32, 2)
    sharded = jax.device_put(rows, by_group(mesh))

    run = jax.jit(lambda p, b: summed_gradients(loss, p, b, rows=4, devices=8))

    found, expected = run(params, sharded), jax.value_and_grad(loss, has_aux=True)(params, rows)
    np.testing.assert_allclose(found[0], expected[0][0], rtol=1e-4)
    np.testing.assert_allclose(found[2], expected[1], rtol=1e-4, atol=1e-5)
    # A part takes a piece of each device's share: no group travels, only sums do.
    compiled = run.lower(params, sharded).compile().as_text()
    assert "all-gather" not in compiled
    assert "all-to-all" not in compiled
