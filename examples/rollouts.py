"""Learn to balance a pole by PPO: workers play and may come and go, worker 0 learns.

python examples/rollouts.py                                     one process plays and learns
potluck run --workers 3 examples/rollouts.py --plot curve.png   two more play

A player fetches the newest weights with each rollout that it gives; rollouts of weights that are
more than --max-age updates old are dropped. Worker 0 plays, too, whenever it would wait.
"""

import argparse
import queue
import sys
import threading
import time

import numpy as np

try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    sys.exit("rollouts.py needs PyTorch: pip install 'potluck[torch]'")

import potluck

NUM_POLES, NUM_STEPS, MAX_LENGTH = 16, 64, 500


class CartPoles:
    """Poles on carts (Barto, Sutton and Anderson, 1983), each pushed left or right every 20 ms."""

    def __init__(self, seed):
        self.chance = np.random.default_rng(seed)
        self.state = self.chance.uniform(-0.05, 0.05, (NUM_POLES, 4))
        self.length = np.zeros(NUM_POLES, np.int64)

    def step(self, actions):
        """Which poles have fallen or were up for long enough, and how long; these begin anew."""
        _, speed, angle, turn = self.state.T
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (np.where(actions == 1, 10.0, -10.0) + 0.05 * turn**2 * sine) / 1.1
        turning = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        moving = push - 0.05 * turning * cosine / 1.1
        change = np.stack([speed, moving, turn, turning], axis=1)
        self.state = self.state + 0.02 * change
        self.length += 1
        over = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        over |= self.length >= MAX_LENGTH
        lengths = self.length[over]
        self.state[over] = self.chance.uniform(-0.05, 0.05, (over.sum(), 4))
        self.length[over] = 0
        return over, lengths


