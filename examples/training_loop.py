"""What a real training script has around its loop, on handwritten digits, alone or on many workers.

python examples/training_loop.py --precision bfloat16
potluck run --workers 4 examples/training_loop.py --checkpoint state --tensorboard runs --adapt

Half precision, clipping, accumulation, recomputation, a learning rate schedule, checkpoints,
a progress bar, TensorBoard, shares and batches that adapt; docs/training.md explains each.
"""

import argparse
import contextlib
import sys

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0].replace("sklearn", "scikit-learn")
    sys.exit(f"training_loop.py needs the Python package {package}: pip install {package}")

import potluck.torch as pt


class Network(nn.Module):
    """A convolutional network; with ``recompute`` its middle is computed again in backward."""

    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x):
        x = self.stem(x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.recompute else self.middle(x)
        return self.head(x)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=8, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, all workers")
    parser.add_argument("--pieces", type=int, default=2, help="backwards per step")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16", "float16"], default="float32"
    )
    parser.add_argument("--recompute", action="store_true", help="less memory, more time")
    parser.add_argument("--adapt", action="store_true", help="shares by speed, batches by noise")
    parser.add_argument("--checkpoint", metavar="DIR", help="keep the state there, go on from it")
    parser.add_argument("--tensorboard", metavar="DIR", help="write figures there")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    test = torch.arange(len(y)) % 5 == 0

    model = pt.DDP(Network(args.recompute))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
    scaler = pt.GradScaler(enabled=args.precision == "float16")
    policy = pt.Policy(save_every=20)
    if args.adapt:
        batching = pt.NoiseBatching(min_batch=32, max_batch=256)
        policy = pt.Policy(save_every=20, shares=pt.ProportionalShares(), batching=batching)
    callbacks = [pt.ProgressBar()]
    if args.tensorboard:
        callbacks.append(pt.TensorBoardLogger(args.tensorboard))
    job = pt.ElasticLoop(
        model,
        optimizer,
        (x[~test], y[~test]),
        batch_size=args.batch_size,
        epochs=args.epochs,
        also={"schedule": schedule, "scaler": scaler},
        checkpoint=args.checkpoint and pt.CheckpointStore(args.checkpoint, asynchronous=True),
        policy=policy,
        callbacks=callbacks,
    )

    half = args.precision != "float32"
    for images, labels in job:
        with job.step():
            optimizer.zero_grad()
            pieces = list(zip(images.chunk(args.pieces), labels.chunk(args.pieces), strict=True))
            total = 0.0
            for number, (some, right) in enumerate(pieces, 1):
                # All but the last piece only accumulate; the last one's backward sends the sum.
                with contextlib.nullcontext() if number == len(pieces) else model.no_sync():
                    with torch.autocast("cpu", getattr(torch, args.precision), enabled=half):
                        scores = model(some)
                    loss = F.cross_entropy(scores.float(), right, reduction="sum") / len(images)
                    scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(optimizer)
            pt.clip_grad_norm_(model, max_norm=5.0)
            job.log(loss=total)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[test]).argmax(1) == y[test]).double().mean().item()
    job.log(test_accuracy=accuracy)
    if job.ctx.is_master:
        print(f"test accuracy {accuracy:.4f} after {job.step_number} steps")
    return job


if __name__ == "__main__":
    main()
