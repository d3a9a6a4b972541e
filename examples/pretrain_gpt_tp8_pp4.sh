#!/usr/bin/env bash
# Pretrain a GPT on 4 nodes of 8 GPUs: tensor parallel 8 inside a node, pipeline parallel 4 over the nodes.
#
#     bash examples/pretrain_gpt_tp8_pp4.sh [OPTIONS] [TRAINING FLAGS]
#
# Start it on every node (set NODE_RANK's source below), or submit it: inside a Slurm allocation it starts one launcher on
# each node by itself. Training flags given here are appended to those below, so the last one wins.
#
#   --cpu-demo        the same layout as 32 processes of this machine on a tiny model. This is also what happens where no GPU
#                     is visible, no scheduler is at work and the node addresses below are as they came
#   --demo-layout T P with --cpu-demo: tensor parallel T x pipeline parallel P instead of 8 x 4
#   --print-flags     print the training flags, one to a line, and start nothing
#   --check           check the flags for all ranks, print the start-up summary, and start nothing
#
# Exit status: 2 for a configuration or a node that does not fit, found before anything is started; then torchrun's own,
# which is 1 whatever a rank's was (docs/cluster.md).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# ---- settings: yours to change ------------------------------------------------------------------------------------------

NODES=4
GPUS_PER_NODE=8
NODE_ADDRESSES=(node0 node1 node2 node3) # the first is the meeting point; under Slurm the allocation's hosts are taken
MASTER_PORT=29500
DATA_PREFIX=/data/my_corpus_text_document # what tools/preprocess_data.py wrote, without .bin
VOCAB_FILE=/data/gpt2-vocab.json
MERGE_FILE=/data/gpt2-merges.txt
SAVE=/checkpoints/gpt_tp8_pp4 # on a file system that every node sees
SHUTDOWN_SECONDS=600          # how long a save may take after a stop signal, before the launcher kills its ranks
TENSOR=8
PIPELINE=4

# ---- flags --------------------------------------------------------------------------------------------------------------

both=(
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
    --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-fraction 0.01 --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
    --recompute-granularity full --recompute-method uniform
    --save-interval 500 --eval-interval 1000 --eval-iters 2 --log-interval 1
)
cluster=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --global-batch-size 1536 --train-iters 100000
    --bf16
    --distributed-backend nccl
    --data-path "$DATA_PREFIX" --split 969,30,1 --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE"
    --save "$SAVE" --load "$SAVE"
)
demo=(
    --num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32
    --global-batch-size 8 --train-iters 10
    --distributed-backend gloo --device cpu
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256
)

# ---- options of this script ---------------------------------------------------------------------------------------------

cpu_demo=no action=start more=()
while [ $# -gt 0 ]; do
    case "$1" in
        --cpu-demo) cpu_demo=yes ;;
        --demo-layout) TENSOR="$2" PIPELINE="$3"; shift 2 ;;
        --print-flags) action=print ;;
        --check) action=check ;;
        -h | --help) sed -n '2,/^set/{/^#/!d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) more+=("$1") ;;
    esac
    shift
done

