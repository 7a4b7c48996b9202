"""A ring attractor that `annulus train ring-attractor` trained, simulated in PyTorch and drawn.

    annulus train ring-attractor --recipe default --out ring
    python examples/ring_simulation.py ring/default                     its error on the program's test sequences
    python examples/ring_simulation.py ring/default --plot ring.svg     and one of them as a picture, without matplotlib
"""

import argparse
import base64
import math
import struct
import zlib

import torch
from ring_attractor import EVALUATION, Rng, circular, draw_sequences

import annulus


@torch.no_grad()
def simulate(ring, sequences, steps):
    """velocity, target, angle and error (B, T) and states (B, T, N), on sequences that no training has seen."""
    velocity, start, target = draw_sequences(sequences, steps, Rng(1, EVALUATION, steps))
    states, _ = ring(ring.actions(velocity), ring.bump(start))
    angle, _ = annulus.ring_readout(states)
    return {"velocity": velocity, "target": target, "angle": angle, "error": circular(angle, target), "states": states}


def png(gray):
    """A picture (height, width) of numbers from 0 to 1, as bytes: 0 is white, 1 is dark blue."""
    shade = gray.clamp(0, 1)[..., None]
    rgb = ((1 - shade) * torch.tensor([250.0, 250, 252]) + shade * torch.tensor([20.0, 40, 110])).to(torch.uint8)
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in rgb)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", gray.size(1), gray.size(0), 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def draw(run, number):
    """An SVG of one sequence: the states, the angle wanted and the angle decoded; below, the velocity."""
    width, height, below, left, top = 900, 300, 110, 70, 40
    states = run["states"][number]
    T, N = states.shape
    picture = base64.b64encode(png((states / states.max().clamp(min=1e-12)).T.flip(0))).decode()

    def line(values, low, high, y, h, color, dash="", around=False):
        """around: values are angles, and the line is broken where they go once around."""
        parts, points, values = [], [], values.tolist()
        for t, v in enumerate(values):
            if around and points and abs(v - values[t - 1]) > (high - low) / 2:
                parts, points = [*parts, points], []
            points.append(f"{left + (t + 0.5) * width / T:.1f},{y + h * (high - v) / (high - low):.1f}")
        lines = "".join(f'<polyline points="{" ".join(p)}"/>' for p in [*parts, points])
        return f'<g fill="none" stroke="{color}" stroke-width="1.6" stroke-dasharray="{dash}">{lines}</g>'

    def text(x, y, words, anchor="start"):
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'

    turn = 2 * math.pi
    second, fastest = top + height + 50, 0.1 * math.pi
    error = run["error"][number].mean()
    return "".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {second + below + 45}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        text(left, 24, f"{N} neurons over {T} steps (dark: active), the angle wanted (dashed) and the angle decoded; "
             f"mean error {error:.3f} rad"),
        f'<image x="{left}" y="{top}" width="{width}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering: pixelated" href="data:image/png;base64,{picture}"/>',
        line(run["target"][number].remainder(turn), 0, turn, top, height, "#e06c00", "5 4", around=True),
        line(run["angle"][number].remainder(turn), 0, turn, top, height, "#c01050", around=True),
        text(left - 8, top + 10, "2π", "end"), text(left - 8, top + height, "0", "end"),
        text(left, second - 10, "velocity, radians a step"),
        line(run["velocity"][number], -fastest, fastest, second, below, "#205080"),
        text(left - 8, second + 10, "0.31", "end"), text(left - 8, second + below, "-0.31", "end"),
        text(left, second + below + 20, "step 0"), text(left + width, second + below + 20, f"step {T}", "end"), "</svg>\n",
    ])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="OUT/<recipe> of annulus train ring-attractor")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--plot", metavar="F.svg", help="draw the sequence that turns farthest")
    options = parser.parse_args(arguments)
    ring = annulus.nn.RingRNN.load(options.folder)
    run = simulate(ring, options.sequences, options.steps)
    print(f"{ring.n_neurons} neurons, {options.sequences} sequences of {options.steps} steps: "
          f"mean error {run['error'].mean():.4f} rad, at the end {run['error'][:, -1].mean():.4f} rad")
    if options.plot:
        farthest = (run["target"].amax(1) - run["target"].amin(1)).argmax().item()
        with open(options.plot, "w", encoding="utf-8") as file:
            file.write(draw(run, farthest))


if __name__ == "__main__":
    main()
