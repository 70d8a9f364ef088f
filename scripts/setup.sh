#!/usr/bin/env bash
# Installs the packages that `make demo` or `make test` needs and that are missing. Debian 12 and later,
# Ubuntu 24.04 and later. Usage: scripts/setup.sh demo|test
set -euo pipefail
what=${1:?usage: scripts/setup.sh demo|test}

packages=(g++ cmake ninja-build make ca-certificates libfmt-dev nlohmann-json3-dev libhwy-dev libcli11-dev libgloo-dev
          libsimdjson-dev libsqlite3-dev zlib1g-dev libtorch-dev libopenblas0-pthread)
if [ "$what" = test ]; then
  packages+=(libgtest-dev libgmock-dev libbenchmark-dev binutils python3)
fi

missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "installing: ${missing[*]}"
sudo=""
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "These packages are missing and installing them needs root: ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
log=$(mktemp)
if ! { $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -20 "$log" >&2
  echo "apt could not install the packages above; install them by hand and run the command again" >&2
  exit 1
fi
rm -f "$log"
