"""Records the preprocessing of ControlNet images by Pillow and OpenCV: tests/golden/data/control.json.

    python tools/golden/control.py tests/golden/data/control.json

`resized`: Image.LANCZOS, exact. `edges`: cv2.Canny(picture, 100, 200), exact; hex of RGB in, of one channel out.
"""
import json
import sys

import cv2
import numpy as np
from PIL import Image


def blobs(w, h, seed):
    """Smooth shapes with edges in every direction, and a little noise."""
    rng = np.random.RandomState(seed)
    y, x = np.mgrid[0:h, 0:w].astype(float)
    image = np.full((h, w, 3), 60.0)
    for _ in range(5):
        cx, cy, r = rng.uniform(0, w), rng.uniform(0, h), rng.uniform(2, w / 2)
        image[(x - cx) ** 2 + (y - cy) ** 2 < r * r] = rng.uniform(0, 255, 3)
    return np.clip(image + rng.normal(0, 6, image.shape), 0, 255).astype(np.uint8)


def row(rgb, out, **extra):
    return {"height": rgb.shape[0], "width": rgb.shape[1], "rgb": rgb.tobytes().hex(), "out": out.tobytes().hex(), **extra}


def main():
    resized = []
    for seed, (w, h, to_w, to_h) in enumerate([(13, 10, 8, 8), (10, 13, 24, 20), (31, 9, 4, 4), (8, 8, 8, 16), (3, 2, 9, 9)]):
        rgb = np.random.RandomState(seed).randint(0, 256, (h, w, 3)).astype(np.uint8)
        out = np.asarray(Image.fromarray(rgb).resize((to_w, to_h), Image.LANCZOS))
        resized.append(row(rgb, out, to_height=to_h, to_width=to_w))
    edges = []
    for seed, (w, h) in enumerate([(32, 24), (17, 29), (40, 3), (1, 1)]):
        rgb = blobs(w, h, seed)
        edges.append(row(rgb, cv2.Canny(rgb, 100, 200)))
        print(f"{w}x{h}: {(edges[-1]['out'].count('ff'))} edge pixels")
    with open(sys.argv[1], "w") as f:
        json.dump({"written_by": "tools/golden/control.py", "opencv": cv2.__version__, "resized": resized, "edges": edges}, f)
        f.write("\n")


if __name__ == "__main__":
    main()
