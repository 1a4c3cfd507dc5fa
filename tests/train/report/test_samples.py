from wmrl_jax.train.report.samples import choose_samples


def sample(step, reward, predicted):
    return {"step": step, "reward": reward, "predicted": predicted}


def test_the_first_the_best_of_the_last_third_and_the_worst_predicted_are_chosen():
    early = sample(1, 0.1, 0.2)
    missed = sample(2, 0.0, 0.9)
    good_too_soon = sample(3, 0.99, 0.95)
    late, best = sample(8, 0.5, 0.5), sample(9, 0.8, 0.8)
    rest = [sample(4 + i, 0.2, 0.2) for i in range(2)]
    chosen = choose_samples([early, missed, good_too_soon, *rest, late, best])
    assert [s for _, s in chosen] == [early, best, missed]


def test_no_sample_is_shown_twice():
    only = sample(1, 0.5, 0.1)
    assert [s for _, s in choose_samples([only])] == [only]
    assert len(choose_samples([only, dict(only)])) == 2


def test_ungraded_samples_are_not_shown():
    assert choose_samples([sample(1, None, 0.5)]) == []
