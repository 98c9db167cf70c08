#!/bin/sh
# `packaging/context.sh OUT` copies what .dockerignore leaves of this directory, as a container engine does for the build.
set -eu
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
# The file excludes everything and then names what is left; a test holds it to that form.
sed -n 's/^!//p' .dockerignore | while read -r path; do
    mkdir -p "$(dirname "$out/$path")"
    cp -R "$path" "$out/$path"
done
