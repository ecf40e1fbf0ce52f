#!/bin/sh
# Runs a tiny training of programs that train through DeepSpeed, each in an environment of its own, because each pins
# other versions of the same libraries. `make compat-programs` calls it in the root of the repository:
#
#     tests/support/programs.sh PYTHON FOLDER
set -eu
python=$1
folder=$2

make_environment() {
    "$python" -m venv "$folder/$1"
    "$folder/$1/bin/python" -m pip install --quiet -c constraints.txt -e ".[dev]"
}

make_environment swift
"$folder/swift/bin/python" -m pip install --quiet torch==2.13.0 ms-swift==4.6.0 transformers==5.19.0 trl==0.29.1 \
    peft==0.20.0 accelerate==1.15.0 datasets==4.8.4 modelscope==1.40.2

# torchaudio and torchvision are left out: those of the package index are for other versions of torch, and text needs neither.
make_environment llamafactory
"$folder/llamafactory/bin/python" -m pip install --quiet --no-deps llamafactory==0.9.5
"$folder/llamafactory/bin/python" - > "$folder/llamafactory/requirements.txt" <<'EOF'
import importlib.metadata as installed

for requirement in installed.requires("llamafactory"):
    if "extra ==" not in requirement and not requirement.startswith(("torchaudio", "torchvision")):
        print(requirement)
EOF
"$folder/llamafactory/bin/python" -m pip install --quiet -r "$folder/llamafactory/requirements.txt" torch==2.13.0 \
    transformers==5.6.0 trl==0.24.0 peft==0.18.1 accelerate==1.11.0 datasets==4.0.0

for program in swift llamafactory; do
    "$folder/$program/bin/python" -m pytest -m slow --timeout 3000 tests/deepspeed/test_programs.py -k "$program"
done
