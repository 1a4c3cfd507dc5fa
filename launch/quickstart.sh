#!/usr/bin/env bash
# Sets everything up in .venv and runs the main job; run again, it goes on where it stopped.
# Further arguments go to `wmrl run`: bash launch/quickstart.sh --set seed=1 --set name=second
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
setup suite
exec .venv/bin/wmrl run configs/quickstart.yaml "$@"
