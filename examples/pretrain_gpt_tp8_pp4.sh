#!/usr/bin/env bash
# Pretrain a GPT of 76 billion parameters on 4 nodes of 8 GPUs: tensor parallel 8 inside a node, pipeline 4 over the nodes.
#
#     bash examples/pretrain_gpt_tp8_pp4.sh [OPTIONS] [TRAINING FLAGS]
#
# Set what is marked below and start it on every node, or submit it once: inside a Slurm allocation it starts one torchrun on
# each node. Before anything starts, the nodes are looked at and all flags are checked. Training flags given here come after
# those below; the last one wins.
#
#   --node-rank N      this node's place in NODE_ADDRESSES, where its name does not tell
#   --check            check the flags for all ranks, print what a start would say, and start nothing
#   --print-flags      print the training flags, one to a line, and start nothing
#   --cpu-demo         the same layout as 32 processes of this machine on a tiny model. So it is, too, where no GPU is visible,
#                      no scheduler is at work and the node addresses below are as they came
#   --demo-layout T P  with --cpu-demo: tensor parallel T x pipeline P instead, T * P processes; 1 1 is a single process
#   --out DIR          with --cpu-demo: where it writes (default: a new temporary directory)
#
# Exit status: 2 where a node or a flag does not fit, before anything is started; then torchrun's, which is 1 whatever a
# rank's was (docs/cluster.md).
#
#SBATCH --job-name=gpt_tp8_pp4
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

# ==== settings: change these ================================================================================================

NODES=4                                   # 8 make two data-parallel copies. Under Slurm: those of the allocation
NODE_ADDRESSES=(node0 node1 node2 node3)  # names or addresses in order of rank; the first is where all meet. Not for Slurm
MASTER_PORT=29500                         # likewise; under Slurm one that follows from the job's id
DATA_PATH=/data/corpus_text_document      # what tools/preprocess_data.py wrote, without .bin, seen by every node
VOCAB_FILE=/data/gpt2-vocab.json
MERGE_FILE=/data/gpt2-merges.txt
SAVE_PATH=/checkpoints/gpt_tp8_pp4        # checkpoints and metrics, on a file system that every node sees
PYTHON=python3                            # of the environment on every node
SHUTDOWN_SECONDS=900                      # how long ranks may take to save after a stop signal before torchrun kills them

# ==== training flags ========================================================================================================

TENSOR=8
PIPELINE=4
GPUS_PER_NODE=8

COMMON_ARGS=(
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
    --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --tokenizer-type GPT2BPETokenizer --split 98,1,1 --log-interval 1
)
# 43 GB of weights, gradients and optimizer state on each of 32 GPUs (18 bytes for each of 76.1e9 / 32 parameters).
CLUSTER_ARGS=(
    --tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$PIPELINE"
    --num-layers 60 --hidden-size 10240 --num-attention-heads 80 --seq-length 2048 --max-position-embeddings 2048
    --global-batch-size 512 --train-iters 100000 --save-interval 500 --eval-interval 500 --eval-iters 10
    --bf16
    --distributed-backend nccl --device cuda
    --data-path "$DATA_PATH" --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" --save "$SAVE_PATH" --load "$SAVE_PATH"
)
set_demo_args() { # the same flags, for the processes of one machine; $1 is the directory that they write to
    DEMO_ARGS=(
        --tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$PIPELINE"
        --num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64
        --global-batch-size 8 --train-iters 10 --save-interval 10 --eval-interval 10 --eval-iters 1
        --fp64
        --distributed-backend gloo --device cpu
        --data-path "$1/data/corpus_text_document" --vocab-file "$1/data/vocab.json" --merge-file "$1/data/merges.txt"
        --save "$1/checkpoints" --load "$1/checkpoints"
    )
}

# ==== options ===============================================================================================================

stop() { echo "pretrain_gpt_tp8_pp4.sh: $*" >&2; exit 2; }

demo=no action=start node_rank='' out='' more=()
while [ $# -gt 0 ]; do
    case "$1" in
        --cpu-demo) demo=yes ;;
        --demo-layout)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ && "${3:-}" =~ ^[1-9][0-9]*$ ]] || stop "--demo-layout needs two numbers, as in --demo-layout 2 4"
            TENSOR="$2" PIPELINE="$3"; shift 2 ;;
        --out) out="${2:?--out needs a directory}"; shift ;;
        --node-rank) node_rank="${2:?--node-rank needs a number}"; shift ;;
        --check) action=check ;;
        --print-flags) action=print ;;
        -h | --help) sed -n '2,/^#SBATCH/{/^#SBATCH/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) more+=("$1") ;;
    esac
    shift
done

# ==== where this is =========================================================================================================

