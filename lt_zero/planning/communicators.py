"""NCCL's communicators on a rank: how many a run makes, and the memory that they take.

Note [Memory of a communicator]
    For each channel, peer and direction NCCL 2.28 has a buffer of each of its protocols (computeBuffSizes in
    src/init.cc): 4 MiB, which NCCL_BUFFSIZE sets, 512 KiB and 4.7 MiB. A ring has one peer in each of two directions.
    On GPUs with NVLink 16 channels are usual; NCCL_MAX_NCHANNELS lowers their number. Trees and all-to-alls have more
    peers, and a direction inside of a node may need no buffer. None of it is measured for a forecast, so it is shown
    apart from what the engine allocates. Set-up connects everything before it checks the memory, and says what that has
    taken (``Communicators`` of core/comm/process_groups.py).
"""

from __future__ import annotations

from lt_zero.config import ZeroConfig
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.core.comm.process_groups import Communicators

_SIMPLE = 4 << 20
_LL = 8 * 512 * 8 * 16  # lines of a thread, threads, steps, bytes of a line
_LL128 = 120 * 640 * 8 * 8  # numbers of a thread, threads, steps, bytes of a number
CHANNELS = 16
NBYTES = 2 * CHANNELS * (_SIMPLE + _LL + _LL128)  # of a communicator


def planned_communicators(config: ZeroConfig, ranks: ParallelSizes) -> Communicators:
    """The communicators that a rank of a run on GPUs has, and about what they take of its GPU."""
    number = communicators(config, ranks)
    return Communicators(number, number * NBYTES)


def communicators(config: ZeroConfig, ranks: ParallelSizes) -> int:
    """The number of communicators of more than one rank that a rank of a run has, with that of the launcher.

    Those of compressed reductions are not counted, nor those of layers that several stages of a pipeline share.
    """
    world = ranks.pipeline * ranks.of_stage
    if world == 1:
        return 0
    everyone = 2  # the launcher's, and the gathers' of all ranks
    axes = (ranks.pipeline, ranks.data, ranks.sequence, ranks.tensor)
    of_axes = 0 if ranks.is_plain else sum(size > 1 for size in axes)
    sharing = [world]  # sizes of the groups over which parameters are sharded
    more = 0
    if ranks.pipeline > 1:
        more += ranks.pipeline < world  # what the stages agree on
        sharing.append(ranks.of_stage)
    if ranks.tensor > 1:
        sharing.append(ranks.with_part)
    if ranks.sequence > 1:
        more += 1  # the user's group of those that see other tokens
    if ranks.expert > 1:
        more += 1  # what layers send
        sharing.append(ranks.with_experts)
    return everyone + of_axes + more + sum(_of_group(config, size, world) for size in sharing)


def _of_group(config: ZeroConfig, size: int, world: int) -> int:
    """Those of ranks that shard parameters, beside the one that all ranks have."""
    if size == 1:
        return 0
    zero = config.zero_optimization
    shards = zero.shards(size)
    found = 1 + (size < world)  # reductions, gathers
    if shards < size:
        found += 1 + 2 * (shards > 1)  # between replicas; inside of one
    found += zero.secondary_shards(size) > 1
    offload = zero.offload_optimizer
    return found + (offload.device != "none" and offload.overlap_step is True and shards > 1)
