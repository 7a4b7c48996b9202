"""A ring attractor learns to keep an angle, in PyTorch.

    python examples/ring_attractor.py                      the original recipe: 1000 steps of Adam
    python examples/ring_attractor.py --gain               a small network decides how much each velocity turns the ring
    python examples/ring_attractor.py --gru --save gru.json    a GRU of equal size on the same data, for
                                                           `annulus train ring-attractor --peer gru.json`

The task, the data (to the bit), the loss and the optimiser are those of `annulus train ring-attractor`, where
train/task.h describes them: angular velocities come in, the angle they add up to is wanted, one step later.
"""

import argparse
import json
import math
import sys
import time

import torch

import annulus

FASTEST = 0.1 * math.pi  # radians a step
WEIGHTS, BATCHES, EVALUATION = 1, 3, 4  # streams of random numbers


class Rng:
    """splitmix64, many numbers at once: the same on every machine and in C++. A stream is named by three numbers."""

    STEP, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def __init__(self, seed, purpose, number):
        state = torch.tensor(seed)
        for added in (purpose, number, 0):
            state = self._mix(state) + added
        self._state = state.item() & self.MASK

    def next(self, *size):
        """64 bits each."""
        count = math.prod(size)
        numbers = self._signed(self._state) + self._signed(self.STEP) * torch.arange(1, count + 1)  # wraps around
        self._state = (self._state + self.STEP * count) & self.MASK
        return self._mix(numbers).view(size)

    @classmethod
    def uniform(cls, bits):
        """[0, 1), in double precision."""
        return cls._shift(bits, 11).double() * 2.0**-53

    @classmethod
    def of_three(cls, bits):
        """0, 1 or 2: the unsigned number modulo 3, of which 2^32 leaves 1."""
        return (cls._shift(bits, 32) + (bits & 0xFFFFFFFF)) % 3

    @classmethod
    def _mix(cls, z):
        z = (z ^ cls._shift(z, 30)) * cls._signed(0xBF58476D1CE4E5B9)
        z = (z ^ cls._shift(z, 27)) * cls._signed(0x94D049BB133111EB)
        return z ^ cls._shift(z, 31)

    @staticmethod
    def _shift(z, bits):  # without the sign
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    @staticmethod
    def _signed(n):
        return n - (1 << 64) if n >> 63 else n


def draw_sequences(B, T, rng, lead=0.1):
    """velocity (B, T), start (B,), target (B, T): still at first, then moving with one of three probabilities."""
    moving = T - math.floor(lead * T)
    bits = rng.next(B, 2 + 2 * moving)
    u = Rng.uniform(bits)
    start = 2 * math.pi * u[:, 0]
    still = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)[Rng.of_three(bits[:, 1]), None]
    drawn = torch.where(u[:, 2::2] >= still, -FASTEST + 2 * FASTEST * u[:, 3::2], 0.0)
    velocity = torch.nn.functional.pad(drawn, (T - moving, 0)).float()
    target = torch.cat([start[:, None], velocity.double()], 1).cumsum(1)[:, :-1]
    return velocity, start, target


def turns(velocity):
    """The two actions: how fast to the left, how fast to the right."""
    return torch.stack([torch.relu(-velocity), torch.relu(velocity)], -1)


class Ring(torch.nn.Module):
    """angle (B, T) and activity (B, T), the sum of |r|, from velocities (B, T) and start angles (B,)."""

    def __init__(self, neurons, gain, seed):
        super().__init__()
        self.ring = annulus.nn.RingRNN(neurons, 2)
        # As annulus.nn.RingRNN starts, but with the numbers of the C++ training.
        u = Rng.uniform(Rng(seed, WEIGHTS, 0).next(3, neurons, neurons, 2))
        weights = torch.sqrt(-2 * torch.log(1 - u[..., 0])) * torch.cos(2 * math.pi * u[..., 1]) / math.sqrt(neurons)
        with torch.no_grad():
            self.ring.Wa.copy_(weights[:2])
            self.ring.Wo.copy_(weights[2])
        if gain:
            self.gain = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
            with torch.no_grad():  # at first every action is the one just seen
                self.gain[2].weight.zero_()
                self.gain[2].bias.copy_(torch.tensor([1.0, 1.0, 0.0, 0.0]))

    def actions(self, velocity):
        now = turns(velocity)
        if not hasattr(self, "gain"):
            return now
        earlier = torch.nn.functional.pad(velocity, (1, 0))[:, :-1]
        gains = self.gain(torch.stack([velocity, earlier], -1) / FASTEST)
        return gains[..., :2] * now + gains[..., 2:] * turns(earlier)  # its training needs dA

    def forward(self, velocity, start):
        out, _ = self.ring(self.actions(velocity), self.ring.bump(start))
        angle, _ = annulus.ring_readout(out)
        return angle, out.abs().sum(-1)


