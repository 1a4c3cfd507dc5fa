"""Weights in and out: every tensor in its place, devices, shards, memory, and what is refused."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wmrl_jax.errors import UserError
from wmrl_jax.models.pretrained import abstract_params, export, load_pretrained, open_pretrained
from wmrl_jax.models.weights import save_weights

CONFIG = {
    "model_type": "qwen3", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A published folder with random weights, and these weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    published = open_pretrained(tmp_path)
    params = published.model.init(jax.random.key(0))
    save_weights(params, published.weights, tmp_path, dtype="float32")
    return tmp_path, published, params


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_was_saved_is_loaded(folder):
    _, published, params = folder
    assert_equal(load_pretrained(published), params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(folder, tmp_path, dtype):
    _, published, params = folder
    export(published, params, tmp_path / "half", dtype=dtype)
    loaded = load_pretrained(open_pretrained(tmp_path / "half"))
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params)
    assert_equal(loaded, rounded)


def test_files_are_cut_at_the_given_size_and_read_back(folder):
    path, published, params = folder
    save_weights(params, published.weights, path, dtype="float32", max_shard_bytes=6000)
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 6000 + 2000 for file in files)
    assert not (path / "model.safetensors").exists()
    assert_equal(load_pretrained(published), params)


def test_each_device_gets_its_shard(folder):
    _, published, params = folder
    mesh = Mesh(np.array(jax.devices()), ("model",))

    def sharding(path, leaf):
        wide = leaf.ndim == 3 and leaf.shape[2] % 8 == 0
        spec = PartitionSpec(None, None, "model") if wide else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    like = jax.tree_util.tree_map_with_path(sharding, abstract_params(published.model))
    loaded = load_pretrained(published, like)
    assert_equal(loaded, params)
    assert loaded["layers"]["gate"].sharding.spec == PartitionSpec(None, None, "model")
    assert loaded["layers"]["gate"].addressable_shards[0].data.shape == (3, 16, 3)


def test_missing_and_left_over_tensors_are_listed(folder):
    from safetensors.numpy import load_file, save_file

    path, published, _ = folder
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.extra"] = np.zeros(3, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks model\.norm\.weight and has .*mlp\.extra, for"):
        load_pretrained(published)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    from safetensors.numpy import load_file, save_file

    path, published, _ = folder
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((24, 15), np.float32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj.*\(24, 15\).*\(24, 16\)"):
        load_pretrained(published)


def test_a_truncated_file_an_index_without_its_file_and_no_weights_are_refused(folder):
    path, published, params = folder
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors is no whole safetensors file"):
        load_pretrained(published)
    save_weights(params, published.weights, path, dtype="float32", max_shard_bytes=6000)
    first = sorted(path.glob("model-*.safetensors"))[0]
    first.unlink()
    with pytest.raises(UserError, match=rf"names {first.name}, missing"):
        load_pretrained(published)
    for file in path.glob("model*"):
        file.unlink()
    with pytest.raises(UserError, match="has neither"):
        load_pretrained(published)


def test_an_index_that_is_no_object_is_refused(folder):
    path, published, _ = folder
    (path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="is no index of safetensors files"):
        load_pretrained(published)


def test_a_model_is_not_exported_over_itself(folder):
    path, published, params = folder
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="export to another folder"):
        export(published, params, path)
    assert (path / "model.safetensors").read_bytes() == before


MEASURE = """
import json, sys, threading, time
from pathlib import Path
import jax, numpy as np
from wmrl_jax.models.pretrained import open_pretrained, load_pretrained, abstract_params

def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

published = open_pretrained(Path(sys.argv[1]))
jax.block_until_ready(jax.numpy.ones(3) + 1)
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)
watcher = threading.Thread(target=watch); watcher.start()
params = jax.block_until_ready(load_pretrained(published))
done = True; watcher.join()
print(json.dumps({"peak": peak - before, "model": sum(x.nbytes for x in jax.tree.leaves(params)),
                  "largest": max(x.nbytes // (x.shape[0] if x.ndim == 3 else 1)
                                 for x in jax.tree.leaves(params))}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layers", [6])  # 16 make a gigabyte
def test_loading_holds_one_tensor_beside_the_parameters(tmp_path, layers):
    config = CONFIG | {
        "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": layers,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    published = open_pretrained(tmp_path)
    like = abstract_params(published.model)
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), like)
    save_weights(params, published.weights, tmp_path, dtype="float32", max_shard_bytes=300 << 20)
    del params
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["model"] > 2**26 * layers
    assert found["peak"] - found["model"] < found["largest"] + 0.2 * found["model"]