visible_gpus() { # how many GPUs a process of this host may use
    local count
    if command -v nvidia-smi >/dev/null 2>&1; then
        count="$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)"
    else
        count="$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l)"
    fi
    if [ "$count" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # what Slurm or a person allows
        case "$CUDA_VISIBLE_DEVICES" in '' | -1 | NoDevFiles) count=0 ;; *) count="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)" ;; esac
    fi
    echo "$count"
}
check_node() { # $1 GPUs on each of $2 nodes are needed
    local count
    count="$(visible_gpus)"
    [ "$count" -eq "$1" ] || stop "host $(hostname): $count GPUs are visible, $1 are needed on each of $2 nodes (--cpu-demo does without)"
}
scheduler() { # a variable that a scheduler has set for this job, if any
    local variable
    for variable in SLURM_JOB_ID SLURM_PROCID PBS_JOBID LSB_JOBID PE_HOSTFILE COBALT_JOBID FLUX_JOB_ID OMPI_COMM_WORLD_RANK PMI_RANK; do
        if [ -n "${!variable:-}" ]; then echo "$variable"; return; fi
    done
}
in_step() { # whether srun started this; an interactive or batch shell of an allocation has one of Slurm's highest numbers
    [[ "${SLURM_STEP_ID:-}" =~ ^[0-9]+$ ]] && [ "$SLURM_STEP_ID" -lt 4294967290 ]
}
root='' # sbatch runs a copy of this file from a directory of its own
for place in "$(dirname "${BASH_SOURCE[0]}")/.." "${SLURM_SUBMIT_DIR:-.}" "${SLURM_SUBMIT_DIR:-.}/.."; do
    if [ -f "$place/megatron_lite/__main__.py" ]; then root="$(cd "$place" && pwd)"; break; fi
done
[ -n "$root" ] || stop "megatron_lite is not beside examples/: submit from the root of the checkout"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

unedited='node0 node1 node2 node3'
if [ "$action" = start ] && [ "$demo" = no ] && [ -z "$(scheduler)" ] && [ "${NODE_ADDRESSES[*]}" = "$unedited" ] && [ "$(visible_gpus)" -eq 0 ]; then
    echo "No GPU is visible on $(hostname), no scheduler is at work and the node addresses are as they came: this is the CPU demo."
    demo=yes
fi
if [ "$demo" = yes ]; then
    if [ -z "$out" ] && [ "$action" != print ]; then out="$(mktemp -d "${TMPDIR:-/tmp}/gpt_tp${TENSOR}_pp${PIPELINE}.XXXXXX")"; fi
    set_demo_args "${out:-DIR}"
    flags=("${COMMON_ARGS[@]}" "${DEMO_ARGS[@]}" "${more[@]}")
else
    flags=("${COMMON_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${more[@]}")
fi
if [ "$action" = print ]; then
    printf '%s\n' "${flags[@]}"
    exit 0
fi

# ==== what both ways to start need ==========================================================================================

find_launcher() { # torchrun's source in the environment of the Python $1
    "$1" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("torch").origin).parent / "distributed/run.py")' 2>/dev/null
}
if ! launcher="$(find_launcher "$PYTHON")"; then
    venv="$root/.venv/bin/python" # which examples/quickstart.sh makes
    launcher="$(find_launcher "$venv")" || stop "$PYTHON has no torch: activate an environment that has it, or set PYTHON in this file"
    PYTHON="$venv"
fi
stopping=()
if grep -q -- --shutdown-timeout "$launcher"; then
    stopping+=(--shutdown-timeout "$SHUTDOWN_SECONDS")
else
    echo "This torchrun has no --shutdown-timeout: it kills its ranks 30 s after a stop signal. A save that takes longer is lost."
