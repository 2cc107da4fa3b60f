"""Records images processed by transformers' CLIPImageProcessor in tests/golden/data/image_processor.json.

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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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
    # Qwen2-VL's: sides are multiples of a token. Sizes with fewer rows and more columns are avoided: Pillow 13 scales
    # them in another order.
    (320, 260, {"merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}, 977),
    (1300, 900, {"merge_size": 2}, 99991),
    (110, 40, {"merge_size": 2, "patch_size": 14, "min_pixels": 9000, "max_pixels": 20000}, 97),
    (13, 10, {"merge_size": 1, "patch_size": 4, "min_pixels": 16, "max_pixels": 100}, 1),
    (10, 7, {"merge_size": 2, "patch_size": 2, "min_pixels": 16, "max_pixels": 400}, 1),
    (14, 7, {"merge_size": 2, "patch_size": 2, "min_pixels": 16, "max_pixels": 400, "image_mean": [0.5, 0.4, 0.3]}, 1),
]


def qwen_pixels(config, image):
    p = Qwen2VLImageProcessorPil(**config)
    y = p(images=image, return_tensors="np")
    (_, rows, columns), m = y["image_grid_thw"][0], p.merge_size
    y = y["pixel_values"].reshape(rows // m, columns // m, m, m, 3, p.temporal_patch_size, p.patch_size, p.patch_size)
    return y[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * p.patch_size, columns * p.patch_size, 3)


def row(width, height, config, step, seed):
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)
    if width > 100:  # a ramp, which needs no room
        y, x = np.mgrid[0:height, 0:width]
        pixels = np.stack([(x * 7 + y) % 256, (x + y * 5) % 256, (x * y) % 256], -1).astype(np.uint8)
    if "merge_size" in config:
        y = qwen_pixels(config, Image.fromarray(pixels))
    else:
        y = CLIPImageProcessorPil(**config)(images=Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
        y = y.transpose(1, 2, 0)
    y = np.ascontiguousarray(y).astype(np.float32)
    return {"height": height, "width": width, "rgb": "ramp" if width > 100 else pixels.tobytes().hex(), "config": config,
            "out_height": y.shape[0], "out_width": y.shape[1], "step": step, "out": [float(v) for v in y.ravel()[::step]]}


rows = [row(*case, seed) for seed, case in enumerate(CASES)]
with open(sys.argv[1], "w") as f:
    head = {"written_by": "tools/golden/image_processor.py", "transformers": transformers.__version__}
    f.write(json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")
