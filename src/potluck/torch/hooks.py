"""A communication hook for torch's DDP: gradients are sent encoded, with error feedback.

    model.register_comm_hook(CodecState("int8"), codec_hook)

The codec is applied inside the reduction (see ``potluck.codecs``): each value is encoded at most
twice for any world size, and all ranks end with the same bits.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from potluck.codecs import codec_of
from potluck.torch.process_group.group import PotluckProcessGroup


class CodecState:
    """The state of the hook: for each bucket the residual, the error of its last encoding.

    The residual is added before the gradients of the next step are encoded (error feedback); it
    takes as much memory as the gradients. ``codec`` is ``fp16``, ``bf16`` or ``int8``;
    ``process_group`` that of the model, by default the group of all ranks. ValueError for an
    unknown codec.
    """

    def __init__(
        self,
        codec: str,
        *,
        error_feedback: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        codec_of(codec)
        self.codec = codec
        self.error_feedback = error_feedback
        self.process_group = process_group
        self._residuals: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def group(self) -> PotluckProcessGroup:
        """The group to reduce over; TypeError if it is not potluck's."""
        group = self.process_group or dist.group.WORLD
        if not isinstance(group, PotluckProcessGroup):
            raise TypeError(
                "codec_hook needs a process group of backend 'potluck', and this group has "
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


def codec_hook(
    state: CodecState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:  # torch checks these annotations
    """Average a bucket of float32 gradients over the ranks, sent encoded by the state's codec.

    TypeError, out of ``backward()``, for gradients of another dtype.
    """
    work = state.group().all_reduce_encoded(bucket.buffer(), state.codec, state.residual(bucket))
    return work.get_future().then(lambda future: future.value()[0])