fi
if grep -q -- --signals-to-handle "$launcher"; then
    stopping+=(--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
    trap '' USR2 # a save signal is for ranks; a launcher that passed it on would then end them
else
    trap '' USR1 USR2 # which would end the launcher; ranks take them from the scheduler
fi
check_flags() { # for $1 ranks; prints what is wrong, or with --check what a start would say
    if [ "$action" = check ]; then
        exec "$PYTHON" -m megatron_lite train --check-only "$1" "${flags[@]}"
    fi
    "$PYTHON" -m megatron_lite train --check-only "$1" "${flags[@]}" >/dev/null || exit
}

# ==== the demo ==============================================================================================================

read_flags() { # the flags "${@:2}" into the associative array that $1 names
    local -n into="$1"
    local flag=''
    for token in "${@:2}"; do
        if [[ "$token" == --* ]]; then flag="$token" into[$flag]=''; else into[$flag]+="${into[$flag]:+ }$token"; fi
    done
}
print_difference() { # of the demo's flags to the cluster's
    local -A there=() here=()
    read_flags there "${COMMON_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${more[@]}"
    read_flags here "${flags[@]}"
    printf '  %-30s %-32s %s\n' flag 'cluster run' 'this run'
    for flag in $(printf '%s\n' "${!there[@]}" "${!here[@]}" | sort -u); do
        if [ -z "${there[$flag]+set}" ]; then
            printf '  %-30s %-32s %s\n' "$flag" '(not given)' "${here[$flag]:-given}"
        elif [ -z "${here[$flag]+set}" ]; then
            printf '  %-30s %-32s %s\n' "$flag" "${there[$flag]:-given}" '(not given)'
        elif [ "${there[$flag]}" != "${here[$flag]}" ]; then
            printf '  %-30s %-32s %s\n' "$flag" "${there[$flag]}" "${here[$flag]}"
        fi
    done
}
if [ "$demo" = yes ]; then
    ranks=$((TENSOR * PIPELINE))
    mkdir -p "$out/data"
    [ ! -e "$out/checkpoints" ] || stop "$out holds the checkpoints of an earlier run: give another --out"
    "$PYTHON" "$root/examples/lib/tiny_corpus.py" --out "$out/data"
    "$PYTHON" "$root/tools/preprocess_data.py" --input "$out/data/corpus.jsonl" --output-prefix "$out/data/corpus" --workers 1 \
        --append-eod --overwrite --vocab-file "$out/data/vocab.json" --merge-file "$out/data/merges.txt" >/dev/null
    check_flags "$ranks"
    echo "The layout of the cluster run, tensor parallel $TENSOR x pipeline $PIPELINE, as $ranks processes of $(hostname). Flags that differ:"
    print_difference
    echo "Everything is written to $out."
    export OMP_NUM_THREADS=1
    exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "${stopping[@]}" -m megatron_lite train "${flags[@]}"
fi

# ==== the cluster ===========================================================================================================

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
if [ -n "${SLURM_JOB_ID:-}" ]; then
    NODES="${SLURM_NNODES:-${SLURM_JOB_NUM_NODES:-$NODES}}"
    meeting="$("$PYTHON" -c 'import sys; from megatron_lite.mesh.slurm import first_host; print(first_host(sys.argv[1]))' "$SLURM_JOB_NODELIST")"
    MASTER_PORT=$((15000 + SLURM_JOB_ID % 16384))
else
    meeting="${NODE_ADDRESSES[0]}"
fi
torchrun=(--nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --master-addr "$meeting" --master-port "$MASTER_PORT" "${stopping[@]}")
torchrun+=(-m megatron_lite train "${flags[@]}")
if [ "$action" = check ]; then check_flags $((NODES * GPUS_PER_NODE)); fi # for which no node is needed

if [ -n "${SLURM_JOB_ID:-}" ] && ! in_step; then # a batch script, or a shell of an allocation
    check_flags $((NODES * GPUS_PER_NODE))
    one_each=(srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0)
    "${one_each[@]}" bash -c "$(declare -f stop visible_gpus check_node); check_node $GPUS_PER_NODE $NODES" || exit 2
    # One launcher that ends must not have Slurm kill those whose ranks are still saving, hence --kill-on-bad-exit=0.
    exec "${one_each[@]}" --wait="$SHUTDOWN_SECONDS" \
        bash -c 'exec "$0" -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"' "$PYTHON" "${torchrun[@]}"
fi

check_node "$GPUS_PER_NODE" "$NODES"
if in_step; then
    [ "${SLURM_NTASKS:-}" = "$NODES" ] || stop "srun started ${SLURM_NTASKS:-?} tasks on $NODES nodes: torchrun needs one on each (--ntasks-per-node=1)"
    node_rank="$SLURM_NODEID"
else
    [ "${#NODE_ADDRESSES[@]}" -eq "$NODES" ] || stop "there are ${#NODE_ADDRESSES[@]} NODE_ADDRESSES (${NODE_ADDRESSES[*]}) for NODES=$NODES"
    if [ -z "$node_rank" ]; then
        mine=" $(hostname) $(hostname -s 2>/dev/null || true) $(hostname -f 2>/dev/null || true) $(hostname -I 2>/dev/null || true) "
        for i in "${!NODE_ADDRESSES[@]}"; do
            if [[ "$mine" == *" ${NODE_ADDRESSES[i]} "* ]]; then node_rank="$i"; break; fi
        done
    fi
    [ -n "$node_rank" ] || stop "host $(hostname) is none of NODE_ADDRESSES (${NODE_ADDRESSES[*]}): set them in this file, or give --node-rank"
fi
check_flags $((NODES * GPUS_PER_NODE))
exec "$PYTHON" -m torch.distributed.run --node-rank "$node_rank" "${torchrun[@]}"
