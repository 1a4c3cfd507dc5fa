"""Programs written by chance from recipes: right ones of every quality, and wrong ones."""

from wmrl_jax.tasks.corpus.generate import CorpusProgram, completion_text, generate
from wmrl_jax.tasks.corpus.references import reference_programs

__all__ = ["CorpusProgram", "completion_text", "generate", "reference_programs"]
