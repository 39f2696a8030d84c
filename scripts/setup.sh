# Sourced by ./demo, ./test and .ci/run: makes .venv and installs midstream into it, or returns at once when that is current.
#
#   MIDSTREAM_EXTRA    vLLM to install: "cpu" (default, pinned) or "vllm" (GPU, newest in the supported range)
#   MIDSTREAM_PYTHON   Python to make the environment with (default: the first of python3.11, 3.12, 3.13, python3 that is >= 3.11)
#   PIP_FIND_LINKS     a folder that holds a CPU build of torch; unset: uv fetches PyTorch's own
#
# Leaves $root, $python and what vLLM's CPU build wants in the environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python
extra=${MIDSTREAM_EXTRA:-cpu}
constraints=$root/requirements/$extra-constraints.txt
overrides=$root/requirements/$extra-overrides.txt

find_python() {
  local candidate
  for candidate in ${MIDSTREAM_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "midstream needs Python 3.11 or newer: install it, or name one in MIDSTREAM_PYTHON" >&2
  return 1
}

fingerprint() {
  local file
  {
    echo "$root $extra"
    for file in "$root/pyproject.toml" "$root/scripts/setup.sh" "$constraints" "$overrides"; do
      if [[ -e $file ]]; then cat "$file"; fi
    done
  } | sha256sum | cut -d' ' -f1
}

# pip and uv name every index location that they skip and every package that they add: keep the lines that say how far they are.
# On a terminal they draw progress bars, and those do not survive a pipe.
quieter() {
  if [[ -t 2 ]]; then
    "$@"
  else
    "$@" 2>&1 | awk '!/Location .* is ignored|^ [-+~] / { print "      " $0; fflush() }'
  fi
}

install() {
  local options=()
  if [[ -e $constraints ]]; then options+=(-c "$constraints"); fi
  if [[ -e $overrides ]]; then options+=(--override "$overrides"); fi
  if [[ -n ${PIP_FIND_LINKS:-} ]]; then
    export UV_FIND_LINKS=${PIP_FIND_LINKS// /,}
  elif [[ $extra == cpu ]]; then
    options+=(--torch-backend=cpu)
  else
    options+=(--torch-backend=auto)
  fi
  quieter "$venv/bin/uv" pip install --python "$python" "${options[@]}" -e "$root[$extra,dev]"
}

setup() {
  local stamp=$venv/.midstream-$extra base wanted
  wanted=$(fingerprint)
  if [[ -e $stamp && $(<"$stamp") == "$wanted" ]] && "$python" -c '' 2>/dev/null; then return; fi
  echo "[1/3] environment in .venv" >&2
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    "$base" -m venv --clear "$venv"
  fi
  rm -f "$venv"/.midstream-*
  echo "[2/3] uv, the installer" >&2
  quieter "$python" -m pip install --quiet --disable-pip-version-check -c "$root/requirements/cpu-constraints.txt" uv
  echo "[3/3] midstream[$extra,dev] and what it needs: some 600 MB to fetch where nothing is cached" >&2
  install
  echo "$wanted" >"$stamp"
  echo "      ready after ${SECONDS} s" >&2
}

# Two commands started together set up once: the second waits for the first.
exec 9>"$root/.setup.lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
  echo "waiting for a set-up that is running already" >&2
  flock 9
fi
setup
exec 9>&-

export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}                # GiB; enough for the bundled model
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}     # several ranks on one NUMA node
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}                                # everything that is run here ships with the package
unset PYTHONDONTWRITEBYTECODE                                             # else every engine process compiles torch and vLLM anew
export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
