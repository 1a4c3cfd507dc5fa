"""What of the host a sandbox shows."""

import sys
import tempfile
from pathlib import Path

import pytest

from wmrl_jax.sandbox import isolation
from wmrl_jax.sandbox.isolation import View
from wmrl_jax.sandbox.process import ProcessBackend, best_isolation, check


def test_the_interpreter_is_shown_and_nothing_wide():
    shown = isolation.interpreter_paths()
    assert any(path == Path(sys.prefix) or path in Path(sys.prefix).parents for path in shown)
    for wide in ("/", "/usr", "/home", "/root", "/etc", "/var", "/tmp"):
        assert Path(wide) not in shown
    assert Path.cwd() not in shown
    assert Path.home() not in shown


def test_no_shown_path_lies_in_another():
    shown = isolation.interpreter_paths()
    assert not [path for path in shown if set(path.parents) & set(shown)]


def test_hidden_folders_are_masked_where_they_appear(tmp_path):
    (tmp_path / "real" / "package" / "data").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    hidden = [tmp_path / "link" / "package" / "data"]
    assert isolation.masked(hidden, [tmp_path / "real"]) == [tmp_path / "real/package/data"]
    assert isolation.masked(hidden, [tmp_path / "link"]) == [tmp_path / "link/package/data"]
    assert isolation.masked(hidden, [tmp_path / "other"]) == []


def test_this_package_is_masked_where_it_is_installed():
    package = Path(isolation.__file__).parents[1]
    assert isolation.masked([], [package.parent]) == [package]


def test_no_command_shares_the_network_or_the_processes_of_the_host():
    for kind in ("root", "user"):
        command = isolation.command(kind, View((), ()), 3)
        assert {"--unshare-net", "--unshare-pid", "--unshare-ipc"} <= set(command)
        assert "--share-net" not in command
        assert "--bind" not in command  # nothing of the host can be written


def test_user_ids_of_slots_differ():
    assert len({isolation.program_uid(slot) for slot in range(64)}) == 64
    assert isolation.program_uid(0) > 65536


def test_a_closed_file_makes_a_folder_unreadable_by_others(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("")
    tmp_path.chmod(0o755)
    assert isolation.readable_by_others(tmp_path)
    (tmp_path / "sub" / "a").chmod(0o600)
    assert not isolation.readable_by_others(tmp_path)


def test_the_check_says_in_words_what_is_in_force():
    text = check()
    assert text.startswith("in force: ")
    assert "memory limited by" in text


def test_an_interpreter_below_tmp_is_not_covered_by_the_scratch_folder(monkeypatch):
    monkeypatch.setattr(isolation, "interpreter_paths", lambda: [Path("/tmp/clone/.venv")])
    command = " ".join(isolation.command("root", View((), ()), 3))
    assert "--ro-bind /tmp/clone/.venv /tmp/clone/.venv" in command
    assert "--symlink /sandbox/tmp /tmp" not in command
    monkeypatch.setattr(isolation, "interpreter_paths", lambda: [Path("/home/someone/clone/.venv")])
    assert "--symlink /sandbox/tmp /tmp" in " ".join(isolation.command("root", View((), ()), 3))


def test_programs_have_a_tmp_of_their_own_also_where_the_interpreter_lies_below_it(
    tasks, limits, monkeypatch
):
    if best_isolation()[0] == "none":
        pytest.skip("no isolation is possible on this host: " + "; ".join(best_isolation()[1]))
    shown = isolation.interpreter_paths()
    data = tasks / "ours" / "public"
    with tempfile.TemporaryDirectory(dir="/tmp") as clone:
        library = Path(clone) / ".venv"
        library.mkdir()
        Path(clone).chmod(0o755)
        (library / "module.py").write_text("kept")
        monkeypatch.setattr(isolation, "interpreter_paths", lambda: [*shown, library])
        program = f"""
import os
assert not os.path.exists("/tmp/own")
with open("/tmp/own", "w") as file:
    file.write("mine")
print(open("/tmp/own").read(), open("{library}/module.py").read())
try:
    open("{library}/module.py", "w")
except OSError as error:
    print(error.strerror)
"""
        with ProcessBackend(1, data_dirs=[data]) as backend:
            outputs = [backend.run(program, data, limits).output for _ in range(2)]
        assert (library / "module.py").read_text() == "kept"
    assert outputs == ["mine kept\nRead-only file system\n"] * 2
