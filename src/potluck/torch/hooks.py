"""A communication hook for torch's DDP: gradients are sent compressed, with error feedback.

    model.register_comm_hook(CompressionState(Int(bits=8)), compression_hook)

All ranks end with the same bits. A codec's strategy (FP16, BF16, Int) works inside the reduction,
which needs the backend "potluck"; the others run on any backend.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from potluck.codecs.codec import Floats
from potluck.compressors import Random, Strategy
from potluck.compressors.encoded import Encoded
from potluck.context.compressed import sum_payloads
from potluck.torch.process_group.group import PotluckProcessGroup


class CompressionState:
    """The state of the hook: for each bucket the residual, the error of its last compression.

    The residual is added before the gradients of the next step are compressed (error feedback); it
    takes as much memory as float32 gradients. ``process_group`` is that of the model, by default
    the group of all ranks. TypeError for what is no strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        error_feedback: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategy is {strategy!r}; it must be one such as TopK(0.01) or Int(bits=8)"
            )
        self.strategy = strategy
        self.error_feedback = error_feedback
        self.process_group = process_group
        self.step = 0
        """The number of backwards so far."""
        self._residuals: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def group(self) -> dist.ProcessGroup:
        """The group to reduce over."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def own_group(self) -> PotluckProcessGroup:
        """The group, for codecs; TypeError if it is not potluck's."""
        group = self.group()
        if not isinstance(group, PotluckProcessGroup):
            raise TypeError(
                f"{self.strategy!r} needs a process group of backend 'potluck', and this group has "
                f"{dist.get_backend(group)!r}: call init_process_group('potluck')"
            )
        return group

    def residual(self, bucket: GradBucket) -> torch.Tensor | None:
        """The residual of a bucket; zeros after DDP has rebuilt its buckets."""
        if not self.error_feedback:
            return None
        index, parameters = bucket.index(), tuple(id(each) for each in bucket.parameters())
        kept = self._residuals.get(index)
        if kept is None or kept[0] != parameters:
            zeros = torch.zeros(bucket.buffer().numel(), dtype=torch.float32)
            kept = self._residuals[index] = (parameters, zeros)
        return kept[1]


def compression_hook(
    state: CompressionState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:  # torch checks these annotations
    """Average a bucket of gradients over the ranks, sent compressed by the state's strategy."""
    buffer, strategy, residual = bucket.buffer(), state.strategy, state.residual(bucket)
    call = state.step << 16 | bucket.index()
    if bucket.is_last():
        state.step += 1
    flat = buffer if buffer.dtype == torch.float32 else buffer.float()
    if isinstance(strategy, Encoded):
        work = state.own_group().all_reduce_encoded(flat, strategy.codec.name, residual)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    group = state.group()
    host = flat.cpu()
    array: Floats = host.numpy()
    kept: Floats | None = None if residual is None else residual.numpy()
    if isinstance(strategy, Random):
        sent = torch.from_numpy(strategy.take(array, kept, call)).to(buffer.device)
    else:
        sent = torch.from_numpy(strategy.compress(array, kept, call)).to(buffer.device)

    def end(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        future.value()
        if isinstance(strategy, Random):
            strategy.put(array, sent.cpu().numpy(), call)
        else:
            sum_payloads(array, received.cpu().numpy(), strategy, call)
        np.divide(array, np.float32(group.size()), out=array)
        return buffer.copy_(host)

    if isinstance(strategy, Random):
        work = dist.all_reduce(sent, group=group, async_op=True)
    else:
        received = sent.new_empty(group.size(), sent.numel())
        work = dist.all_gather_into_tensor(received.view(-1), sent, group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return done
