"""Records small images of every kind as Pillow decodes and resizes them into tests/golden/data/pictures.json.

    python tools/golden/pictures.py tests/golden/data/pictures.json

Needs Pillow and numpy. `files`: the bytes of a file and its RGB pixels over white. Tolerances are stored per row in
steps of 1/255: 0 where the same arithmetic runs, 1 where rounding of alpha or of 16 bits differs, 2 for lossy formats,
whose decoders may round otherwise in another version. `resized`: exact.
"""
import io
import json
import random
import sys

import numpy as np
import PIL
from PIL import Image, ImageOps

W, H = 13, 10


def smooth(w, h, channels=3, depth=256):
    y, x = np.mgrid[0:h, 0:w].astype(float)
    planes = [np.sin(x / (3 + c) + c) * np.cos(y / (2.5 + c) - c) * 0.5 + 0.5 for c in range(channels)]
    return np.round(np.stack(planes, -1) * (depth - 1))


def noisy(w, h, seed):
    return np.random.RandomState(seed).randint(0, 256, (h, w, 3)).astype(np.uint8)


def over_white(image):
    rgba = np.asarray(image.convert("RGBA")).astype(np.float64)
    alpha = rgba[..., 3:] / 255
    return np.round(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def saved(image, **options):
    out = io.BytesIO()
    image.save(out, **options)
    return out.getvalue()


def rows():
    rgb = Image.fromarray(smooth(W, H).astype(np.uint8))
    rgba = Image.fromarray(smooth(W, H, 4).astype(np.uint8), "RGBA")
    grey = Image.fromarray(smooth(W, H, 1)[..., 0].astype(np.uint8))
    grey_alpha = Image.merge("LA", (grey, ImageOps.flip(grey)))
    grey16 = smooth(W, H, 1, 65536)[..., 0].astype(np.uint16)
    palette = rgb.quantize(7)

    def row(name, data, expected=None, tolerance=0):
        if expected is None:
            expected = over_white(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        return {"name": name, "file": data.hex(), "height": expected.shape[0], "width": expected.shape[1],
                "tolerance": tolerance, "rgb": expected.tobytes().hex()}

    yield row("rgb.png", saved(rgb, format="PNG"))
    yield row("rgba.png", saved(rgba, format="PNG"), tolerance=1)
    yield row("grey.png", saved(grey, format="PNG"))
    yield row("grey_alpha.png", saved(grey_alpha, format="PNG"), tolerance=1)
    yield row("bits.png", saved(grey.convert("1"), format="PNG"))
    yield row("palette.png", saved(palette, format="PNG"))
    yield row("palette_transparent.png", saved(palette, format="PNG", transparency=bytes([0, 128, 255, 60, 255, 255, 255])), tolerance=1)
    yield row("grey_transparent.png", saved(grey, format="PNG", transparency=int(np.asarray(grey)[2, 3])))
    scaled = np.repeat(np.round(grey16 / 257).astype(np.uint8)[..., None], 3, -1)
    yield row("grey16.png", saved(Image.fromarray(grey16), format="PNG"), scaled, tolerance=1)
    yield row("rgb.jpg", saved(rgb, format="JPEG", quality=85), tolerance=2)
    yield row("rgb_444.jpg", saved(rgb, format="JPEG", quality=95, subsampling=0), tolerance=2)
    yield row("progressive.jpg", saved(rgb, format="JPEG", quality=70, progressive=True), tolerance=2)
    yield row("grey.jpg", saved(grey, format="JPEG"), tolerance=2)
    cmyk = rgb.convert("CMYK")
    cmyk.putdata([(c, m, y, (7 * i) % 120) for i, (c, m, y, _) in enumerate(cmyk.getdata())])
    yield row("cmyk.jpg", saved(cmyk, format="JPEG", quality=95), tolerance=2)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield row(f"orientation_{orientation}.jpg", saved(rgb, format="JPEG", quality=90, exif=exif), tolerance=2)
    yield row("lossy.webp", saved(rgb, format="WEBP", quality=80), tolerance=2)
    yield row("lossless.webp", saved(rgb, format="WEBP", lossless=True))
    yield row("alpha.webp", saved(rgba, format="WEBP", lossless=True, exact=True), tolerance=1)


def resized():
    rng = random.Random(3)
    for w, h, r, crop in [(13, 10, 8, False), (13, 10, 8, True), (10, 13, 8, True), (7, 5, 16, False), (7, 5, 12, True),
                          (31, 9, 4, True), (8, 8, 8, True), (40, 3, 6, False), (1, 1, 4, False), (29, 31, 7, True)]:
        seed = rng.randrange(1000)
        image = Image.fromarray(noisy(w, h, seed))
        if crop:  # torchvision's Resize(r) and CenterCrop(r)
            tw, th = (r, r * h // w) if w <= h else (r * w // h, r)
            image_out = image.resize((tw, th), Image.BILINEAR)
            left, top = int(round((tw - r) / 2.0)), int(round((th - r) / 2.0))
            image_out = image_out.crop((left, top, left + r, top + r))
        else:
            image_out = image.resize((r, r), Image.BILINEAR)
        yield {"height": h, "width": w, "rgb": image.tobytes().hex(), "resolution": r, "center_crop": crop,
               "out": image_out.tobytes().hex()}


def lines(rows):
    return "[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]"


animated = saved(Image.fromarray(noisy(4, 4, 1)), format="WEBP", save_all=True, append_images=[Image.fromarray(noisy(4, 4, 2))])
with open(sys.argv[1], "w") as f:
    head = {"written_by": "tools/golden/pictures.py", "pillow": PIL.__version__, "animated_webp": animated.hex()}
    f.write(json.dumps(head)[:-1] + f', "files": {lines(rows())}, "resized": {lines(resized())}}}\n')
