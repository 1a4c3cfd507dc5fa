"""The command line: it starts at once, says faults in one line, and returns the right status."""

import errno
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

from wmrl_jax import cli
from wmrl_jax.errors import UserError

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")

COMMANDS = [
    ["run", QUICKSTART],
    ["train", QUICKSTART],
    ["corpus", QUICKSTART],
    ["sft", QUICKSTART],
    ["eval", "runs/x", "--tasks", "wine", "--samples", "3"],
    ["world-model", "cases", QUICKSTART],
    ["world-model", "tune", QUICKSTART],
    ["fidelity", "runs/x"],
]


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the pipeline, whose functions keep what they were called with in `calls`."""
    stand_in = types.ModuleType("wmrl_jax.train.pipeline")
    stand_in.calls = calls = []  # type: ignore[attr-defined]
    for name in ("run", "train", "corpus", "sft", "evaluate", "cases", "tune", "fidelity"):
        setattr(
            stand_in,
            name,
            lambda *args, _name=name, **kwargs: calls.append((_name, args, kwargs)),
        )
    monkeypatch.setitem(sys.modules, "wmrl_jax.train.pipeline", stand_in)
    import wmrl_jax.train

    monkeypatch.setattr(wmrl_jax.train, "pipeline", stand_in, raising=False)
    return stand_in


def test_help_imports_neither_jax_nor_numpy() -> None:
    code = (
        "import sys; from wmrl_jax.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'rich', 'yaml'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "usage: wmrl" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c[:2]).split("/")[0])
def test_each_command_calls_its_one_function(
    command: list[str], pipeline: types.ModuleType
) -> None:
    assert cli.main(command) == 0

    ((name, _, _),) = pipeline.calls
    words = {"eval": "evaluate", "world-model": command[1]}
    assert name == words.get(command[0], command[0])


def test_overrides_reach_the_configuration(pipeline: types.ModuleType) -> None:
    cli.main(["run", QUICKSTART, "--set", "train.steps=3", "--set", "seed=5"])

    ((_, (config,), _),) = pipeline.calls
    assert (config.train.steps, config.seed) == (3, 5)


def test_what_may_surprise_is_said_before_the_work(
    pipeline: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", QUICKSTART, "--set", "anchors.fraction=1"]) == 0

    assert capsys.readouterr().err.startswith("wmrl: anchors.fraction is 1, so every group")
    assert len(pipeline.calls) == 1


def test_evaluation_gets_tasks_and_samples(pipeline: types.ModuleType) -> None:
    cli.main(["eval", "runs/x", "--tasks", "wine", "iris", "--samples", "3"])

    assert pipeline.calls == [
        ("evaluate", (Path("runs/x"),), {"tasks": ["wine", "iris"], "samples": 3})
    ]


def test_what_the_user_can_mend_is_one_line_and_status_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = cli.main(["run", QUICKSTART, "--set", "train.group_size=1"])

    said = capsys.readouterr().err
    assert status == 2
    assert said.count("\n") == 1
    assert said.startswith("wmrl: train.group_size is 1")


def raising(error: BaseException):
    def run(_: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UserError("the tasks folder is empty: fill it"), 2, "wmrl: the tasks folder is empty"),
        (KeyboardInterrupt("stopped after step 3"), 130, "wmrl: stopped after step 3"),
        (KeyboardInterrupt(), 130, "wmrl: interrupted"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            1,
            "wmrl: No space left on device (runs/x)",
        ),
    ],
)
def test_each_end_has_its_status_and_its_line(
    error: BaseException,
    status: int,
    words: str,
    pipeline: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipeline.run = raising(error)  # type: ignore[attr-defined]

    assert cli.main(["run", QUICKSTART]) == status

    said = capsys.readouterr().err
    assert said.startswith(words)
    assert said.count("\n") == 1


def test_a_fault_of_the_program_keeps_its_traceback(pipeline: types.ModuleType) -> None:
    pipeline.run = raising(ZeroDivisionError())  # type: ignore[attr-defined]

    with pytest.raises(ZeroDivisionError):
        cli.main(["run", QUICKSTART])


def test_config_prints_what_a_run_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", QUICKSTART, "--set", "train.steps=17"]) == 0

    listing = capsys.readouterr().out
    assert "name: quickstart" in listing
    assert "  steps: 17" in listing


def test_config_without_a_file_prints_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 0

    assert "name: run" in capsys.readouterr().out


@pytest.mark.parametrize("samples", ["0", "2.5", "many"])
def test_samples_must_be_a_count(samples: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", "runs/x", "--samples", samples])

    assert end.value.code == 2
    assert "whole number from 1 up" in capsys.readouterr().err


def test_the_functions_behind_the_commands_exist() -> None:
    assert importlib.util.find_spec("wmrl_jax.train.pipeline") is not None
    from wmrl_jax.train import pipeline

    for name in ("run", "train", "corpus", "sft", "evaluate", "cases", "tune", "fidelity"):
        assert callable(getattr(pipeline, name))
