# Sourced by the scripts beside it, from the root of the repository:
#   setup EXTRAS   makes .venv with the package and these extras in it (suite,test say), and
#                  installs bubblewrap where it can. Quick where nothing changed since last time.

setup() {
  local extras=$1 python=${PYTHON:-python3} wanted
  local stamp=.venv/.installed-$extras

  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer is needed as '$python'; PYTHON=... names another one." >&2
    return 1
  fi
  wanted="$("$python" -VV) $PWD $(sha256sum pyproject.toml)"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    # Without a working pip it is half made, or its Python was replaced: made anew.
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
      echo "Making .venv ..." >&2
      if ! "$python" -m venv --clear .venv; then
        echo "'$python -m venv' failed; on Debian: apt-get install python3-venv" >&2
        return 1
      fi
    fi
    echo "Installing wmrl-jax[$extras] into .venv ..." >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    printf '%s' "$wanted" >"$stamp"
  fi
  bubblewrap
}

bubblewrap() {
  if command -v bwrap >/dev/null; then return; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing bubblewrap, which isolates the agent's programs ..." >&2
    if apt-get update >/dev/null 2>&1 &&
      apt-get install --yes --no-install-recommends bubblewrap >/dev/null 2>&1; then
      return
    fi
  fi
  echo "bubblewrap is not here and could not be installed (Debian: apt-get install bubblewrap)." >&2
  echo "Without it the agent's programs have resource limits only: they can read your files and" >&2
  echo "use the network." >&2
}
