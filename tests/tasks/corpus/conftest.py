from pathlib import Path

import pytest

from wmrl_jax.tasks.task import Task, load_tasks


@pytest.fixture(scope="session")
def suite(suite_root: Path) -> dict[str, Task]:
    """The built-in tasks; their leaderboards play no part here."""
    return load_tasks(suite_root, require_leaderboard=False)
