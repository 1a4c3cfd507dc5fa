"""Changes modules, builtins, threads, descriptors and limits of the process it was forked into."""


def test_patched_libraries_stay_patched_only_for_the_program(sandbox):
    execution = sandbox.run(
        """
        import builtins, os, sys, json
        import numpy as np, pandas as pd, sklearn.metrics
        np.mean = lambda *_: 42
        sklearn.metrics.accuracy_score = lambda *_: 1.0
        pd.DataFrame.to_csv = pd.read_csv = None
        builtins.print = builtins.open = builtins.len = None
        json.dumps = os.fork = os._exit = os.kill = None
        sys.modules.clear()
        sys.path.clear()
        sys.meta_path.clear()
        """
    )
    assert execution.status in ("ok", "runtime_error")


def test_threads_folders_and_masks_do_not_last(sandbox):
    execution = sandbox.run(
        """
        import os, threading, time, gc, signal, sys
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        os.chdir("/"); os.umask(0o777); gc.disable(); sys.setrecursionlimit(50)
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        """
    )
    assert execution.status == "ok", execution.output


def test_closing_every_descriptor_harms_no_one(sandbox):
    execution = sandbox.run("import os\nos.closerange(0, 4096)")
    assert execution.status in ("ok", "runtime_error")


def test_writing_into_every_descriptor_cannot_forge_a_result(sandbox):
    execution = sandbox.run(
        """
        import os
        for descriptor in range(3, 200):
            try:
                os.write(descriptor, b"ready\\nMemoryError")
            except OSError:
                pass
        os._exit(3)
        """
    )
    assert execution.status in ("runtime_error", "out_of_memory")
    assert execution.submission is None


def test_the_random_seed_of_one_program_does_not_reach_the_next(sandbox):
    program = "import random, numpy as np\nprint(random.random(), np.random.rand(), hash('a'))"
    first = sandbox.run(program)
    sandbox.run("import random, numpy as np\nrandom.seed(5); np.random.seed(5)")
    assert first.status == "ok"
    assert sandbox.run(program).output == first.output