class Gru(torch.nn.Module):
    """As many hidden units, hence as many parameters; starts from the same bump, reads out by a matrix it learns."""

    def __init__(self, neurons):
        super().__init__()
        self.bump = annulus.nn.RingRNN(neurons, 0).bump
        self.gru = torch.nn.GRU(2, neurons, batch_first=True)
        self.readout = torch.nn.Linear(neurons, 2)

    def forward(self, velocity, start):
        out, _ = self.gru(turns(velocity), self.bump(start).to(velocity.device)[None])
        x, y = self.readout(out).unbind(-1)
        return torch.atan2(y, x), None


def loss_of(angle, activity, target):
    """Squared distance on the unit circle; and the bump neither fades nor grows (of a ring: a GRU has no bump)."""
    loss = (2 - 2 * torch.cos(angle - target)).mean()
    return loss if activity is None else loss + 0.2 * (activity - activity[:, :1]).square().mean()


def circular(angle, target):
    return (torch.remainder(angle.double() - target + math.pi, 2 * math.pi) - math.pi).abs()


def train(model, options):
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    begin, history = time.perf_counter(), []
    for step in range(options.steps):
        batch = draw_sequences(options.batch, options.length, Rng(options.seed, BATCHES, step))
        velocity, start, target = (x.to(options.device) for x in batch)
        optimizer.zero_grad()
        angle, activity = model(velocity, start)
        loss = loss_of(angle, activity, target.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        if step % 50 == 49 or step + 1 == options.steps:
            error = circular(angle.detach(), target).mean().item()
            print(f"step {step + 1}/{options.steps}  loss {loss.item():.5f}  error {error:.4f} rad", file=sys.stderr)
    return history, time.perf_counter() - begin


@torch.no_grad()
def evaluate(model, T, device, sequences=200):
    """Of the circular error on sequences that no training has seen."""
    velocity, start, target = (x.to(device) for x in draw_sequences(sequences, T, Rng(1, EVALUATION, T)))
    error = circular(model(velocity, start)[0], target)
    curve = error.mean(0)
    return {
        "T": T, "mean": error.mean().item(), "std": error.std(correction=0).item(), "max": error.max().item(),
        "final": curve[-1].item(), "curve": curve.tolist(),
    }


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--neurons", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=100, help="steps of a training sequence")
    parser.add_argument("--rate", type=float, default=1e-3, help="of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--gain", action="store_true", help="the actions come from a small network of the velocity")
    kind.add_argument("--gru", action="store_true", help="a GRU of equal size instead of the ring")
    parser.add_argument("--save", metavar="F.json", help="write the evaluation here")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    torch.manual_seed(options.seed)
    model = (Gru(options.neurons) if options.gru else Ring(options.neurons, options.gain, options.seed)).to(options.device)
    parameters = sum(p.numel() for p in model.parameters())
    name = "GRU" if options.gru else "ring RNN in torch" + (", gain network" if options.gain else "")
    print(f"{name}: {parameters} parameters, {options.steps} steps of {options.batch} sequences")
    history, seconds = train(model, options)
    print(f"loss {history[0]:.4f} -> {history[-1]:.4f} in {seconds:.1f} s")
    results = [evaluate(model, T, options.device) for T in (500, 1000)]
    for r in results:
        print(f"T = {r['T']:4}: mean {r['mean']:.4f}  std {r['std']:.4f}  max {r['max']:.4f}  final {r['final']:.4f} rad")
    if options.save:
        about = {"name": name, "parameters": parameters, "steps": options.steps, "seconds": seconds}
        with open(options.save, "w", encoding="utf-8") as file:
            json.dump([about | r for r in results], file)
    return history, results


if __name__ == "__main__":
    main(sys.argv[1:])
