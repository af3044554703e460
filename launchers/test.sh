#!/usr/bin/env bash
# Lint, types and tests; arguments go to pytest: launchers/test.sh tests/unit -x
set -euo pipefail
# shellcheck source=launchers/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$DS_TSP_ROOT"
ruff check .
mypy ds_tsp
exec pytest -q "$@"
