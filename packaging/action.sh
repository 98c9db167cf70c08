#!/usr/bin/env bash
# `packaging/action.sh DOWNLOADS` is the script of the GitHub action in action.yml: it unpacks the tarball in DOWNLOADS and runs the
# script in EXEAT_SCRIPT behind `exeat run`. EXEAT_ALLOW has the hosts that it may reach, and EXEAT_RUN_CONFIG a configuration.
set -euo pipefail
downloads=$1
(cd "$downloads" && sha256sum --quiet --check --ignore-missing SHA256SUMS)
tools=$(mktemp -d)
tar --extract --file "$(find "$downloads" -name "exeat-*-$(uname -m)-linux.tar.gz")" -C "$tools" --strip-components 1
flags=()
# A host may be `*.example.com`, which is no pattern for files.
set -f
for host in ${EXEAT_ALLOW:-}; do flags+=(--allow "$host"); done
[ -z "${EXEAT_RUN_CONFIG:-}" ] || flags+=(-c "$EXEAT_RUN_CONFIG")
exec "$tools/exeat" run "${flags[@]}" -- bash -euo pipefail -c "$EXEAT_SCRIPT"
