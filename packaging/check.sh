#!/usr/bin/env bash
# `packaging/check.sh BINARY`: the binary needs nothing but itself, and neither does the image that is made of it.
set -euo pipefail
binary=$1 here=$(dirname "$0")
work=$(mktemp -d)
served=
trap 'if [ -n "$served" ]; then kill "$served" 2>/dev/null || true; fi; rm -rf "$work"' EXIT
fail() { printf 'packaging: %s\n' "$*" >&2; exit 1; }

# No loader and no library.
if readelf -lW "$binary" | grep -q INTERP; then fail "the binary wants a loader"; fi
if readelf -dW "$binary" | grep -q NEEDED; then fail "the binary wants libraries"; fi

# As another root, which only root may choose; a user is one in a namespace of its own.
if [ "$(id -u)" = 0 ]; then
    enter=("$(command -v chroot)" --userspec=65532:65532)
elif unshare -r true 2>/dev/null; then
    enter=("$(command -v unshare)" -r "$(command -v chroot)")
else
    fail "neither root nor user namespaces: nothing can be run in an empty directory here"
fi

# `inside ROOT COMMAND…` becomes the command.
inside() { exec env -i "${image[@]}" "${enter[@]}" "$@"; }
image=(EXEAT_LOG_FORMAT=text EXEAT_CONFIG=/etc/exeat/exeat.toml STATE_DIRECTORY=/var/lib/exeat TMPDIR=/var/lib/exeat)

# Nothing there but the binary and where temporary files go: no /etc, no /dev, no /proc.
mkdir "$work/empty"
cp "$binary" "$work/empty/exeat"
(inside "$work/empty" /exeat --version)
mkdir -p -m 0777 "$work/empty/var/lib/exeat"
(inside "$work/empty" /exeat demo) >"$work/demo"
[ "$(grep -c '200 from 127.0.0.1' "$work/demo")" -ge 5 ] || fail "the demo shows something else: $(cat "$work/demo")"

# The image, run as its own user. Ports of its configuration may be taken here.
sh "$here/tree.sh" "$binary" "$work/tree"
tar --create --file "$work/image.tar" --sort=name --mtime=@0 --owner=0 --group=0 -C "$work/tree/root" .
tar --append --file "$work/image.tar" --sort=name --mtime=@0 --owner=65532 --group=65532 \
    --transform 's,^,./var/lib/,' -C "$work/tree/state" exeat
mkdir "$work/image"
tar --extract --file "$work/image.tar" --preserve-permissions -C "$work/image"
sed -i 's/0\.0\.0\.0:3128/127.0.0.1:0/; s/127\.0\.0\.1:3129/127.0.0.1:0/' "$work/image/etc/exeat/exeat.toml"
(inside "$work/image" /exeat check)

# It comes up without /etc/resolv.conf, says so, and drains.
inside "$work/image" /exeat serve 2>"$work/said" & served=$!
for _ in $(seq 200); do grep -q '^exeat: ' "$work/said" && break; sleep 0.1; done
grep -q '^exeat: ready' "$work/said" || fail "it does not come up: $(cat "$work/said")"
grep -q 'no DNS server is configured' "$work/said" || fail "it says nothing about DNS: $(cat "$work/said")"
at="$(sed -n 's/^exeat: ready;.* admin on //p' "$work/said")"
state="$( (inside "$work/image" /exeat --admin "http://$at" health) )"
[ "$state" = ready ] || fail "it is not healthy: $state"
kill "$served"
wait "$served" || fail "it does not drain: $(cat "$work/said")"
served=

printf 'static binary: %s bytes; image: %s bytes\n' "$(stat -c %s "$binary")" "$(stat -c %s "$work/image.tar")"
