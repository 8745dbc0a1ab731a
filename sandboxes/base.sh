#!/bin/sh
# Makes debian:bookworm-slim, which the recipes here begin with, where no registry can be reached:
#     sh sandboxes/base.sh [TAG]
# Needs root, a Docker Engine and debootstrap (`apt install debootstrap`), and takes about two minutes. An image
# that is there already is left alone. MIRROR names another Debian mirror, PACKAGES what to install beside the base (then
# commands start in /app, as in the recipe of that image):
#     PACKAGES=python3,python3-pytest sh sandboxes/base.sh agentloop/python:1
set -eu

TAG=${1:-debian:bookworm-slim}
MIRROR=${MIRROR:-http://deb.debian.org/debian}

say() { echo "base.sh: $*"; }

for program in docker debootstrap tar; do
    command -v "$program" >/dev/null || {
        say "no $program; install it, then run this again" >&2
        exit 1
    }
done
[ "$(id -u)" = 0 ] || {
    say "debootstrap needs root; run this as root, or \`docker pull $TAG\`" >&2
    exit 1
}
if docker image inspect "$TAG" >/dev/null 2>&1; then
    say "$TAG is there already"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
say "fetching Debian from $MIRROR"
if ! debootstrap --variant=minbase ${PACKAGES:+--include="$PACKAGES"} bookworm "$work/root" "$MIRROR" >"$work/log" 2>&1; then
    say "debootstrap failed: $(tail -n 3 "$work/log" | tr '\n' ' ')" >&2
    exit 1
fi
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* \
    "$work"/root/usr/share/doc/* "$work"/root/usr/share/man/* "$work"/root/usr/share/locale/*
tar -C "$work/root" --one-file-system -cf - . | docker import --change 'CMD ["/bin/bash"]' ${PACKAGES:+--change 'WORKDIR /app'} - "$TAG" >/dev/null
say "made $TAG"
