#!/bin/sh
# Bring $VENV in line with requirements.lock. Does nothing when it already is.
# Needs only a Python >= 3.11 with venv and pip; PYTHON=... names one, else the newest tested one found is taken.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
stamp=$VENV/installed.lock

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }
version() { "$1" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null || echo none; }

if [ -n "${PYTHON:-}" ] && [ "$(version "$PYTHON")" != "$(version "$VENV/bin/python")" ]; then
    fresh=yes # another interpreter was asked for by name
elif usable "$VENV/bin/python"; then
    fresh=no
    cmp -s requirements.lock "$stamp" && exit 0
else
    fresh=yes
fi

if [ $fresh = yes ]; then
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3.13 python3.12 python3.11 python3 python; fi
    chosen='' bare=''
    for candidate in "$@"; do
        usable "$candidate" || continue
        if has_venv "$candidate"; then
            chosen=$candidate
            break
        fi
        bare=${bare:-$candidate}
    done
    if [ -z "$chosen" ] && [ -n "$bare" ]; then
        echo "$bare (Python $(version "$bare")) comes without venv or ensurepip, and make needs them to build $VENV." >&2
        echo "Install them (Debian, Ubuntu: apt install python$(version "$bare")-venv), or name another: make PYTHON=/path/to/python" >&2
        exit 1
    fi
    if [ -z "$chosen" ]; then
        echo "No Python 3.11 or newer was found (tried: $*)." >&2
        echo "Install one, or name it: make PYTHON=/path/to/python" >&2
        exit 1
    fi
    echo "Creating $VENV with Python $(version "$chosen") ($chosen)"
    "$chosen" -m venv --clear "$VENV"
fi

echo "Installing requirements.lock into $VENV (about 300 MB to download the first time)"
rm -f "$stamp"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install --no-deps --only-binary :all: --require-hashes -r requirements.lock
pip install --no-deps --no-build-isolation --editable .
cp requirements.lock "$stamp" # last: a set-up that was interrupted starts again
