"""Starts the supervisor when the folder is run as a script, under the package name `inside`."""

import importlib
import importlib.util
import os
import sys


def _import_as_package() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        "inside", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None:
        raise ImportError(f"no supervisor in {folder}")
    sys.modules["inside"] = importlib.util.module_from_spec(spec)
    # Programs must not find our modules by name.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]


if __name__ == "__main__":
    _import_as_package()
    importlib.import_module("inside.supervise").main(int(sys.argv[1]))
