#!/usr/bin/env bash
# Build train_image/ as IMAGE with Debian's buildah. With --push, push it where its name says. With --inventory, copy
# its databases of Debian and Python packages into DIR, for the bill of materials.
# usage: image.sh IMAGE [--push | --inventory DIR]
#
# A name that starts with 127.0.0.1:5000/ belongs to the test cluster's registry, which exists only
# inside the cluster's network namespace. Layers are cached in the cluster's home.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

BASE=docker.io/library/debian:bookworm-slim
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
context=$here/../../train_image
home=${TRAINYARD_CLUSTER_HOME:-$HOME/.cache/trainyard/cluster}
buildah=(buildah --root "$home/buildah/root" --runroot "$home/buildah/run" --storage-driver overlay)

fail() { printf 'error: %s\n       %s\n' "$1" "$2" >&2; exit 2; }

# Make BASE from the machine's own Debian mirror, for where no image registry can be reached.
debootstrap_base() {
  local root mirror
  mirror=$(debian_sources | awk '$3 == "bookworm" {print $2; exit}')
  [ "$mirror" ] || fail "apt knows no mirror of Debian bookworm" "pull $BASE from a registry that buildah can reach"
  container=$("${buildah[@]}" from scratch)
  trap '"${buildah[@]}" rm "$container" > /dev/null' EXIT
  root=$("${buildah[@]}" mount "$container")
  debootstrap --variant=minbase bookworm "$root" "$mirror"
  debian_sources > "$root/etc/apt/sources.list"
  rm -rf "$root"/usr/share/{doc,man,info,locale}/* "$root"/var/{lib/apt/lists,cache/apt}/* "$root"/dev/*
  "${buildah[@]}" umount "$container" > /dev/null
  "${buildah[@]}" config --cmd /bin/bash "$container"
  "${buildah[@]}" commit --quiet "$container" "$BASE" > /dev/null
}

# The lines `deb URI SUITE main` of bookworm, its updates and its security updates, as far as the machine has them.
debian_sources() {
  # shellcheck disable=SC2016  # these dollars are apt's
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Component: main' 2> /dev/null |
    awk '$2 ~ /^bookworm(-updates|-security)?$/ {print "deb", $1, $2, $3}' | sort -u
}

# Mount options: what lets the machine reach its package index and mirror must also let the build reach them.
machine_mounts() {
  local certificate
  [ ! -d /etc/apt/apt.conf.d ] || printf '%s\n' -v "/etc/apt/apt.conf.d:/etc/apt/apt.conf.d:ro"
  # The certificate goes elsewhere: a package of the image owns /etc/ssl/certs and has to write there.
  certificate=$(pip_settings | sed -n 's/^cert = //p')
  pip_settings | sed 's#^cert = .*#cert = /run/index.crt#' > "$home/pip.conf"
  printf '%s\n' -v "$home/pip.conf:/etc/pip.conf:ro"
  [ ! -e "$certificate" ] || printf '%s\n' -v "$certificate:/run/index.crt:ro"
}

# Where this machine's pip gets packages from, as a pip.conf; environment variables win, as they do in pip.
pip_settings() {
  python3 - << 'END'
import configparser, os, pathlib

file = configparser.ConfigParser(interpolation=None)
file.read(["/etc/pip.conf", pathlib.Path.home() / ".config/pip/pip.conf"])
print("[global]")
for name in ("index-url", "extra-index-url", "trusted-host", "proxy", "cert", "timeout"):
    value = os.environ.get("PIP_" + name.upper().replace("-", "_")) or file.get("global", name, fallback="")
    if value:
        print(name, "=", value)
END
}

# Copy the package databases of the image into a folder, as release/bill.py reads them.
inventory() {
  local container root packages metadata
  container=$("${buildah[@]}" from --pull-never "$1")
  root=$("${buildah[@]}" mount "$container")
  mkdir -p "$2/python"
  cp "$root/var/lib/dpkg/status" "$2/dpkg-status"
  packages=$root/opt/trainyard/lib/python3.11/site-packages
  for metadata in "$packages"/*.dist-info/METADATA; do
    cp "$metadata" "$2/python/$(basename "$(dirname "$metadata")")"
  done
  "${buildah[@]}" rm "$container" > /dev/null
}

# Drop what nobody needs any more: images of this repository beyond the newest two, and layers of no image.
prune() {
  "${buildah[@]}" images --format '{{.Name}}:{{.Tag}}' | # newest first
    awk -v repository="${image%:*}:" 'index($0, repository) == 1 && ++seen > 2' |
    while read -r old; do "${buildah[@]}" rmi "$old" > /dev/null; done
  "${buildah[@]}" rmi --prune > /dev/null
}

main() {
  local image=${1:-} then=${2:-} inventory=${3:-} mounts program
  [[ $image =~ :[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] ||
    fail "IMAGE is '$image', but needs a tag" "usage: image.sh IMAGE [--push], such as image.sh 127.0.0.1:5000/trainyard:dev --push"
  [[ -z $then || $then == --push || ($then == --inventory && -n $inventory) ]] ||
    fail "unknown argument '$then'" "usage: image.sh IMAGE [--push | --inventory DIR]"
  [ "$(id -u)" = 0 ] || fail "building an image here needs root" "run it as root, or build train_image/ with docker or podman"
  for program in buildah debootstrap; do
    command -v "$program" > /dev/null ||
      fail "the program $program is missing" "install what is needed: python tests/cluster/cluster.py build"
  done

  mkdir -p "$home"
  exec {lock}> "$home/image.lock" # one build at a time, since each ends with throwing old layers away
  flock "$lock"
  "${buildah[@]}" rm --all > /dev/null # of a build that was killed: its image could not be thrown away
  if ! "${buildah[@]}" inspect --type image "$BASE" > /dev/null 2>&1 &&
    ! "${buildah[@]}" pull --quiet "$BASE" 2> /dev/null; then
    debootstrap_base
  fi
  mapfile -t mounts < <(machine_mounts)
  "${buildah[@]}" bud --layers --isolation chroot --network host "${mounts[@]}" --tag "$image" "$context"
  prune
  [ "$then" != --inventory ] || inventory "$image" "$inventory"
  [ "$then" = --push ] || return 0
  # zstd at level 1 packs 6 GB in under a minute; gzip takes several.
  local push=("${buildah[@]}" push --quiet --compression-format zstd --compression-level 1)
  case $image in
    127.0.0.1:5000/*) "$here/run" "${push[@]}" --tls-verify=false "$image" "docker://$image" ;;
    *) "${push[@]}" "$image" "docker://$image" ;;
  esac
}

main "$@"
