"""Records aspect-ratio buckets and masks into tests/golden/data/buckets.json.

    python tools/golden/buckets.py tests/golden/data/buckets.json

Needs torch, numpy and Pillow. The buckets are found by another road than the program's: all grid points are tried, a bucket is
one that cannot grow in at least one direction; aspect ratios and sizes are exact fractions (fifty digits for roots).
Images for which two buckets are as near, or a side lies halfway between two whole numbers, are left out: there the
last bit of a double decides. `masks`: torch.nn.functional.interpolate(mode="area") of a mask in [0, 1], as kohya's
sd-scripts bring a mask to the latents' size. `alpha_png`: 4 x 4 pixels of grey 100, the left half transparent.
"""
import io
import json
import random
import sys
from decimal import Decimal, getcontext
from fractions import Fraction
from math import floor

import numpy as np
import torch
from PIL import Image

getcontext().prec = 50
EDGE = Fraction(1, 10**9)


def buckets(resolution, low, high, step):
    area, grid = resolution**2, range(low, high + 1, step)
    fits = lambda w, h: w <= high and h <= high and w * h <= area
    found = {(w, h) for w in grid for h in grid if fits(w, h) and not (fits(w, h + step) and fits(w + step, h))}
    side = max(s for s in range(step, resolution + 1, step))
    return sorted(found | {(side, side)})


def half(x):
    """Rounds halves up; None where x is nearly halfway."""
    return None if abs((x % 1) - Fraction(1, 2)) < EDGE else floor(x + Fraction(1, 2))


def choose(sizes, w, h):
    if (w, h) in sizes:
        return (w, h), (w, h)
    shape = Fraction(w, h)
    ranked = sorted((abs(Fraction(*s) - shape), s) for s in sizes)
    if len(ranked) > 1 and ranked[1][0] - ranked[0][0] < EDGE:
        return None
    bucket = ranked[0][1]
    scale = max(Fraction(bucket[0], w), Fraction(bucket[1], h))  # covers the bucket
    resized = half(w * scale), half(h * scale)
    return None if None in resized else (bucket, resized)


def choose_smaller(resolution, step, w, h):
    shape, down = Fraction(w, h), lambda x: None if half(x) is None else half(x) // step * step
    resized = (w, h)
    if w * h > resolution**2:
        root = Decimal(w) / Decimal(h)
        wide = Fraction((Decimal(resolution) ** 2 * root).sqrt())
        a, b = down(wide), down(resolution**2 / wide)
        if None in (a, b) or 0 in (a, b):
            return None
        a2, b2 = down(a / shape), down(b * shape)
        if None in (a2, b2) or 0 in (a2, b2):
            return None
        by_width, by_height = abs(Fraction(a, a2) - shape), abs(Fraction(b2, b) - shape)
        if by_width != by_height and abs(by_width - by_height) < EDGE:
            return None
        resized = (a, half(a / shape)) if by_width < by_height else (half(b * shape), b)
        if None in resized:
            return None
    bucket = tuple(s // step * step for s in resized)
    return (bucket, resized) if 0 not in bucket else None


def main(path):
    rng = random.Random(0)
    sizes = [(4000, 3000), (3000, 4000), (1920, 1080), (512, 512), (640, 448), (100, 90), (5000, 200), (300, 2400)]
    sizes += [(rng.randint(64, 3000), rng.randint(64, 3000)) for _ in range(24)]
    lists = []
    for resolution, low, high, step in [(512, 256, 1024, 64), (1024, 512, 2048, 64), (768, 256, 1024, 32),
                                        (1000, 256, 1024, 64), (16, 8, 32, 4)]:
        found = buckets(resolution, low, high, step)
        choices = [[s, *c] for s in sizes if (c := choose(found, *s))]
        lists.append(dict(resolution=resolution, min=low, max=high, step=step, sizes=found, choices=choices))
    smaller = [dict(resolution=r, step=step, choices=[[s, *c] for s in sizes if (c := choose_smaller(r, step, *s))])
               for r, step in [(512, 64), (1024, 64), (300, 32)]]
    masks = []
    for h, w, cell in [(16, 24, 8), (8, 8, 4), (6, 4, 2)]:
        red = np.random.RandomState(h).randint(0, 256, (h, w)).astype(np.uint8)
        weights = torch.nn.functional.interpolate(torch.from_numpy(red)[None, None].double() / 255,
                                                  size=(h // cell, w // cell), mode="area")
        masks.append(dict(cell=cell, height=h, width=w, red=red.flatten().tolist(),
                          weights=weights.flatten().tolist()))
    rgba = np.full((4, 4, 4), 100, np.uint8)
    rgba[..., 3] = [0, 0, 255, 255]
    alpha = io.BytesIO()
    Image.fromarray(rgba).save(alpha, "png")
    with open(path, "w") as f:
        json.dump(dict(made_with=f"torch {torch.__version__}", lists=lists, smaller=smaller, masks=masks,
                       alpha_png=alpha.getvalue().hex()), f)
        f.write("\n")


main(sys.argv[1])
