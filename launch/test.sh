#!/usr/bin/env bash
# Sets everything up in .venv and passes the tests. Further arguments go to pytest.
# WMRL_EXTRAS=parity adds extras of pyproject.toml, so that fewer tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
setup "suite,test${WMRL_EXTRAS:+,$WMRL_EXTRAS}"
python=.venv/bin/python
$python -m ruff check .
$python -m ruff format --check .
$python -m pyright
$python -m pytest -q -n 2 "$@"
