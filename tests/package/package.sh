#!/usr/bin/env bash
# The packages of a build, where nothing of it is: a root with the C library's files and nothing else (no shell, no
# compiler, no fonts), as a user who is not root, from a folder that cannot be written to. A model is trained for twenty
# steps and an image generated: from the tar in Debian's layout of folders, from the wheel in Fedora's. The C library there has
# nothing newer than glibc 2.35.
#   tests/package/package.sh SOURCE BUILD WHEELS VERSION
set -euo pipefail
source=$1 build=$2 wheels=$3 version=$4
here=$build/package_test
fail() { echo "FAILED: $*" >&2; exit 1; }
if ((EUID != 0)); then
  # A root of one's own, where the kernel lets users have one; its other user is then nobody by number alone.
  unshare --map-root-user true 2>/dev/null || fail "neither root, nor may this user have a namespace of its own"
  exec unshare --map-root-user --mount "$0" "$@"
elif [[ ${MD_OWN_MOUNTS:-} != 1 ]]; then
  MD_OWN_MOUNTS=1 exec unshare --mount --propagation private "$0" "$@"
fi

package() {
  SOURCE_DATE_EPOCH=${epoch:-1700000000} python3 "$source/tools/package.py" --build "$build" --wheels "$wheels" \
    --source "$source" --version "$version" --fast "$@"
}

# An empty root: $1, the folder of its libraries: $2.
make_root() {
  local root=$1 libraries=$2 file name
  mkdir -p "$root"/{tmp,dev,proc,home,etc,lib64,opt} "$root/$libraries"
  chmod 1777 "$root/tmp" "$root/home"
  for name in libc libm libdl libpthread librt libresolv libmvec; do
    file=$(/sbin/ldconfig -p | awk -v n="$name.so" 'index($1, n) == 1 && /x86-64/ && !found++ {print $NF}')
    cp -L "$file" "$root/$libraries/"
  done
  cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
  python3 "$source/tests/package/older_glibc.py" "$root/$libraries/libc.so.6" "$root/$libraries/libm.so.6"
  echo "/$libraries" >"$root/etc/ld.so.conf"
  /sbin/ldconfig -r "$root"
  : >"$root/dev/null"
  mount --bind /dev/null "$root/dev/null"
  mount --rbind /proc "$root/proc"
}

# In the root $1, as nobody: the words that follow.
inside() {
  local root=$1
  shift
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/home XDG_CACHE_HOME=/home/cache HF_HUB_OFFLINE=1 chroot --userspec=65534:65534 "$root" "$@" ||
    fail "in $root: $*"
}

# The quickstart in the root $1 by the program $2, from the folder /.
try_quickstart() {
  local root=$1 program=$2 where="output_dir=/home/runs dataset_save_location=/home/data"
  [[ $(inside "$root" "$program" version) == "maxdiffusion $version" ]] || fail "$program is another version"
  inside "$root" "$program" train configs/quickstart.yml max_train_steps=20 vae_max_train_steps=20 $where
  inside "$root" "$program" generate configs/quickstart.yml prompt="red heart" output_dir=/home/runs
  [[ -s $root/home/runs/quickstart/image_sdxl_0.png ]] || fail "$program wrote no image"
}

rm -rf "$here"
mkdir -p "$here"

