# shellcheck shell=bash disable=SC2034
# What quickstart, tests/run and .ci/run share: Debian packages, the build, the Python environment. To be sourced.
#
# Everything here may be repeated: what is there already is left alone. Needs Debian 12 or a relative of it with the
# same package names; elsewhere install the counterparts of the packages below and it asks for none.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=$repo/build/venv
trainers=$repo/build/venv-trainers

build_packages=(
  g++ cmake ninja-build pkg-config libboost-dev liburing-dev libspdlog-dev libcli11-dev libtomlplusplus-dev
  nlohmann-json3-dev libhwloc-dev libnuma-dev libhwy-dev libxxhash-dev prometheus-cpp-dev scdoc)
python_packages=(python3 python3-venv python3-dev)
test_packages=(catch2 binutils e2fsprogs xfsprogs libfuse3-dev fuse3 mount util-linux iproute2 procps ccache fio
  systemd libseccomp2 python3-yaml dpkg-dev file slurm-wlm munge python3-prometheus-client)
lint_packages=(git clang-format shellcheck)

say() { printf '== %s\n' "$*"; }
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# install_packages NAME...: those that are missing, as root or with sudo.
install_packages() {
  command -v apt-get > /dev/null ||
    fail "this is no Debian (no apt-get): see the packages in deploy/setup.sh and README.md, Building"
  local name missing=() root=()
  for name in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2> /dev/null) == installed ]] || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    command -v sudo > /dev/null || fail "these packages are missing; as root run: apt-get install ${missing[*]}"
    root=(sudo)
  fi
  say "installing ${missing[*]}"
  local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=3)
  "${apt[@]}" update || fail "apt-get update failed (its message is above)"
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" ||
    fail "installing packages failed (apt-get's message is above): ${missing[*]}"
}

# build_tree FOLDER [CMAKE OPTION]...: configures and builds everything in $repo/FOLDER.
build_tree() {
  local folder=$repo/$1 launcher=()
  shift
  # Only for a new folder: another launcher would compile everything again.
  if [[ ! -e $folder/CMakeCache.txt ]] && command -v ccache > /dev/null; then
    launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  say "building in ${folder#"$repo"/}/"
  cmake -S "$repo" -B "$folder" -G Ninja "${launcher[@]}" "$@" > "$folder.configure.log" 2>&1 ||
    { cat "$folder.configure.log" >&2; fail "cmake failed"; }
  rm -f "$folder.configure.log"
  cmake --build "$folder" || fail "the build failed"
}

# The sources of the Python package, as one hash.
python_sources() {
  (cd "$repo" &&
    find python client/src client/cuda client/include proto -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) |
    sha256sum | cut -d ' ' -f 1
}

# make_environment EXTRAS: build/venv with the package mlpo of this checkout, torch, and what its extras ask for.
make_environment() {
  local extras=$1 python=$environment/bin/python installed=$environment/mlpo-sources sources had=()
  local pip=("$python" -m pip --disable-pip-version-check -q)
  sources=$(python_sources)
  # Of these sources, with these extras or more.
  [[ ! -e $installed ]] || mapfile -t had < "$installed"
  [[ ${had[0]:-} != "$sources" || ",${had[1]:-}," != *",$extras,"* ]] || return 0
  sources+=$'\n'$extras
  if [[ ! -x $python ]]; then
    say "making build/venv/"
    mkdir -p "$repo/build"
    python3 -m venv "$environment" || fail "python3 -m venv failed"
  fi
  if ! "$python" -c 'import torch' 2> /dev/null; then
    local free_mib
    free_mib=$(df --output=avail -m "$environment" | tail -n 1)
    ((free_mib > 8000)) || fail "torch needs 8000 MiB in $environment while it installs; $free_mib MiB are free"
    say "installing torch and the package mlpo (torch's libraries take some gigabytes: minutes)"
  else
    say "installing the package mlpo"
  fi
  rm -f "$installed"
  # PIP_CONSTRAINT reaches the isolated build of mlpo too.
  PIP_CONSTRAINT=$repo/python/constraints.txt "${pip[@]}" install "$repo/python[$extras]" ||
    fail "pip install failed (its message is above)"
  printf '%s\n' "$sources" > "$installed"
}

# The frameworks that tests/trainers has tests of; python/constraints.txt has their versions.
frameworks=(accelerate transformers pytorch-lightning deepspeed)

# make_trainers_environment: build/venv-trainers with these frameworks, over build/venv (make_environment comes first),
# so that torch is there once. Returns 0 also where one could not be had: its tests are skipped with that reason.
make_trainers_environment() {
  local python=$trainers/bin/python installed=$trainers/frameworks name version wanted=()
  if [[ ! -x $python ]]; then
    say "making build/venv-trainers/"
    python3 -m venv "$trainers" || fail "python3 -m venv failed"
    # What is installed here goes first.
    "$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over_venv.pth"
    # That of build/venv would start the ranks with its own Python.
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$python" > "$trainers/bin/torchrun"
    chmod +x "$trainers/bin/torchrun"
  fi
  for name in "${frameworks[@]}"; do
    version=$(sed -n "s/^$name==//p" "$repo/python/constraints.txt")
    [[ -n $version ]] || fail "python/constraints.txt has no version of $name"
    grep -qx "$name==$version" "$installed" 2> /dev/null || wanted+=("$name==$version")
  done
  ((${#wanted[@]})) || return 0
  say "installing ${wanted[*]}"
  # DeepSpeed's setup.py asks torch and compiles nothing.
  local pip=(env PIP_CONSTRAINT="$repo/python/constraints.txt" DS_BUILD_OPS=0
    "$python" -m pip --disable-pip-version-check -q)
  if "${pip[@]}" install setuptools wheel && "${pip[@]}" install --no-build-isolation "${wanted[@]}"; then
    printf '%s\n' "${wanted[@]}" >> "$installed"
    return 0
  fi
  for name in "${wanted[@]}"; do
    if "${pip[@]}" install --no-build-isolation "$name"; then
      printf '%s\n' "$name" >> "$installed"
    else
      say "$name could not be installed (pip's message is above): its tests are skipped"
    fi
  done
}
