"""A communication hook for torch's DDP: gradients in fewer bytes on the wire, with error feedback.

    model.register_comm_hook(CodecState("int8"), codec_hook)

The codec works within the reduction (see ``potluck.codecs``): each value is encoded at most twice
whatever the world size, and all ranks end with the same bits.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from potluck.codecs import codec_of
from potluck.torch.process_group.group import PotluckProcessGroup


class CodecState:
    """What the hook keeps between steps: for each bucket, what the codec has lost.

    That is added before the next step's gradients are encoded (error feedback), and takes as much
    memory as the gradients. ``codec`` is ``fp16``, ``bf16`` or ``int8``; ``process_group`` the
    model's, by default that of all ranks. ValueError for an unknown codec.
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
                "codec_hook needs the process group of backend 'potluck', and this one is "
                f"{dist.get_backend(group)!r}: init_process_group('potluck')"
            )
        return group

    def residual(self, bucket: GradBucket) -> torch.Tensor | None:
        """What was lost of this bucket; zeros when DDP has dealt out its parameters anew."""
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
) -> torch.futures.Future[torch.Tensor]:  # torch looks at these annotations
    """Average a bucket of float32 gradients over the ranks, encoded on the wire.

    TypeError, out of ``backward()``, for gradients of another dtype.
    """
    work = state.group().all_reduce_encoded(bucket.buffer(), state.codec, state.residual(bucket))
    return work.get_future().then(lambda future: future.value()[0])
