"""Published weights in and out: safetensors, sharded or not, tensor by tensor.

Loading allocates each leaf of the parameters on its devices and writes one published tensor after
the other into it, so that the host holds one tensor at a time beside what the devices hold.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from wmrl_jax.errors import UserError
from wmrl_jax.models.families import Weight


class Tensor(NamedTuple):
    """A tensor on disk.

    Attributes:
      shape: known without reading it.
      read: reads it.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


log = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHOWN = 5  # names in an error


@contextmanager
def open_safetensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a model's folder by name, each read from disk when it is asked for.

    Raises:
      UserError: no safetensors, an index that names a missing file or tensor, or a broken file.
    """
    with ExitStack() as stack:
        found: dict[str, Tensor] = {}
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{path} is no whole safetensors file ({error}); fetch it again"
                ) from error
            for name in file.keys():  # noqa: SIM118 - a file, not a dict
                shape = tuple(file.get_slice(name).get_shape())
                found[name] = Tensor(shape, partial(file.get_tensor, name))
        yield found


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise UserError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        return [folder / _SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is no index of safetensors files") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UserError(f"{index} names {_listed(missing)}, missing in that folder")
    return [folder / name for name in names]


def load_weights(
    tensors: Mapping[str, Tensor],
    weights: Sequence[Weight],
    like: Any,
    *,
    skipped: Sequence[str] = (),
    source: str = "the checkpoint",
) -> Any:
    """Parameters filled with published tensors.

    Args:
      tensors: by published name, from `open_safetensors` say.
      weights: where each goes.
      like: pytree of `jax.ShapeDtypeStruct`, the parameters' shapes, dtypes and (optional)
        shardings.
      skipped: regular expressions of names that `tensors` may hold beside.
      source: named in errors.

    Returns:
      the parameters, in the dtypes and shardings of `like`.

    Raises:
      UserError: a tensor is missing, left over, or of another shape; nothing is read then.
    """
    leaves = {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(like)}
    _check_names(tensors, weights, skipped, source)
    _check_filled(weights, leaves)
    for weight in weights:
        _check_shape(weight, tensors[weight.name].shape, leaves[weight.path], source)
    params: dict[tuple[str, ...], jax.Array] = {}
    for weight in weights:
        leaf = leaves[weight.path]
        array = _ours(weight, tensors[weight.name].read(), leaf)
        if weight.layer is None:
            params[weight.path] = jax.device_put(
                array.astype(leaf.dtype, copy=False), leaf.sharding
            )
            continue
        if weight.path not in params:
            params[weight.path] = _zeros(leaf)
        put = jax.device_put(array.astype(leaf.dtype, copy=False), _of_slice(leaf.sharding))
        params[weight.path] = _set(params[weight.path], put, weight.layer)
    return jax.tree_util.tree_map_with_path(lambda path, _: params[_keys(path)], like)


def save_weights(
    params: Any,
    weights: Sequence[Weight],
    folder: Path,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes parameters as safetensors that the published tools read.

    Args:
      params: what `load_weights` gives.
      weights: where each published tensor lies in them.
      folder: made if missing; `config.json` and the tokenizer are the caller's.
      dtype: of the file, float32, bfloat16 or float16.
      max_shard_bytes: a file is closed before it passes this size.
    """
    as_dtype = jnp.dtype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def published() -> Iterator[tuple[str, np.ndarray]]:
        for weight in weights:
            leaf = leaves[weight.path]
            array = np.asarray(leaf if weight.layer is None else leaf[weight.layer])
            if weight.reshape is not None:
                array = array.reshape(weight.reshape)
            array = array.T if weight.transpose else array
            yield weight.name, np.ascontiguousarray(array.astype(as_dtype))

    shards = list(_write_shards(published(), folder, max_shard_bytes))
    for old in folder.glob("model*.safetensors*"):  # only now that all is written
        old.unlink()
    if len(shards) == 1:
        (folder / shards[0][0]).rename(folder / _SINGLE)
        return
    where: dict[str, str] = {}
    for number, (file, names) in enumerate(shards, 1):
        final = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / file).rename(folder / final)
        where |= dict.fromkeys(names, final)
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=2))


def _write_shards(
    tensors: Iterable[tuple[str, np.ndarray]], folder: Path, max_bytes: int
) -> Iterator[tuple[str, list[str]]]:
    """Writes `part-<n>` files, none larger than `max_bytes` unless one tensor is."""
    held: dict[str, np.ndarray] = {}
    number = 0

    def write() -> tuple[str, list[str]]:
        file = f"part-{number}"
        save_file(held, folder / file, metadata={"format": "pt"})
        return file, list(held)

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > max_bytes:
            yield write()
            held, number = {}, number + 1
        held[name] = tensor
    yield write()


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(key.key) for key in path)


def _check_names(
    tensors: Mapping[str, Any], weights: Sequence[Weight], skipped: Sequence[str], source: str
) -> None:
    wanted = {weight.name for weight in weights}
    missing = sorted(wanted - set(tensors))
    beside = sorted(set(tensors) - wanted)
    known = [name for name in beside if any(re.fullmatch(pattern, name) for pattern in skipped)]
    left = sorted(set(beside) - set(known))
    if known:
        log.info("%s: %d tensors are not read, %s", source, len(known), _listed(known))
    faults = [f"lacks {_listed(missing)}"] * bool(missing)
    faults += [f"has {_listed(left)}, for which there is no place"] * bool(left)
    if faults:
        raise UserError(f"{source} {' and '.join(faults)}; config.json describes another model")


def _check_filled(weights: Sequence[Weight], leaves: Mapping[tuple[str, ...], Any]) -> None:
    """Every entry of every leaf has a tensor: a fault of a family's table, not of a user."""
    filled: dict[tuple[str, ...], list[int | None]] = {}
    for weight in weights:
        filled.setdefault(weight.path, []).append(weight.layer)
    for path, leaf in leaves.items():
        layers = filled.pop(path, [])
        stacked = len(layers) == leaf.shape[0] and set(layers) == set(range(leaf.shape[0]))
        if layers != [None] and not stacked:
            raise ValueError(f"the table of weights fills {'/'.join(path)} with layers {layers}")
    if filled:
        raise ValueError(f"the table of weights names {list(filled)}, which are no parameters")


def _check_shape(weight: Weight, shape: tuple[int, ...], leaf: Any, source: str) -> None:
    wanted = tuple(leaf.shape if weight.layer is None else leaf.shape[1:])
    expected = weight.reshape or (tuple(reversed(wanted)) if weight.transpose else wanted)
    if shape != expected:
        raise UserError(
            f"{weight.name} of {source} has the shape {shape}; by config.json it must be {expected}"
        )


def _ours(weight: Weight, tensor: np.ndarray, leaf: Any) -> np.ndarray:
    shape = leaf.shape if weight.layer is None else leaf.shape[1:]
    return tensor.T if weight.transpose else tensor.reshape(shape)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _zeros(leaf: Any) -> jax.Array:
    return jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def _of_slice(sharding: Any) -> Any:
    """The sharding of one entry of a stacked leaf."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
        return jax.sharding.NamedSharding(sharding.mesh, spec)
    return sharding


@partial(jax.jit, donate_argnums=0)
def _set(leaf: jax.Array, value: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, value, layer, 0)
