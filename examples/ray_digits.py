"""ray.train over potluck: Ray starts the workers, on this machine or on a cluster that it has.

python examples/ray_digits.py --workers 2
python examples/ray_digits.py --workers 8 --address auto     on a cluster of Ray

Ray is the launcher here, in place of ``potluck run`` and torchrun.
"""

import argparse
import sys
import tempfile

try:
    import ray
    import torch
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
    from sklearn.datasets import load_digits
    from torch import nn
except ModuleNotFoundError as error:
    sys.exit(f"this needs {error.name.partition('.')[0]}: pip install 'potluck[torch,sklearn,ray]'")


def train(config):
    """What every worker runs; the process group is there already."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
    y = torch.tensor(digits.target)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    losses = []
    for _ in range(config["steps"]):
        mine = torch.randint(len(y), (64,)).chunk(world_size)[rank]  # one seed: the same batches
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return {
        "rank": rank,
        "world_size": world_size,
        "backend": torch.distributed.get_backend(),
        "first": losses[0],
        "last": losses[-1],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--address", help="of a cluster that is there (auto: find it)")
    args = parser.parse_args()

    here = {} if args.address else {"num_cpus": args.workers, "include_dashboard": False}
    ray.init(address=args.address, log_to_driver=False, **here)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"steps": args.steps},
            torch_config=TorchConfig(backend="potluck"),
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(storage_path=folder),
        )
        result = trainer.fit()
    seen = result.return_value
    print(
        f"rank {seen['rank']} of {seen['world_size']}, backend {seen['backend']}: "
        f"loss {seen['first']:.4f} -> {seen['last']:.4f}"
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