def new_policy():
    """From a state the preferences for both pushes, and the value of the state."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


@torch.no_grad()
def play(policy, poles):
    """64 steps of 16 poles: what was seen and done, and how much better than expected it was."""
    states, actions, chances, values, overs, lengths = [], [], [], [], [], []
    for _ in range(NUM_STEPS):
        state = torch.tensor(poles.state, dtype=torch.float32)
        found = policy(state)
        choice = torch.distributions.Categorical(logits=found[:, :2])
        action = choice.sample()
        over, ended = poles.step(action.numpy())
        states.append(state)
        actions.append(action)
        chances.append(choice.log_prob(action))
        values.append(found[:, 2])
        overs.append(torch.tensor(over))
        lengths.append(ended)
    value = policy(torch.tensor(poles.state, dtype=torch.float32))[:, 2]
    advantage, advantages = torch.zeros(NUM_POLES), []
    for step in reversed(range(NUM_STEPS)):  # Schulman et al., 2016; each step up is worth 1
        goes_on = (~overs[step]).float()
        surprise = 1 + 0.99 * value * goes_on - values[step]
        advantage = surprise + 0.99 * 0.95 * goes_on * advantage
        value = values[step]
        advantages.append(advantage)
    advantages.reverse()
    played = {"states": states, "actions": actions, "chances": chances, "advantages": advantages}
    played["returns"] = [a + v for a, v in zip(advantages, values, strict=True)]
    return {name: torch.cat(rows) for name, rows in played.items()} | {
        "lengths": np.concatenate(lengths)
    }


def update(policy, optimizer, rollouts):
    """Proximal policy optimization (Schulman et al., 2017): four passes in batches of 512."""
    names = ("states", "actions", "chances", "advantages", "returns")
    data = [torch.cat([torch.as_tensor(each[name]) for each in rollouts]) for name in names]
    data[3] = (data[3] - data[3].mean()) / (data[3].std() + 1e-8)
    for _ in range(4):
        for batch in torch.randperm(len(data[0])).split(512):
            states, actions, chances, advantages, returns = (each[batch] for each in data)
            found = policy(states)
            choice = torch.distributions.Categorical(logits=found[:, :2])
            ratio = (choice.log_prob(actions) - chances).exp()
            gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            error = (found[:, 2] - returns).square().mean()
            optimizer.zero_grad()
            (0.005 * error - gain - 0.01 * choice.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


@potluck.service("learner")
class Learner:
    """What players call. The weights and the rollouts that wait pass between two threads here."""

    def __init__(self, policy, max_age):
        self.policy, self.max_age = policy, max_age
        self.waiting = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.version, self.is_over = 0, False
        self.given, self.told, self.num_old = {}, set(), 0
        self._publish()

    def _publish(self):
        weights = {name: each.clone() for name, each in self.policy.state_dict().items()}
        with self.lock:
            self.version, self.weights = self.version + 1, weights

    def exchange(self, call, version, rollout):
        """Take a rollout that was played with the weights ``version``; give the newest weights."""
        if rollout is not None:
            self.waiting.put((call.worker, version, rollout))
        if self.is_over:
            self.told.add(call.worker)
            return {"over": True}
        with self.lock:
            return {"over": False, "version": self.version, "weights": self.weights}

    def _take(self):
        """A rollout that waits and is not too old, None if there is none."""
        while not self.waiting.empty():
            worker, version, rollout = self.waiting.get()
            if version >= self.version - self.max_age:
                self.given[worker] = self.given.get(worker, 0) + 1
                return rollout
            self.num_old += 1
        return None


def play_for(ctx):
    """A player: until the learner says that it is over."""
    learner, policy, poles = (
        ctx.connect("learner"),
        new_policy(),
        CartPoles(int(ctx.group.me.worker)),
    )
    reply = learner.exchange(0, None)
    while not reply["over"]:
        policy.load_state_dict(reply["weights"])
        rollout = play(policy, poles)
        if ctx.has_next_group:  # a worker was lost, or has come
            ctx.reform()
        reply = learner.exchange(reply["version"], rollout)


def is_learned(curve, args):
    return len(curve) >= args.updates or curve[-1][1] >= args.reward


def learn(ctx, args):
    """Worker 0. Returns of each update the seconds since the begin, and the mean episode."""
    policy, poles = new_policy(), CartPoles(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    learner = Learner(policy, args.max_age)
    ctx.serve(learner)
    curve, lengths, began = [], np.zeros(0), time.monotonic()
    while not curve or not is_learned(curve, args):
        rollouts = []
        while len(rollouts) < args.rollouts:
            if ctx.has_next_group:
                ctx.reform()
                print(f"update {len(curve)}: {ctx.world_size} workers", flush=True)
            rollouts.append(learner._take() or play(policy, poles))
        update(policy, optimizer, rollouts)
        learner._publish()
        lengths = np.concatenate([lengths, *(each["lengths"] for each in rollouts)])[-100:]
        curve.append((time.monotonic() - began, lengths.mean()))
        if len(curve) % 10 == 0:
            print(f"update {len(curve)}: reward {curve[-1][1]:.1f}", flush=True)
    learner.is_over = True
    deadline = time.monotonic() + 60
    me = ctx.group.me.worker
    while {each.worker for each in ctx.members} - learner.told - {
        me
    } and time.monotonic() < deadline:
        if ctx.has_next_group:
            ctx.reform()
        time.sleep(0.01)
    (_, first), (seconds, last) = curve[0], curve[-1]
    print(f"reward {first:.1f} -> {last:.1f} after {len(curve)} updates in {seconds:.1f} s")
    print(f"rollouts of other workers: {learner.given}, too old: {learner.num_old}")
    return curve


def plot(curve, path):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    seconds, rewards = zip(*curve, strict=True)
    plt.plot(seconds, rewards)
    plt.xlabel("seconds")
    plt.ylabel("steps until a pole falls, mean of 100")
    plt.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reward", type=float, default=400, help="end at this mean reward")
    parser.add_argument("--updates", type=int, default=300, help="end after so many updates")
    parser.add_argument("--rollouts", type=int, default=4, help="rollouts of an update")
    parser.add_argument("--max-age", type=int, default=2, help="updates since a rollout's weights")
    parser.add_argument("--plot", metavar="PNG", help="the reward curve")
    args = parser.parse_args()

    torch.set_num_threads(1)
    with potluck.init() as ctx:
        torch.manual_seed(int(ctx.group.me.worker))
        if not ctx.is_master:
            play_for(ctx)
            return
        curve = learn(ctx, args)
        if args.plot:
            plot(curve, args.plot)


if __name__ == "__main__":
    main()
