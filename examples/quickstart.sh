#!/usr/bin/env bash
# From a corpus to sampled text, on the processors of this machine: four processes, tensor parallel 2 x pipeline 2.
#
#     bash examples/quickstart.sh [--quick] [--out DIR]
#
#   --quick   a smaller corpus, tokenizer and model, in one to two minutes: shows that everything works, not what it can do
#             (it does not ask whether the model uses its context)
#   --out DIR where everything is written (default: quickstart-run beside examples/); what an earlier run left there is replaced
#
# An active environment that has torch >= 2.11 and the packages of setup.py is used as it is; otherwise .venv is made from
# requirements.lock. After that nothing is downloaded: the corpus is the Python files of this machine. Exit status 1 where the
# resumed run strays from the unbroken one, the model learns too little, or it makes no use of context.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$root/quickstart-run"
quick=no
while [ $# -gt 0 ]; do
    case "$1" in
        --quick) quick=yes ;;
        --out) out="${2:?--out needs a directory}"; shift ;;
        -h | --help) sed -n '2,/^set/{/^#/!d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "quickstart.sh: unknown option $1 (there are --quick and --out DIR)" >&2; exit 2 ;;
    esac
    shift
done

# ---- settings

vocabulary=8192 corpus=() steps=450 windows=512 asked=(--below 0.5 --rise 0.1)
model=(--num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2)
if [ "$quick" = yes ]; then
    vocabulary=2048 corpus=(--max-bytes 3000000) steps=100 windows=128 asked=(--below 0.5)
    model=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2)
fi
beyond=5 # steps after the save that the resumed run repeats

# ---- environment

missing() { # what the Python $1 lacks, one line each; nothing where it will do
    "$1" - <<'PY' 2>/dev/null || echo "Python 3.10 or later that works"
import importlib.util, sys
if sys.version_info < (3, 10):
    print("Python 3.10 or later")
for name in ("torch", "numpy", "tokenizers", "tyro", "tqdm", "yaml", "regex"):
    if importlib.util.find_spec(name) is None:
        print(name)
if importlib.util.find_spec("torch") is not None:
    from importlib.metadata import version
    if tuple(map(int, version("torch").split("+")[0].split(".")[:2])) < (2, 11):
        print(f"torch 2.11 or later (there is {version('torch')})")
PY
}

python=python3
lacks="$(missing "$python" | paste -sd, -)"
if [ -n "$lacks" ]; then
    python="$root/.venv/bin/python"
    if [ ! -x "$python" ] || [ -n "$(missing "$python")" ]; then
        echo "== the active environment lacks $lacks: making $root/.venv from requirements.lock"
        [ -x "$python" ] || python3 -m venv "$root/.venv"
        "$python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.lock"
    fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY=PASSIVE # waiting threads leave the processor to others
SECONDS=0

step() { echo; echo "== $* (${SECONDS} s)"; }
lite() { "$python" -m megatron_lite "$@"; }
ranks() { # $1 processes, which meet at a free port; the rest is the subcommand
    OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" -m megatron_lite "${@:2}"
}

mkdir -p "$out"
out="$(cd "$out" && pwd)"
exec 9>"$out/.lock"
flock --nonblock 9 || { echo "quickstart.sh: another run is writing to $out; give another --out" >&2; exit 2; }
rm -rf "$out"/{corpus,tokenizer,data,checkpoints,unbroken,resumed}

step "building csrc"
"$python" -m megatron_lite.ops.build || echo "csrc was not built: plain PyTorch does its work"

# ---- data

step "corpus: Python files of this machine, one JSON line per file, a tenth of them held out"
"$python" "$root/examples/quickstart/make_corpus.py" --out "$out/corpus" ${corpus[@]+"${corpus[@]}"}

step "tokenizer of $vocabulary entries"
"$python" "$root/examples/quickstart/train_tokenizer.py" --input "$out/corpus/train.jsonl" --vocab-size "$vocabulary" \
    --pattern gpt2 --out "$out/tokenizer"

step "tokenizing"
mkdir "$out/data"
for split in train heldout; do
    "$python" "$root/tools/preprocess_data.py" --input "$out/corpus/$split.jsonl" --output-prefix "$out/data/$split" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" --append-eod --workers 2
done

# ---- training

run=(
    --model llama "${model[@]}" --seq-length 256 --max-position-embeddings 256
    --train-data-path "$out/data/train_text_document" --valid-data-path "$out/data/heldout_text_document"
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
    --micro-batch-size 4 --global-batch-size 8 --train-iters $((steps + beyond))
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 10 --adam-beta2 0.95 --weight-decay 0.1
    --log-interval 20 --eval-interval "$steps" --eval-iters 8 --device cpu
)
step "training on 4 processes, tp 2 x pp 2: $steps steps and $beyond more beyond a save"
ranks 4 train "${run[@]}" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    --save "$out/checkpoints" --save-interval "$steps" --log-dir "$out/unbroken"

step "resuming at step $steps in another layout: tp 1 x pp 2 x dp 2, optimizer state split over dp"
ranks 4 train "${run[@]}" --pipeline-model-parallel-size 2 --use-distributed-optimizer \
    --load "$out/checkpoints" --ckpt-step "$steps" --log-dir "$out/resumed"

# ---- what came of it

failed=0
step "the $beyond steps after the resume beside those of the unbroken run"
lite compare "$out/unbroken" "$out/resumed" --rtol 1e-5 | tee "$out/compare.txt" | sed '/^settings/,/^steps/{/^steps/!d}' || failed=1
grep -q "^steps in common: $beyond " "$out/compare.txt" || failed=1

step "the model on held-out files"
"$python" "$root/examples/quickstart/report.py" --load "$out/checkpoints" --train "$out/data/train_text_document" \
    --heldout "$out/data/heldout_text_document" --text "$out/corpus/heldout.jsonl" --windows "$windows" \
    "${asked[@]}" || failed=1

step "a text sampled from the checkpoint"
lite generate --load "$out/checkpoints" --prompt "def main(" --temperature 0.8 --top-p 0.9 --max-new-tokens 100 --device cpu

echo
if [ "$failed" -ne 0 ]; then
    echo "FAILED after $SECONDS s: see above. Everything is in $out" >&2
    exit 1
fi
echo "All of it worked, in $SECONDS s. Everything is in $out; go on with:"
echo "  cd $(printf '%q ' "$root")&& $(printf '%q ' "$python" -m megatron_lite generate --load "$out/checkpoints" --prompt "import os")"
