"""Backbones as Flax modules used through pure functions; the tokenizer."""

from wmrl_jax.models.model import Model, build_model
from wmrl_jax.models.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = ["Model", "Tokenizer", "build_model", "load_tokenizer", "train_tokenizer"]
