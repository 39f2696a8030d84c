#!/usr/bin/env bash
# Writes what .venv holds to requirements/cpu-constraints.txt. Local versions (torch's +cpu) go, since where they come from differs.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
"$venv/bin/uv" pip freeze --quiet --python "$python" --exclude-editable |
  grep -E '^[A-Za-z0-9._-]+==' | grep -v '^pip==' | sed 's/+cpu$//' >"$root/requirements/cpu-constraints.txt"
wc -l "$root/requirements/cpu-constraints.txt"
