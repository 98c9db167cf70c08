#!/bin/sh
# Builds the files of the image. `packaging/tree.sh BINARY OUT` makes OUT/root, owned by root, and OUT/state, which is the
# daemon's. The Dockerfile copies both; the checks make a tar of them.
set -eu
binary=$1 out=$2 here=$(dirname "$0")

mkdir -p "$out/root/etc/exeat" "$out/root/var/lib" "$out/state"
mkdir -m 0700 "$out/state/exeat"
install -m 0755 "$binary" "$out/root/exeat"
install -m 0644 "$here/container.toml" "$out/root/etc/exeat/exeat.toml"
