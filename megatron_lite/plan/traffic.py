"""What a rank sends in a step: calls and bytes by axis and kind of collective, as formulas.

Counted as ``mesh.collectives.Traffic`` counts: bytes are the input of the call on this rank (a gather's shard, the whole
tensor that is reduced, a message), not what a ring moves. A test holds every formula against the counters of a real
run, to the byte.

Legend: T tokens of a microbatch, H hidden size, V padded vocabulary, e bytes of an element of the hidden states, w of fp32
(or fp64), p the tensor-parallel size, M microbatches.

Source of the counts per layer: Shoeybi et al. 2019 (arXiv 1909.08053), Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lite.pipeline.stage import recompute_units
from megatron_lite.plan.job import Job

Counts = dict[tuple[str, str], tuple[int, int]]
"""(axis, kind) -> (calls, bytes)."""


def add(*tables: Mapping[tuple[str, str], tuple[int, int]], times: int = 1) -> Counts:
    """The sum of tables, ``times`` over; entries without a call are left out."""
    total: Counts = {}
    for table in tables:
        for key, (calls, size) in table.items():
            before = total.get(key, (0, 0))
            total[key] = (before[0] + times * calls, before[1] + times * size)
    return {key: value for key, value in total.items() if value[0]}


def block_forward(job: Job) -> Counts:
    """Forward pass of one block, on ``tp``.

    Attention and MLP each leave the region of split features once. Without sequence parallelism the partial outputs
    [T, H] are all-reduced: 2 calls of T H e. With it each is reduce-scattered (input T H e), and each region is entered
    by a gather of the slices (input T H e / p): 2 + 2 calls. Query, key and value share one gather, gate and up too.
    """
    if job.layout.tp == 1:
        return {}
    if job.slices == 1:
        return {("tp", "all_reduce"): (2, 2 * job.hidden_bytes)}
    return {
        ("tp", "all_gather"): (2, 2 * job.hidden_bytes),
        ("tp", "reduce_scatter"): (2, 2 * job.hidden_bytes * job.slices),
    }


def block_backward(job: Job) -> Counts:
    """Backward pass of one block, on ``tp``.

    The mirror image: the gradient of each region's input, [T, H], is all-reduced (2 calls of T H e), or, under sequence
    parallelism, reduce-scattered, and the gradient of each region's output is gathered. There, only slices of the
    inputs were kept, so each is gathered a second time for the weight gradients: 4 gathers, 2 reduce-scatters.
    """
    if job.layout.tp == 1:
        return {}
    if job.slices == 1:
        return {("tp", "all_reduce"): (2, 2 * job.hidden_bytes)}
    return {
        ("tp", "all_gather"): (4, 4 * job.hidden_bytes),
        ("tp", "reduce_scatter"): (2, 2 * job.hidden_bytes * job.slices),
    }


def embedding(job: Job) -> Counts:
    """Forward and backward of the token embedding, on ``tp``.

    Each rank looks up the ids that it holds; the sum is an all-reduce of T H e, or a reduce-scatter whose gradient is
    gathered (input T H e / p). Learned positions are whole on every rank and send nothing.
    """
    if job.layout.tp == 1:
        return {}
    if job.slices == 1:
        return {("tp", "all_reduce"): (1, job.hidden_bytes)}
    return {
        ("tp", "all_gather"): (1, job.hidden_bytes),
        ("tp", "reduce_scatter"): (1, job.hidden_bytes * job.slices),
    }


def head(job: Job) -> Counts:
    """Forward and backward of output projection and loss, on ``tp``.

    The projection is a column-parallel layer: the gradient of its input is all-reduced (T H e), or its input is gathered
    in forward and in backward and the gradient reduce-scattered. The cross entropy all-reduces the largest logit of each
    token (T w), and then in one call the sum of exponentials, the target's logit and, with label smoothing, the sum of
    all logits (2 or 3 times T w); its backward sends nothing.
    """
    if job.layout.tp == 1:
        return {}
    sums = 3 if job.config.label_smoothing else 2
    loss: Counts = {("tp", "all_reduce"): (2, (1 + sums) * job.tokens * job.wide.itemsize)}
    if job.slices == 1:
        return add(loss, {("tp", "all_reduce"): (1, job.hidden_bytes)})
    return add(
        loss,
        {
            ("tp", "all_gather"): (2, 2 * job.hidden_bytes),
            ("tp", "reduce_scatter"): (1, job.hidden_bytes * job.slices),
        },
    )


def layers(job: Job, stage: int) -> Counts:
    """All layers of a stage for one microbatch, forward and backward, on ``tp``.

    A block that is computed again does its forward pass twice, collectives included: the last tensor it keeps for
    backward is the input of the MLP's second matrix, and that is known to be kept only when the product and its sum
    over the ranks are done.
    """
    count = len(job.placement[stage])
    again = sum(end - begin for begin, end, recomputed in recompute_units(job.recompute, count) if recomputed)
    found = add(add(block_forward(job), times=count + again), add(block_backward(job), times=count))
    if stage == 0:
        found = add(found, embedding(job))
    if stage == job.layout.pp - 1:
        found = add(found, head(job))
    return found


def messages(job: Job, stage: int) -> Counts:
    """Hidden states and their gradients between stages, for one microbatch.

    A message is [T, H] or, under sequence parallelism, a rank's slice. The queues are named by direction; both ends
    count their side.
    """
    size, found = job.hidden_bytes, Counts()
    if stage < job.layout.pp - 1:
        found = add(found, {("forward", "send"): (1, size), ("backward", "recv"): (1, size)})
    if stage > 0:
        found = add(found, {("forward", "recv"): (1, size), ("backward", "send"): (1, size)})
    return found


def gradient_sums(job: Job, stage: int) -> Counts:
    """Sums of gradients at the end of a step: partial ones, tied ones, and every bucket over the data-parallel ranks.

    A bucket of n elements (alignment and padding included) is all-reduced, or reduce-scattered under ZeRO 1, once in a
    step: n bytes of the reduce dtype. A late bucket is first summed over the ranks on which it is partial and over the
    holders of its tie, each an all-reduce of its n elements in the gradients' dtype. In deterministic mode sums are
    all-to-alls, and where everyone needs the sum a gather of the shares follows.
    """
    found: Counts = {}
    for bucket in job.buckets(stage):
        n = bucket.end - bucket.begin
        groups = [("tie", len(bucket.tie))] if len(bucket.tie) > 1 else []
        if bucket.partial is not None:
            groups.append((bucket.partial, job.group_size(bucket.partial)))
        for axis, ranks in groups:
            found = add(found, _sum_in_place(job, axis, ranks, n))
        found = add(found, _bucket_sum(job, n))
    return found


def _bucket_sum(job: Job, n: int) -> Counts:
    """The sum of one bucket of n elements over the data-parallel ranks."""
    size = n * (job.reduce_dtype or job.wide).itemsize
    if job.dp_ranks == 1 or n == 0:
        return {}
    if not job.deterministic:
        return {("dp_cp", "reduce_scatter" if job.zero_stage else "all_reduce"): (1, size)}
    gather: Counts = {} if job.zero_stage else {("dp_cp", "all_gather"): (1, size // job.dp_ranks)}
    return add({("dp_cp", "all_to_all"): (1, size)}, gather)


def _sum_in_place(job: Job, axis: str, ranks: int, n: int) -> Counts:
    """The sum of a late bucket of n elements over a group.

    Ordered (deterministic) sums of few elements are one gather, larger ones an all-to-all of n elements, padded to a
    multiple of the ranks, and a gather of the shares (``Axis.ordered_all_reduce``).
    """
    w = job.wide.itemsize
    if n == 0:
        return {}
    if not job.deterministic:
        return {(axis, "all_reduce"): (1, n * w)}
    if n <= 4096:
        return {(axis, "all_gather"): (1, n * w)}
    share = -(-n // ranks)
    return {(axis, "all_to_all"): (1, share * ranks * w), (axis, "all_gather"): (1, share * w)}


def weight_gathers(job: Job, stage: int) -> Counts:
    """The gather of updated weights under ZeRO 1: each bucket's share, n e / (dp cp) bytes."""
    if not job.zero_stage or job.dp_ranks == 1:
        return {}
    lengths = [bucket.end - bucket.begin for bucket in job.buckets(stage)]
    return add(*({("dp_cp", "all_gather"): (1, n * job.dtype.itemsize // job.dp_ranks)} for n in lengths if n))


def step_traffic(job: Job, stage: int) -> Counts:
    """Everything a rank of a stage sends in one step: layers and messages of M microbatches, sums, weight gathers.

    Not in it: the one small vector that all ranks exchange at the end of a step.
    """
    one = add(layers(job, stage), messages(job, stage))
    return add(add(one, times=job.microbatches), gradient_sums(job, stage), weight_gathers(job, stage))
