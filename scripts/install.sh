#!/bin/sh
# Installs the packages of a lock file into .venv, each checked against its hash, and this checkout's distributions as editable:
#
#     scripts/install.sh relay        # locks/relay.txt; `pipeline` and `dev` are the other two
#
# It uses uv, which takes a second where pip takes half a minute. On a machine for which PyPI has no uv, and
# whenever uv fails, pip installs the same packages. PYTHON names the interpreter for a new .venv.
set -eu
cd "$(dirname "$0")/.."
lock=locks/$1.txt
python=.venv/bin/python
unfinished=.venv/.unfinished
export PIP_DISABLE_PIP_VERSION_CHECK=1

# The rest of an interrupted installation may look complete without being so: it is thrown away.
if [ -e $unfinished ] || ! $python -c "" 2>/dev/null; then
	echo "Making .venv with ${PYTHON:=python3}"
	"$PYTHON" -m venv --clear --without-pip .venv
fi
touch $unfinished

if [ ! -x .venv/bin/uv ]; then
	# Use the machine's pip if it has one, because Python's bundled copy takes long to unpack.
	pip="${PYTHON:=python3} -m pip --python $python"
	"$PYTHON" -c "import pip" 2>/dev/null || { $python -m ensurepip >/dev/null; pip="$python -m pip"; }
	$pip install --no-compile --only-binary :all: --require-hashes --requirement locks/uv.txt ||
		echo "There is no uv for this machine: pip takes its place, and longer" >&2
fi

with_pip() {
	$python -m pip --version >/dev/null 2>&1 || $python -m ensurepip >/dev/null
	$python -m pip install "$@"
}

# PySpark is distributed as source. Its wheel is 400 MB of jars, which do not shrink when compressed.
with_uv() {
	.venv/bin/uv pip install --python $python \
		--config-settings-package pyspark:--build-option=--compression=stored "$@"
}

install() {
	{ [ -x .venv/bin/uv ] && with_uv "$@"; } || with_pip "$@"
}

# A lock names every dependency of its packages, so none must be resolved (`--no-deps`).
echo "Installing $lock into .venv"
install --no-deps --require-hashes --requirement locks/build.txt --requirement "$lock"
install --no-deps --no-build-isolation --editable ./client --editable ./relayd --editable ./pipeline --editable ./testkit
rm $unfinished
