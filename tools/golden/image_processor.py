"""Records what transformers' CLIPImageProcessor makes of images into tests/golden/data/image_processor.json.

    python tools/golden/image_processor.py tests/golden/data/image_processor.json

Needs transformers, Pillow and numpy. `out` holds every `step`-th number of the result, channels last. The test allows
one unit in the last place: both compute in float32.
"""
import json
import sys

import numpy as np
import transformers
from PIL import Image
from transformers import CLIPImageProcessorPil

SMALL = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
CASES = [  # width, height, preprocessor_config.json, step
    (40, 31, {}, 977),
    (300, 260, {}, 977),
    (13, 10, SMALL, 1),
    (10, 13, SMALL, 1),
    (29, 8, SMALL, 1),
    (8, 8, SMALL, 1),
    (5, 3, SMALL, 1),
    (17, 12, {"size": 7, "crop_size": 7}, 1),
    (17, 12, {"size": {"height": 5, "width": 9}, "crop_size": {"height": 4, "width": 6}}, 1),
    (17, 12, {"size": {"height": 5, "width": 4}, "crop_size": {"height": 8, "width": 9}}, 1),
    (17, 12, {"size": {"height": 9, "width": 4}, "crop_size": {"height": 6, "width": 7}}, 1),
    (17, 12, {**SMALL, "resample": 2, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 2.0]}, 1),
    (17, 12, {**SMALL, "resample": 1, "do_normalize": False}, 1),
    (6, 5, {"do_resize": False, "crop_size": {"height": 3, "width": 3}, "rescale_factor": 0.01}, 1),
    (6, 5, {"do_resize": False, "do_center_crop": False, "do_rescale": False, "do_normalize": False}, 1),
]


def row(width, height, config, step, seed):
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)
    if width > 100:  # a ramp, which needs no room
        y, x = np.mgrid[0:height, 0:width]
        pixels = np.stack([(x * 7 + y) % 256, (x + y * 5) % 256, (x * y) % 256], -1).astype(np.uint8)
    y = CLIPImageProcessorPil(**config)(images=Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
    y = np.ascontiguousarray(y.transpose(1, 2, 0)).astype(np.float32)
    return {"height": height, "width": width, "rgb": "ramp" if width > 100 else pixels.tobytes().hex(), "config": config,
            "out_height": y.shape[0], "out_width": y.shape[1], "step": step, "out": [float(v) for v in y.ravel()[::step]]}


rows = [row(*case, seed) for seed, case in enumerate(CASES)]
with open(sys.argv[1], "w") as f:
    head = {"written_by": "tools/golden/image_processor.py", "transformers": transformers.__version__}
    f.write(json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")
