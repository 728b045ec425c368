#!/bin/sh
# make_venv.sh FOLDER: a virtual environment with pip, from the newest Python >= 3.10 or from $PYTHON.
# Where the system's Python comes without venv (Debian, Ubuntu), installs it with the system's package manager.
set -eu
folder=$1

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if command -v "$candidate" >/dev/null 2>&1 && recent_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "make_venv.sh: no Python >= 3.10 found (tried ${PYTHON:-python3, python3.13 … python3.10}); install one or set PYTHON" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null 2>&1; then sudo "$@"; else return 1; fi
}

install_venv_package() {
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if command -v apt-get >/dev/null 2>&1; then
        as_root apt-get update -qq && as_root apt-get install -y -qq "python$version-venv" >/dev/null
    else
        return 1
    fi
}

python=$(find_python)
if [ -x "$folder/bin/python" ] && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$python has no venv module: installing it" >&2
    install_venv_package || {
        echo "make_venv.sh: $python can't create virtual environments and they can't be installed from here." >&2
        echo "Install its venv package as root (Debian, Ubuntu: apt-get install python3-venv), then run make again." >&2
        exit 1
    }
fi
rm -rf "$folder"
"$python" -m venv "$folder"
