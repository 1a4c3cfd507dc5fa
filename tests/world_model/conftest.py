import jax
import pytest

from wmrl_jax.models.model import Model, build_model
from wmrl_jax.models.tokenizer import Tokenizer, train_tokenizer
from wmrl_jax.train.config import ModelConfig

TINY = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=48)
TEXTS = ["task a\n", "task b\n", "good\n", "fair\n", "bad\n", "oops\n", "x = 1\n"] * 2


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 320)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Model:
    return build_model(TINY, tokenizer.vocab_size)


@pytest.fixture(scope="session")
def params(model: Model) -> object:
    return model.init(jax.random.key(0))
