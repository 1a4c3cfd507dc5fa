"""The configuration of a run: frozen dataclasses, each field said once with its default.

The trailing comment of a field is its documentation: `wmrl config` prints it. The allowed range
stands in the type, beside the default; `config_loader` checks both, and what must fit together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple


class Bounds(NamedTuple):
    """The allowed range of a number, as the annotation of a field's type.

    Attributes:
      low: smallest allowed value.
      high: largest allowed value.
      open_low: true where `low` itself is not allowed.
    """

    low: float
    high: float = math.inf
    open_low: bool = False


Count = Annotated[int, Bounds(1)]
Natural = Annotated[int, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]
Positive = Annotated[float, Bounds(0, open_low=True)]
NonNegative = Annotated[float, Bounds(0)]


@dataclass(frozen=True)
class TasksConfig:
    """Which tasks."""

    folder: str | None = None  # null: the built-in suite, materialised in the cache folder
    train: tuple[str, ...] = ()  # names; empty: every task whose split is train
    heldout: tuple[str, ...] = ()  # names; empty: every task whose split is heldout


@dataclass(frozen=True)
class ModelConfig:
    """The backbone of agent and world model: a published one, or a small Qwen3 from scratch."""

    path: str | None = None  # folder or GGUF file of a published model; smollm2: that of the extra
    layers: Count = 4  # this and the other sizes: of a model from scratch
    width: Count = 256
    heads: Count = 4
    kv_heads: Count = 2  # divides heads
    head_dim: Count = 64  # even
    mlp_width: Count = 704
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-6
    tied_embeddings: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the compute; parameters are float32
    remat: Literal["none", "matmuls", "layers"] = "matmuls"  # what a layer keeps for its gradient
    vocab_size: Annotated[int, Bounds(300)] = 2048  # of the tokenizer, trained on the corpus
    prompt_tokens: Count = 128  # longest prompt
    new_tokens: Count = 192  # longest completion


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters in place of the policy's weights, in the updates behind the warm start."""

    rank: Natural = 0  # 0: all weights are trained
    alpha: Positive = 16.0  # what the adapters add is multiplied by alpha / rank
    targets: str = r"layers/(.*/)?(q|k|v|o|gate|up|down|qkv|z|out)"  # paths, a regular expression


@dataclass(frozen=True)
class WarmStartConfig:
    """Corpus and supervised warm start of the agent."""

    programs_per_task: Count = 400
    epochs: Positive = 4.0
    batch_size: Count = 64
    learning_rate: Positive = 1e-3
    warmup_steps: Natural = 50
    weight_decay: NonNegative = 0.01


@dataclass(frozen=True)
class WorldModelConfig:
    """Executed cases and the tuning of the world model on them."""

    cases: Count = 480  # programs of the corpus, executed
    agent_cases: Natural = 480  # programs of the warm-started agent, executed too
    heldout_fraction: Annotated[float, Bounds(0, 0.9)] = 0.2  # of the cases, for `wmrl fidelity`
    epochs: Positive = 6.0
    batch_size: Count = 32
    learning_rate: Positive = 3e-4
    quality_levels: Annotated[int, Bounds(2, 100)] = 10  # of a valid outcome, by position


@dataclass(frozen=True)
class RewardConfig:
    """Where the training signal comes from."""

    source: Literal["execution", "world_model", "mixed"] = "mixed"


@dataclass(frozen=True)
class CorrectionsConfig:
    """The two corrections of the world-model stream."""

    debias: bool = True
    denoise: bool = True
    map: Literal["centred", "step", "bins"] = "centred"
    capacity: Count = 4096  # pairs kept
    min_pairs: Count = 64  # the map is the identity until there are so many
    half_life: Positive = 64.0  # of the moments, in anchor groups
    fusion: Literal["inverse_variance", "authors", "fixed", "control_variate"] = "inverse_variance"


@dataclass(frozen=True)
class AnchorsConfig:
    """The groups that are executed for real."""

    fraction: Share = 0.1
    minimum: Natural = 1  # groups a step
    wait: bool = False  # true: synchronous and bit-for-bit repeatable
    max_staleness: Natural = 8  # steps
    max_in_flight: Count = 24  # groups


@dataclass(frozen=True)
class SamplerConfig:
    """How rollouts are drawn in training."""

    temperature: Positive = 1.0
    top_k: Natural = 0  # 0: off
    top_p: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0  # 1: off


@dataclass(frozen=True)
class LossConfig:
    """Policy loss over tokens."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "dapo"
    advantages: Literal["standardized", "centred", "rloo", "batch"] = "standardized"
    clip_low: Share = 0.2
    clip_high: NonNegative = 0.28
    importance_cap: Positive = 2.0
    kl_coef: NonNegative = 0.0
    entropy_coef: NonNegative = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """The updates."""

    steps: Count = 60
    groups: Count = 8  # a step
    group_size: Count = 8  # rollouts of a group, at least 2
    microbatches: Count = 1  # divides groups
    packing: bool = False  # true: padding is not computed; a program for each of a few capacities
    fused: bool = False  # true: sampling, scoring, queue and update as one compiled program
    optimizer: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    learning_rate: Positive = 1e-4
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"  # behind the warm-up
    warmup_steps: Natural = 3
    beta1: Annotated[float, Bounds(0, 0.9999)] = 0.9
    beta2: Annotated[float, Bounds(0, 0.9999)] = 0.999
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    logprob_chunk: Count = 64  # tokens of a row whose logits exist at one time


@dataclass(frozen=True)
class SandboxConfig:
    """Execution of programs."""

    slots: Count = 2  # programs at one time
    retries: Natural = 2  # of a fault of the machinery
    warm: bool = True  # fork programs from a supervisor that has imported the usual libraries


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation by real execution."""

    samples: Count = 8  # programs a task
    temperature: Positive = 1.0
    bootstrap: Count = 2000  # resamples behind a confidence interval


@dataclass(frozen=True)
class CheckpointConfig:
    """Orbax checkpoints of the training run."""

    every: Count = 10  # steps
    keep: Count = 3  # the newest, beside the best


@dataclass(frozen=True)
class Config:
    """A whole run."""

    name: str = "run"
    out: str = "runs"  # the run's folder is out/name
    seed: Natural = 0
    tasks: TasksConfig = field(default_factory=TasksConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    world_model: WorldModelConfig = field(default_factory=WorldModelConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    corrections: CorrectionsConfig = field(default_factory=CorrectionsConfig)
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
