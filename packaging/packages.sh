#!/usr/bin/env bash
# `packaging/packages.sh BINARIES OUT` makes the packages of the static binaries in the directory BINARIES: a tarball and a .deb,
# and, if pip and npm are there, a wheel and the npm packages, with their checksums.
set -euo pipefail
binaries=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -1)
case "$(uname -m)" in
x86_64) deb_arch=amd64 node_arch=x64 ;;
aarch64) deb_arch=arm64 node_arch=arm64 ;;
*) echo "no packages for $(uname -m)" >&2; exit 1 ;;
esac
machine=$(uname -m)
# The same input makes the same packages.
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 0)}"

# Manual pages and completions.
mkdir -p "$work/man" "$work/completions"
for program in exeat exeat-tools; do
    "$binaries/$program" man >"$work/man/$program.1"
    for shell in bash zsh fish; do "$binaries/$program" completions "$shell" >"$work/completions/$program.$shell"; done
done

tarball="exeat-$version-$machine-linux"
tree="$work/$tarball"
mkdir -p "$tree"
install -m 0755 "$binaries/exeat" "$binaries/exeat-tools" "$tree/"
cp -r "$root/README.md" "$root/LICENSE" "$root/CHANGELOG.md" "$root/config" "$root/docs" "$here/systemd" "$work/man" "$work/completions" "$tree/"
if command -v cargo-cyclonedx >/dev/null; then
    # It writes beside the manifest.
    mkdir "$work/sbom"
    cp -r "$root/Cargo.toml" "$root/Cargo.lock" "$root/src" "$root/benches" "$root/tests" "$work/sbom/"
    (cd "$work/sbom" && cargo cyclonedx --quiet --format json --spec-version 1.5 --no-build-deps --override-filename exeat.cdx)
    cp "$work/sbom/exeat.cdx.json" "$tree/"
    cp "$work/sbom/exeat.cdx.json" "$out/exeat-$version.cdx.json"
else
    echo 'no cargo-cyclonedx: the tarball is made without a list of components (SBOM)'
fi
tar --create --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 -C "$work" "$tarball" |
    gzip --no-name >"$out/$tarball.tar.gz"

# Debian. The unit of the package runs the binary of the package.
deb="$work/deb"
mkdir -p "$deb/DEBIAN" "$deb/usr/bin" "$deb/usr/lib/systemd/system" "$deb/usr/lib/sysusers.d" "$deb/etc/exeat" \
    "$deb/usr/share/doc/exeat" "$deb/usr/share/man/man1" "$deb/usr/share/bash-completion/completions" \
    "$deb/usr/share/zsh/vendor-completions" "$deb/usr/share/fish/vendor_completions.d"
install -m 0755 "$binaries/exeat" "$binaries/exeat-tools" "$deb/usr/bin/"
sed 's,/usr/local/bin/exeat,/usr/bin/exeat,' "$here/systemd/exeat.service" >"$deb/usr/lib/systemd/system/exeat.service"
cp "$here/systemd/exeat.socket" "$here/systemd/exeat-admin.socket" "$deb/usr/lib/systemd/system/"
cp "$here/systemd/exeat.sysusers" "$deb/usr/lib/sysusers.d/exeat.conf"
cp "$root/config/default.toml" "$deb/etc/exeat/exeat.toml"
cp "$root/LICENSE" "$deb/usr/share/doc/exeat/copyright"
for program in exeat exeat-tools; do
    gzip -9 --no-name <"$work/man/$program.1" >"$deb/usr/share/man/man1/$program.1.gz"
    cp "$work/completions/$program.bash" "$deb/usr/share/bash-completion/completions/$program"
    cp "$work/completions/$program.zsh" "$deb/usr/share/zsh/vendor-completions/_$program"
    cp "$work/completions/$program.fish" "$deb/usr/share/fish/vendor_completions.d/$program.fish"
done
echo /etc/exeat/exeat.toml >"$deb/DEBIAN/conffiles"
sed "s/VERSION/$version/; s/DEB_ARCH/$deb_arch/" "$here/deb/control" >"$deb/DEBIAN/control"
for script in postinst prerm postrm; do install -m 0755 "$here/deb/$script" "$deb/DEBIAN/$script"; done
find "$deb" -type f ! -path '*/DEBIAN/p*' ! -path '*/usr/bin/*' -exec chmod 0644 {} +
find "$deb" -type d -exec chmod 0755 {} +
dpkg-deb --root-owner-group --build "$deb" "$out/exeat_${version}_$deb_arch.deb" >/dev/null

# Python. A static binary runs with any libc, so the oldest tag that pip knows for each is right.
if [ -n "${PYTHON:-}" ]; then
    cp -r "$here/python" "$work/python"
    cp "$binaries/exeat" "$binaries/exeat-tools" "$root/README.md" "$work/python/"
    sed -i "s/^version = .*/version = \"$version\"/" "$work/python/pyproject.toml"
    "$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/wheel" "$work/python"
    "$PYTHON" -m wheel tags --remove --platform-tag "manylinux_2_17_$machine.manylinux2014_$machine.musllinux_1_1_$machine" \
        "$work"/wheel/exeat-*.whl >/dev/null
    cp "$work"/wheel/exeat-*.whl "$out/"
fi

# npm: one package for the commands, and one with the binaries of each platform.
if command -v npm >/dev/null; then
    cp -r "$here/npm" "$work/npm"
    cp "$binaries/exeat" "$binaries/exeat-tools" "$work/npm/platform/"
    sed -i "s/\"0\.0\.0\"/\"$version\"/g; s/NODE_ARCH/$node_arch/g" "$work"/npm/*/package.json
    for package in exeat platform; do
        (cd "$work/npm/$package" && npm pack --silent --pack-destination "$out" >/dev/null)
    done
fi

(cd "$out" && sha256sum -- exeat* >SHA256SUMS)
ls -l "$out"
