#!/bin/sh
# Runs a tiny training of programs that train through DeepSpeed, each in an environment of its own, because each needs
# other versions of the same libraries. `make compat-programs` calls it in the root of the repository:
#
#     tests/support/programs.sh PYTHON FOLDER PROGRAM ...
#
# constraints-PROGRAM.txt has every package of an environment. Left to itself pip searches for versions that fit, which
# for LLaMA-Factory took it more than an hour.
set -eu
python=$1
folder=$2
shift 2

status=0
for program in "$@"; do
    pins=constraints-$program.txt
    "$python" -m venv "$folder/$program"
    # lt_zero is first, with the packages that its torch needs on this platform: the file has none of those.
    "$folder/$program/bin/python" -m pip install --quiet -c "$pins" -e ".[dev]"
    "$folder/$program/bin/python" -m pip install --quiet --no-deps -r "$pins"
    "$folder/$program/bin/python" -m pytest -m slow --timeout 3000 tests/deepspeed/test_programs.py -k "$program" || status=1
done
exit $status