# --- the same bytes, however the packages are made ---------------------------------------------------------------------
package --out "$here/one" tar wheel >/dev/null
package --out "$here/one" --without-plugin tar
(umask 077; cd /; TZ=Asia/Tokyo LC_ALL=C package --out "$here/two" --without-plugin tar wheel >/dev/null)
ls -l "$here/one"
for file in "$here"/two/*; do cmp "$file" "$here/one/$(basename "$file")" || fail "$file differs when it is made again"; done
rm -r "$here/two"
# Without the plugin a tar of at most 60 MB is promised; compressed little it is some 20 larger.
(($(stat -c %s "$here"/one/*-without-plugin.tar.xz) < 80000000)) || fail "the tar without the plugin has grown"

# --- the tar, Debian's layout ------------------------------------------------------------------------------------------
root=$here/debian
make_root "$root" lib/x86_64-linux-gnu
mkdir "$root/opt/any where"
tar -C "$root/opt/any where" --no-same-owner -xJf "$here/one/maxdiffusion-$version-linux-x86_64.tar.xz"
program="/opt/any where/maxdiffusion-$version-linux-x86_64/bin/maxdiffusion"
mount --bind "$root/opt" "$root/opt"
mount -o remount,bind,ro "$root/opt"
! touch "$root/opt/x" 2>/dev/null || fail "the tar was not read-only"
try_quickstart "$root" "$program"
# Videos are written and read by the libraries that were made small, and text is read by ICU's.
inside "$root" "$program" prepare_moving_emoji /home/clips resolution=32 num_frames=5
[[ -n $(find "$root/home/clips" -name '*.mp4' -o -name '*.gif' | head -1) ]] || fail "no clip was written"
said=$(inside "$root" "$program" check configs/quickstart_video.yml train_data_dir=/home/clips dataset_name= num_frames=5 \
  output_dir=/home/runs dataset_save_location=/home/data 2>&1) || fail "check ends by an error: $said"
[[ $said == *"first batch: pixels u8[16,5,32,32,3]"* && $said != *"GLIBC"* ]] || fail "clips are not read: $said"
inside "$root" "$program" completion zsh >/dev/null
# The check of a device, all of it; there is no Python, whose PyTorch would be timed next to ours, and no GPU.
inside "$root" "$program" accelerator_check sizes=tiny hardware=cpu minutes=30 output=/home/check
python3 "$source/tests/package/check_report.py" "$root/home/check"
if LD_LIBRARY_PATH=$(dirname "$root$program")/../lib/maxdiffusion "$build/tokenizers_test" --gtest_brief=1 >"$here/tokenizers" 2>&1; then
  :
else
  tail -20 "$here/tokenizers"
  fail "tokenizers differ with the package's ICU"
fi

# --- the wheel, Fedora's layout ----------------------------------------------------------------------------------------
root=$here/fedora
make_root "$root" usr/lib64
python3 -m venv --without-pip "$root/opt/venv"
python3 -m pip --disable-pip-version-check --python "$root/opt/venv/bin/python" install --quiet --no-index --no-deps \
  "$here"/one/*.whl
# What pip would have installed with it.
packages=$(echo "$root"/opt/venv/lib/python3*/site-packages)
mkdir "$packages/fastatomstruct_xla_cpu"
cp "$wheels/fastatomstruct_xla_cpu/libpjrt_cpu.so" "$packages/fastatomstruct_xla_cpu/"
cp -r "$here/debian/home/cache" "$root/home/"   # programs that were compiled above
chown -R 65534:65534 "$root/home/cache"
try_quickstart "$root" /opt/venv/bin/maxdiffusion
rm -rf "$packages/fastatomstruct_xla_cpu"
said=$(env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/home chroot --userspec=65534:65534 "$root" /opt/venv/bin/maxdiffusion train configs/quickstart.yml \
  output_dir=/home/other 2>&1 || true)
[[ $said == *"try: pip install fastatomstruct-xla-cpu"* ]] || fail "without its plugin it says: $said"
# For one user and for all: the program is in PREFIX/bin, what it needs below PREFIX.
for prefix in home/.local usr/local; do
  python3 -m pip --disable-pip-version-check install --quiet --no-index --no-deps --ignore-installed \
    --no-warn-script-location --root "$here/prefix" --prefix "/$prefix" "$here"/one/*.whl
  found=$(cd "$here/prefix" && find . -path '*/bin/maxdiffusion')
  mkdir -p "$root/$prefix"
  cp -r "$here/prefix/${found%/bin/maxdiffusion}/." "$root/$prefix"
  rm -rf "$here/prefix"
  [[ $(inside "$root" "/$prefix/bin/maxdiffusion" version) == "maxdiffusion $version" ]] || fail "not in /$prefix"
  [[ $(inside "$root" "/$prefix/bin/maxdiffusion" inspect config configs/quickstart.yml 2>/dev/null) == *noto-emoji* ]] ||
    fail "no configs in /$prefix"
done

# --- what is in it -----------------------------------------------------------------------------------------------------
python3 "$source/tests/package/check_bill.py" "$(dirname "$here/debian$program")/.."
echo "packages: all well"
umount -R "$here"/*/proc "$here"/*/dev/null 2>/dev/null || true
umount "$here/debian/opt" 2>/dev/null || true
rm -rf "$here"
