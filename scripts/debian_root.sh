#!/usr/bin/env bash
# A bare Debian in a folder, to build and to try packages in: what a container is, without a container program.
# usage: scripts/debian_root.sh make SUITE FOLDER [PACKAGE...]
#        scripts/debian_root.sh run FOLDER COMMAND...
# NETWORK=none runs the command without a network, AS=USER as that user. SOURCE=A shows the folder A as /source, to be
# read; OUT=A shows it as /out, to be written. Nothing else of this machine can be changed from inside. Needs root and
# mmdebstrap.
set -euo pipefail
make_root() {
  local suite=$1 folder=$2
  shift 2
  [ "$(id -u)" = 0 ] || { echo "a Debian root needs root: run as root, or use scripts/wheel.sh" >&2; exit 2; }
  command -v mmdebstrap >/dev/null || {
    echo "a Debian root needs mmdebstrap: install that package of Debian or Ubuntu" >&2
    exit 2
  }
  # The mirror that this machine uses, and what its apt is told of a mirror's dates.
  local mirror options=()
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | sort -u | head -n 1)
  while IFS= read -r line; do options+=(--aptopt="$line"); done < <(apt-config dump | grep '^Acquire::Check-')
  [ $# = 0 ] || options+=(--include="$(IFS=,; echo "$*")")
  mkdir -p "$(dirname "$folder")"
  mmdebstrap --quiet --variant=minbase "${options[@]}" "$suite" "$folder.tar" "$mirror"
  rm -rf "$folder.new"
  mkdir "$folder.new"
  tar -C "$folder.new" --exclude='./dev/*' -xf "$folder.tar"
  rm "$folder.tar"
  mv "$folder.new" "$folder"
}
run_in() {
  local folder=$1
  shift
  local spaces=(--mount --pid --fork --kill-child)
  if [ "${NETWORK:-}" = none ]; then spaces+=(--net); fi
  # shellcheck disable=SC2016
  exec unshare "${spaces[@]}" bash -c '
    set -eu
    folder=$1
    shift
    if [ "${NETWORK:-}" = none ] && command -v ip >/dev/null; then ip link set lo up; fi
    show() { mount --bind "$1" "$folder$2" && mount -o remount,bind,"$3" "$folder$2"; }
    mount -t proc proc "$folder/proc"
    mount -t tmpfs tmpfs "$folder/dev"
    for device in null zero full random urandom tty; do
      touch "$folder/dev/$device"
      mount --bind "/dev/$device" "$folder/dev/$device"
    done
    ln -s /proc/self/fd "$folder/dev/fd"
    mkdir -m 1777 "$folder/dev/shm"
    if [ -n "${SOURCE:-}" ]; then mkdir -p "$folder/source" && show "$SOURCE" /source ro; fi
    if [ -n "${OUT:-}" ]; then mkdir -p "$folder/out" && show "$OUT" /out rw; fi
    # The names, and the certificates of pip, with which this machine reaches its network.
    touch "$folder/etc/resolv.conf"
    show /etc/resolv.conf /etc/resolv.conf ro
    certificates=
    if [ -n "${PIP_CERT:-}" ]; then
      certificates=PIP_CERT=/run/pip-cert.crt
      touch "$folder/run/pip-cert.crt"
      show "$PIP_CERT" /run/pip-cert.crt ro
    fi
    user=${AS:-root}
    home=$(chroot "$folder" getent passwd "$user" | cut -d: -f6)
    settings=(PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin "HOME=$home" LANG=C.UTF-8 $certificates)
    exec env -i "${settings[@]}" chroot --userspec="$user" "$folder" "$@"
  ' bash "$folder" "$@"
}
case ${1:-} in
  make) shift; make_root "$@" ;;
  run) shift; run_in "$@" ;;
  *) echo "usage: $0 make SUITE FOLDER [PACKAGE...] | run FOLDER COMMAND..." >&2; exit 2 ;;
esac