stop() { echo "$(basename "$0"): $*" >&2; exit 2; }
visible_gpus() {
    if command -v nvidia-smi >/dev/null 2>&1; then
        { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true
    else
        find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l
    fi
}
python=python3
[ -x "$root/.venv/bin/python" ] && ! python3 -c 'import torch' 2>/dev/null && python="$root/.venv/bin/python"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# ---- what runs: the cluster, or the demo --------------------------------------------------------------------------------

gpus="$(visible_gpus)"
unedited=no
[ "${NODE_ADDRESSES[*]}" = "node0 node1 node2 node3" ] && unedited=yes
if [ "$cpu_demo" = no ] && [ "$gpus" -eq 0 ] && [ -z "${SLURM_JOB_ID:-}" ] && [ "$unedited" = yes ]; then
    if [ "$action" = start ]; then
        echo "No GPU is visible here, no scheduler is at work and the node addresses are as they came: this is the CPU demo."
        cpu_demo=yes
    fi
fi
layout=(--tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$PIPELINE")
flags=("${layout[@]}" "${both[@]}")
if [ "$cpu_demo" = yes ]; then flags+=("${demo[@]}"); else flags+=("${cluster[@]}"); fi
flags+=(${more[@]+"${more[@]}"})

if [ "$action" = print ]; then
    printf '%s\n' "${flags[@]}"
    exit 0
fi
if [ "$action" = check ]; then
    exec "$python" -m megatron_lite train --check-only $((NODES * GPUS_PER_NODE)) "${flags[@]}"
fi

shutdown=()
if "$python" -m torch.distributed.run --help 2>/dev/null | grep -q -- --shutdown-timeout; then
    shutdown=(--shutdown-timeout "$SHUTDOWN_SECONDS" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2)
else
    echo "This torchrun has no --shutdown-timeout: it kills its ranks 30 s after a stop signal, so a save has to end within 30 s."
fi

# ---- the demo -----------------------------------------------------------------------------------------------------------

if [ "$cpu_demo" = yes ]; then
    ranks=$((TENSOR * PIPELINE))
    save="$(mktemp -d "${TMPDIR:-/tmp}/gpt_tp${TENSOR}_pp${PIPELINE}.XXXXXX")"
    flags+=(--save "$save")
    as_lines() { printf '%s ' "$@" | sed 's/ --/\n--/g; s/ $/\n/' | sort; } # a flag and its values to a line
    echo "The same layout, tensor parallel $TENSOR x pipeline parallel $PIPELINE, as $ranks processes of $(hostname). Flags of the cluster run (<) and of this one (>):"
    diff <(as_lines "${cluster[@]}") <(as_lines "${demo[@]}" --save "$save") | grep '^[<>]' || true
    "$python" -m megatron_lite train --check-only "$ranks" "${flags[@]}" >/dev/null
    export OMP_NUM_THREADS=1
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "${shutdown[@]}" \
        -m megatron_lite train "${flags[@]}"
fi

# ---- the cluster --------------------------------------------------------------------------------------------------------

if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
    # In a batch script: one launcher on each node. Flags are checked here, once, before any of them starts.
    "$python" -m megatron_lite train --check-only $((NODES * GPUS_PER_NODE)) "${flags[@]}" >/dev/null
    exec srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 bash "${BASH_SOURCE[0]}" ${more[@]+"${more[@]}"}
fi
[ "$gpus" -eq "$GPUS_PER_NODE" ] || stop "host $(hostname): $gpus GPUs are visible, this job needs $GPUS_PER_NODE on each of $NODES nodes (--cpu-demo runs it without)"
if [ -n "${SLURM_JOB_ID:-}" ]; then
    master="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    node_rank="$SLURM_NODEID"
else
    master="${NODE_ADDRESSES[0]}"
    node_rank=""
    for i in "${!NODE_ADDRESSES[@]}"; do
        for name in "$(hostname)" "$(hostname -s)" "$(hostname -f 2>/dev/null || true)" $(hostname -I 2>/dev/null || true); do
            [ "${NODE_ADDRESSES[$i]}" = "$name" ] && node_rank="$i"
        done
    done
    [ -n "$node_rank" ] || stop "host $(hostname) is none of NODE_ADDRESSES (${NODE_ADDRESSES[*]}): set them at the top of $0"
    [ "${#NODE_ADDRESSES[@]}" -eq "$NODES" ] || stop "NODES is $NODES, but there are ${#NODE_ADDRESSES[@]} NODE_ADDRESSES"
fi
"$python" -m megatron_lite train --check-only $((NODES * GPUS_PER_NODE)) "${flags[@]}" >/dev/null
exec "$python" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$node_rank" \
    --master-addr "$master" --master-port "$MASTER_PORT" ${shutdown[@]+"${shutdown[@]}"} \
    -m megatron_lite train "${flags[@]}"
