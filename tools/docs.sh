#!/usr/bin/env bash
# usage: tools/docs.sh [FOLDER]
# Build the documentation site into site/ (or FOLDER). Every warning is an error: links, anchors, pages that no menu names.
# The pages refer to nothing on the network. `python -m http.server -d site` serves them, with the search.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c 'import material, mkdocstrings' 2>/dev/null || { echo "the site needs the extra docs: tools/setup.sh analysis,dev,docs" >&2; exit 1; }
export NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true
exec "$python" -m mkdocs build --strict --clean --site-dir "${1:-$PWD/site}"
