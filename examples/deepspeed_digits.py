"""DeepSpeed over potluck: ZeRO 0 to 3 on CPUs, its collectives on potluck's links.

potluck run --workers 2 examples/deepspeed_digits.py --stage 3
torchrun --nproc-per-node 2 examples/deepspeed_digits.py --stage 3
python examples/deepspeed_digits.py

DeepSpeed compiles an extension of its own in the first run, which takes a minute or two.
"""

import argparse
import hashlib
import os
import sys
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it also where no launcher set it
warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about calls of DeepSpeed

try:
    import deepspeed
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
except ModuleNotFoundError as error:
    sys.exit(
        f"this needs {error.name.partition('.')[0]}: pip install 'potluck[torch,sklearn,deepspeed]'"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    deepspeed.init_distributed(
        dist_backend="potluck", init_method="potluck://", auto_mpi_discovery=False
    )
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_batch_size": 64,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
            "zero_optimization": {"stage": args.stage},
        },
    )

    losses = []
    for _ in range(args.steps):
        mine = torch.randint(len(y), (64,)).chunk(world_size)[rank]  # one seed: the same batches
        loss = nn.functional.cross_entropy(engine(x[mine]), y[mine])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / world_size)

    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=args.stage == 3):
        state = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    digest = hashlib.sha256(b"".join(state))
    print(
        f"rank {rank} of {world_size}, backend {torch.distributed.get_backend()}: "
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, parameters {digest.hexdigest()[:12]}"
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
