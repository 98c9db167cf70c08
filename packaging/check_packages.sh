#!/usr/bin/env bash
# `packaging/check_packages.sh PACKAGES` installs each package of packaging/packages.sh into an empty environment and runs the
# demo from it. The .deb is installed over a copy of this system's files that is thrown away, which takes root.
set -euo pipefail
packages=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'packages: %s\n' "$*" >&2; exit 1; }

# `demo COMMAND…` runs the demo of this exeat, in a directory of its own and without variables.
demo() {
    mkdir -p "$work/home"
    (cd "$work/home" && env -i PATH="$PATH" HOME="$work/home" "$@" demo) >"$work/said" || fail "the demo fails: $(cat "$work/said")"
    [ "$(grep -c '200 from 127.0.0.1' "$work/said")" -ge 5 ] || fail "the demo shows something else: $(cat "$work/said")"
}

(cd "$packages" && sha256sum --quiet --check SHA256SUMS)

mkdir "$work/tarball"
tar --extract --file "$packages"/exeat-*-linux.tar.gz -C "$work/tarball" --strip-components 1
demo "$work/tarball/exeat"
"$work/tarball/exeat-tools" --version >/dev/null
for file in LICENSE README.md config/example.toml systemd/exeat.service man/exeat.1 completions/exeat.bash; do
    [ -s "$work/tarball/$file" ] || fail "the tarball has no $file"
done
if [ -e "$work/tarball/exeat.cdx.json" ]; then
    grep -q '"name": "rustls"' "$work/tarball/exeat.cdx.json" || fail "the list of components has no rustls"
fi
echo "tarball: installed, demo run"

# The action lets its script reach the hosts that it names. Nothing is asked for here but what the proxy itself refuses.
script='[ "$(curl --silent --proxy "$HTTP_PROXY" --output /dev/null --write-out "%{http_code}" http://not-named.test/)" = 403 ] && echo "refused" && exit 5'
status=0
(cd "$work" && EXEAT_ALLOW='named.test *.named.test' EXEAT_SCRIPT="$script" bash "$here/action.sh" "$packages") >"$work/said" 2>&1 || status=$?
if [ "$status" != 5 ] || ! grep -q '^refused$' "$work/said"; then fail "the action ends with $status: $(cat "$work/said")"; fi
echo "action: its script has run behind the proxy"

if [ "$(id -u)" = 0 ] && unshare --mount true 2>/dev/null; then
    mkdir "$work/over"
    export packages work
    export -f demo fail
    unshare --mount bash -euo pipefail <<'INSIDE'
        mount -t tmpfs tmpfs "$work/over"
        mkdir "$work/over/upper" "$work/over/work" "$work/over/root"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$work/over/upper,workdir=$work/over/work" "$work/over/root"
        cp "$packages"/exeat_*.deb "$work/over/root/exeat.deb"
        mount -t proc proc "$work/over/root/proc"
        mount --rbind /dev "$work/over/root/dev"
        chroot "$work/over/root" bash -euo pipefail <<'CHROOT'
            as_exeat() { setpriv --reuid=exeat --regid=exeat --init-groups env -i HOME=/var/lib/exeat STATE_DIRECTORY=/var/lib/exeat "$@"; }
            # This machine may run an exeat of its own. Its state is only hidden here.
            rm -rf /var/lib/exeat /etc/exeat
            dpkg -i /exeat.deb >/dev/null
            [ "$(stat -c '%U %a' /var/lib/exeat)" = 'exeat 700' ] || { echo "the state directory: $(stat -c '%U %a' /var/lib/exeat)"; exit 1; }
            cd /var/lib/exeat
            as_exeat /usr/bin/exeat demo >/tmp/said
            [ "$(grep -c '200 from 127.0.0.1' /tmp/said)" -ge 5 ] || { cat /tmp/said; exit 1; }
            as_exeat /usr/bin/exeat check -c /etc/exeat/exeat.toml
            grep -q '^ExecStart=/usr/bin/exeat serve' /usr/lib/systemd/system/exeat.service
            if command -v systemd-analyze >/dev/null; then
                (cd /usr/lib/systemd/system && systemd-analyze verify --recursive-errors=no exeat.service exeat.socket exeat-admin.socket)
            fi
            man_pages=$(dpkg -L exeat | grep -c '/man1/.')
            [ "$man_pages" = 2 ] || { echo "$man_pages manual pages"; exit 1; }
            dpkg -r exeat >/dev/null
            # `set -e` ignores all but the last of a list.
            [ ! -e /usr/bin/exeat ]
            [ -e /etc/exeat/exeat.toml ]
            dpkg -P exeat >/dev/null
            [ ! -e /etc/exeat/exeat.toml ]
            [ -d /var/lib/exeat ]
CHROOT
INSIDE
    echo ".deb: installed, demo run, removed"
else
    echo 'skipped, because it needs root and mounts: .deb'
fi

wheel=$(find "$packages" -name 'exeat-*.whl')
if [ -n "$wheel" ]; then
    "$PYTHON" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-index "$wheel"
    demo "$work/venv/bin/exeat"
    "$work/venv/bin/exeat-tools" --version >/dev/null
    "$work/venv/bin/pip" uninstall --quiet --yes exeat
    [ ! -e "$work/venv/bin/exeat" ] || fail "the wheel leaves its binary"
    echo "wheel: installed, demo run, removed"
else
    echo 'skipped, because there is none: wheel'
fi

if [ -n "$(find "$packages" -name 'exeat-linux-*.tgz')" ]; then
    mkdir "$work/npm"
    (
        cd "$work/npm"
        npm install --silent --offline --no-audit --no-fund "$packages"/exeat-linux-*.tgz "$packages"/exeat-[0-9]*.tgz
        status=0
        ./node_modules/.bin/exeat run -- sh -c 'exit 7' 2>/dev/null || status=$?
        [ "$status" = 7 ] || fail "npm: the exit status is $status"
        # A signal reaches the command, and its end is that of the command.
        ./node_modules/.bin/exeat run -- sh -c 'trap "exit 9" TERM; echo ready; while :; do sleep 0.1; done' >said 2>/dev/null &
        started=$!
        for _ in $(seq 100); do grep -q ready said && break; sleep 0.1; done
        # Node itself: a node from a Python package is started by a script that passes no signal on.
        for process in /proc/[0-9]*; do
            if { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -Eq "^([^ ]*/)?node $PWD/node_modules/.bin/exeat run|^([^ ]*/)?node [.]/node_modules/.bin/exeat run"; then
                kill -TERM "${process#/proc/}"
            fi
        done
        status=0
        wait "$started" || status=$?
        [ "$status" = 9 ] || fail "npm: the exit status after a signal is $status"
    )
    demo "$work/npm/node_modules/.bin/exeat"
    demo npx --prefix "$work/npm" --offline exeat
    echo "npm: installed, demo run"
else
    echo 'skipped, because there is none: npm'
fi
