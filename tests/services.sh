#!/bin/sh
# Starts what the slow tests need, and stops only what it started: `sh tests/services.sh start|stop`.
# Today that is a Docker Engine, busybox for images, the programs of PostgreSQL and Redis, and Chromium. What it may not install or start it names, and exits 0;
# the tests then skip with that reason (and fail in CI).
set -u

STATE=${AGENTLOOP_SERVICES:-$(cd "$(dirname "$0")/.." && pwd)/.venv/services}
PIDFILE=$STATE/dockerd.pid
LOG=$STATE/dockerd.log
WAIT_S=60

answers() { # 0 when an engine answers on its socket, found without the docker command line
    python3 - <<'PY' 2>/dev/null
import os, socket, sys
where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
if not where.startswith("unix://"):
    sys.exit(1)
with socket.socket(socket.AF_UNIX) as s:
    s.settimeout(2)
    s.connect(where[len("unix://"):])
    s.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
    sys.exit(0 if b" 200 " in s.recv(256) else 1)
PY
}

busybox() { # a static one, of which tests make images
    if [ -x /bin/busybox ] && ! ldd /bin/busybox >/dev/null 2>&1; then
        return
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "busybox: no static one; install busybox-static"
        return
    fi
    mkdir -p "$STATE"
    if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends busybox-static; } \
        >"$STATE/apt-busybox.log" 2>&1 </dev/null; then
        echo "busybox: installed busybox-static"
    else
        echo "busybox: busybox-static cannot be installed; see $STATE/apt-busybox.log"
    fi
}

postgres() { # of which the tests start a server of their own
    if [ -n "$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null)" ] || command -v initdb >/dev/null; then
        return
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "postgresql: none here; install it"
        return
    fi
    mkdir -p "$STATE"
    if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends postgresql; } \
        >"$STATE/apt-postgresql.log" 2>&1 </dev/null; then
        echo "postgresql: installed"
    else
        echo "postgresql: cannot be installed; see $STATE/apt-postgresql.log"
    fi
}

redis() { # of which the tests start a server of their own
    if command -v redis-server >/dev/null; then
        return
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "redis: none here; install redis-server"
        return
    fi
    mkdir -p "$STATE"
    if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends redis-server; } \
        >"$STATE/apt-redis.log" 2>&1 </dev/null; then
        echo "redis: installed"
    else
        echo "redis: cannot be installed; see $STATE/apt-redis.log"
    fi
}

browser() { # which the tests of the pages drive
    if command -v chromium >/dev/null; then
        return
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "chromium: none here; install it"
        return
    fi
    mkdir -p "$STATE"
    if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } \
        >"$STATE/apt-chromium.log" 2>&1 </dev/null; then
        echo "chromium: installed"
    else
        echo "chromium: cannot be installed; see $STATE/apt-chromium.log"
    fi
}

base_image() { # what the tasks under evals/ begin with
    if ! answers || ! command -v docker >/dev/null || docker image inspect agentloop/python:1 >/dev/null 2>&1; then
        return
    fi
    mkdir -p "$STATE"
    echo "image: making agentloop/python:1 (two minutes, once)"
    if { command -v debootstrap || { apt-get update && apt-get install -y --no-install-recommends debootstrap; }; } \
        >"$STATE/image.log" 2>&1 </dev/null &&
        PACKAGES=python3,python3-pytest sh "$(dirname "$0")/../sandboxes/base.sh" agentloop/python:1 >>"$STATE/image.log" 2>&1; then
        echo "image: made agentloop/python:1"
    else
        echo "image: agentloop/python:1 cannot be made; see $STATE/image.log"
    fi
}

ours() { # 0 when the pidfile names a dockerd that is alive
    [ -f "$PIDFILE" ] && grep -q dockerd "/proc/$(cat "$PIDFILE")/comm" 2>/dev/null
}

start() {
    if answers; then
        echo "docker: an engine answers already"
        return
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "docker: no engine answers, and only root may start one; start it, then run this again"
        return
    fi
    did="started"
    if ! command -v dockerd >/dev/null; then
        if ! command -v apt-get >/dev/null; then
            echo "docker: no dockerd and no apt-get to install it with; install a Docker Engine"
            return
        fi
        mkdir -p "$STATE"
        if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends docker.io; } \
            >"$STATE/apt.log" 2>&1 </dev/null; then
            echo "docker: docker.io cannot be installed; see $STATE/apt.log"
            return
        fi
        did="installed and started"
        if answers; then
            echo "docker: installed docker.io, its engine answers"
            return
        fi
    fi
    mkdir -p "$STATE"
    if ! ours; then
        if command -v setsid >/dev/null; then
            setsid dockerd >"$LOG" 2>&1 </dev/null &
        else
            nohup dockerd >"$LOG" 2>&1 </dev/null &
        fi
        echo $! >"$PIDFILE"
    fi
    waited=0
    while [ "$waited" -lt "$WAIT_S" ]; do
        if answers; then
            echo "docker: $did dockerd, pid $(cat "$PIDFILE"), log $LOG"
            return
        fi
        if ! kill -0 "$(cat "$PIDFILE")" 2>/dev/null; then
            rm -f "$PIDFILE"
            echo "docker: dockerd ended at once: $(tail -n 1 "$LOG" | cut -c 1-200); see $LOG"
            return
        fi
        sleep 1
        waited=$((waited + 1))
    done
    echo "docker: dockerd did not answer in $WAIT_S s; see $LOG"
}

stop() {
    if ! ours; then
        rm -f "$PIDFILE"
        echo "docker: nothing to stop"
        return
    fi
    pid=$(cat "$PIDFILE")
    kill "$pid"
    waited=0
    while kill -0 "$pid" 2>/dev/null && [ "$waited" -lt "$WAIT_S" ]; do
        sleep 1
        waited=$((waited + 1))
    done
    if kill -0 "$pid" 2>/dev/null; then
        echo "docker: dockerd, pid $pid, did not end in $WAIT_S s; see $LOG"
        return
    fi
    rm -f "$PIDFILE"
    echo "docker: stopped dockerd, pid $pid"
}

case "${1:-}" in
start)
    busybox
    postgres
    redis
    browser
    start
    base_image
    ;;
stop) stop ;;
*)
    echo "usage: sh tests/services.sh start|stop" >&2
    exit 2
    ;;
esac
