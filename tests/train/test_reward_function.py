"""The corrections inside a foreign trainer's reward function; Tunix itself where installed."""

import math

import jax
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.method import debias
from wmrl_jax.train.reward_function import CorrectedRewards

SIZE = 4


def true_reward(prompts, completions):
    return [len(text) % 11 / 10 for text in completions]


def biased(prompts, completions):
    return [0.5 * r + 0.4 for r in true_reward(prompts, completions)]


def rewards(**options):
    return CorrectedRewards(
        true_reward, biased, SIZE, jax.random.key(0),
        **({"fraction": 0.25, "capacity": 64, "min_pairs": 16} | options),
    )  # fmt: skip


def batch(seed, groups=8):
    rng = np.random.default_rng(seed)
    return ["p"] * groups * SIZE, ["x" * int(n) for n in rng.integers(1, 40, groups * SIZE)]


def test_anchors_get_their_true_reward_and_the_others_what_the_map_makes_of_the_score():
    function = rewards()
    for seed in range(12):
        prompts, completions = batch(seed)
        got = np.array(function(prompts, completions, extra="ignored"))
    truth = np.array(true_reward(prompts, completions))
    score = np.array(biased(prompts, completions), np.float32)
    exact = np.abs(got - truth).reshape(-1, SIZE).max(1) < 1e-6
    assert exact.sum() >= 2
    expected = np.asarray(debias.apply(function.debias, score))
    others = ~np.repeat(exact, SIZE)
    np.testing.assert_allclose(got[others], expected[others], atol=1e-6)
    assert np.abs(got - truth).mean() < 0.25 * np.abs(score - truth).mean()
    assert (function.executed, function.predicted) == (24, 72)


def test_only_anchor_groups_are_executed():
    asked = []

    def execute(prompts, completions):
        asked.append(len(completions))
        return true_reward(prompts, completions)

    function = CorrectedRewards(execute, biased, SIZE, jax.random.key(1), fraction=0.25)
    for seed in range(4):
        function(*batch(seed))
    assert sum(asked) == function.executed * SIZE
    assert asked == [2 * SIZE] * 4


def test_for_a_centring_trainer_groups_are_stretched_so_that_the_gradient_is_the_fused_one():
    plain, fused = rewards(), rewards(standardized=False)
    for seed in range(6):
        same = np.array(plain(*batch(seed))).reshape(-1, SIZE)
        stretched = np.array(fused(*batch(seed))).reshape(-1, SIZE)
    np.testing.assert_allclose(stretched.mean(1), same.mean(1), atol=1e-5)
    ratio = stretched.std(1) / same.std(1)
    assert len(np.unique(ratio.round(4))) == 2
    assert ratio.mean() == pytest.approx(1.0, abs=1e-4)


def test_an_execution_without_a_grade_stays_unknown():
    function = CorrectedRewards(
        lambda p, c: [math.nan] * len(c), biased, SIZE, jax.random.key(0), fraction=1.0
    )
    assert np.isnan(function(*batch(0))).all()
    assert int(function.debias.count) == 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rewards()(["p"] * 6, ["c"] * 6), "6 completions are no groups of 4"),
        (
            lambda: CorrectedRewards(true_reward, biased, 1, jax.random.key(0)),
            "group_size is 1",
        ),
        (
            lambda: CorrectedRewards(true_reward, lambda p, c: [0.5], 2, jax.random.key(0))(
                ["p"] * 4, ["c"] * 4
            ),
            r"predict was asked for 4 grades and returned an array of shape \(1,\)",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()


class IdTokenizer:
    """'5 17 9' <-> [5, 17, 9]."""

    def encode(self, text, **ignored):
        return [int(word) for word in text.split()]

    def decode(self, ids, **ignored):
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self):
        return 0

    def eos_id(self):
        return 1

    def pad_id(self):
        return 0


@pytest.mark.slow
def test_tunix_trains_a_policy_on_corrected_rewards():
    """The reward is the share of even ids; predicted on another scale, a quarter executed."""
    pytest.importorskip("tunix", reason="google-tunix is not installed (the extra `tunix`)")
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    def share_of_even(prompts, completions):
        ids = [IdTokenizer().encode(text) for text in completions]
        return [float(np.mean([i % 2 == 0 for i in row])) if row else 0.0 for row in ids]

    def model(seed):
        config = qwen3.ModelConfig(
            num_layers=1, vocab_size=16, embed_dim=16, hidden_dim=16, num_heads=2, head_dim=8,
            num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
        )  # fmt: skip
        return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))

    function = CorrectedRewards(
        share_of_even,
        lambda p, c: [0.3 + 0.4 * r for r in share_of_even(p, c)],
        8,
        jax.random.key(0),
        fraction=0.25,
        capacity=128,
        min_pairs=16,
    )
    seen = []

    def watched(prompts, completions, **more):
        seen.append(np.mean(share_of_even(prompts, completions)))
        return function(prompts, completions, **more)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    steps = 25
    cluster = rl_cluster.RLCluster(
        actor=model(0),
        reference=model(0),
        tokenizer=IdTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=8, max_prompt_length=4, kv_cache_size=16,
                temperature=1.0, top_p=1.0, top_k=None, eos_tokens=[-1],
            ),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-2), max_steps=steps, eval_every_n_steps=10**9
            ),
        ),
    )  # fmt: skip
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=watched,
        algo_config=grpo_learner.GRPOConfig(num_generations=8, num_iterations=1, beta=0.0),
    )
    learner.train({"prompts": np.array(["2 3", "4 5", "6 7", "8 9"])} for _ in range(steps))
    assert function.executed + function.predicted == 4 * len(seen)
    assert function.executed == len(seen)
    assert np.mean(seen[-3:]) > np.mean(seen[:3]) + 0.2
