#!/bin/sh
# Packs a virtual environment with everything that executors need beside Spark and our own code, for clusters
# whose nodes do not have it installed:
#
#     deploy/spark/pack-environment.sh [environment.tar.gz]
#
# Run it with the Python that the nodes have, at the same path (PYTHON=/usr/bin/python3.11), and on the same kind
# of machine: an environment holds compiled code, and a link to its interpreter.
set -eu
target=${1:-environment.tar.gz}
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/environment"
# Spark itself gives executors PySpark and Py4J, in its own version.
awk '/^[A-Za-z0-9]/ { ours = !/^(pyspark|py4j)==/ } ours' "$root/locks/pipeline.txt" > "$folder/packages.txt"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	-r "$folder/packages.txt"
"$folder/environment/bin/python" -m pip uninstall --quiet --yes pip setuptools 2>/dev/null || true
tar -C "$folder/environment" -czf "$target" .
echo "$target"
