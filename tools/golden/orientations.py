"""Records images with every orientation, and how Pillow's exif_transpose turns them, in tests/golden/data/orientations.json.

    python tools/golden/orientations.py tests/golden/data/orientations.json

Needs Pillow (with WebP and AVIF) and numpy. `file`: the bytes; `rgb`: the pixels over white, upright. `tolerance` in steps
of 1/255: 0 where nothing is lost, 1 where alpha is rounded, 2 for JPEG, 4 for AVIF, whose colours FFmpeg converts with
other rounding. All pixels differ from each other by more.
"""
import io
import json
import struct
import sys
import zlib

import numpy as np
import PIL
from PIL import Image, ImageOps, PngImagePlugin

W, H = 7, 4
y, x = np.mgrid[0:H, 0:W]
RGB = Image.fromarray(np.stack([20 + 30 * x, 30 + 60 * y, 220 - 12 * (x + 2 * y)], -1).astype(np.uint8))
ALPHA = Image.fromarray((250 - 25 * x - 15 * y).astype(np.uint8))


def saved(image, **options):
    out = io.BytesIO()
    image.save(out, **options)
    return out.getvalue()


def late(png):
    """The same PNG with eXIf after the pixels."""
    chunks, at = [], 8
    while at < len(png):
        size = struct.unpack(">I", png[at:at + 4])[0]
        chunks.append(png[at:at + 12 + size])
        at += 12 + size
    chunks.sort(key=lambda c: (c[4:8] == b"IEND", c[4:8] == b"eXIf"))
    return png[:8] + b"".join(chunks)


def raw_profile(exif, zipped):
    data = exif.tobytes()
    digits = data.hex()
    text = f"\nexif\n{len(data):8}\n" + "\n".join(digits[i:i + 72] for i in range(0, len(digits), 72)) + "\n"
    info = PngImagePlugin.PngInfo()
    info.add_text("Raw profile type exif", text, zip=zipped)
    return info


def packet(o, element):
    tag = f"<rdf:Description><tiff:Orientation>{o}</tiff:Orientation></rdf:Description>" if element else \
        f'<rdf:Description tiff:Orientation="{o}"/>'
    return ('<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" '
            'xmlns:tiff="http://ns.adobe.com/tiff/1.0/">' + tag + "</rdf:RDF></x:xmpmeta>")


def xmp_in_png(o, zipped):
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", packet(o, zipped), zip=zipped)
    return info


def rows():
    rgba = RGB.copy()
    rgba.putalpha(ALPHA)
    for o in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = o
        big = Image.Exif()
        big.endian = ">"
        big[0x0112] = o
        for name, data, tolerance in [
            ("exif.jpg", saved(RGB, format="JPEG", quality=95, subsampling=0, exif=exif), 2),
            ("xmp.jpg", saved(RGB, format="JPEG", quality=95, subsampling=0, xmp=packet(o, False).encode()), 2),
            ("exif.png", saved(RGB, format="PNG", exif=exif), 0),
            ("alpha.png", saved(rgba, format="PNG", exif=exif), 1),
            ("late.png", late(saved(RGB, format="PNG", exif=exif)), 0),
            ("text.png", saved(RGB, format="PNG", pnginfo=raw_profile(exif, False)), 0),
            ("ztext.png", saved(RGB, format="PNG", pnginfo=raw_profile(exif, True)), 0),
            ("xmp.png", saved(RGB, format="PNG", pnginfo=xmp_in_png(o, False)), 0),
            ("zxmp.png", saved(RGB, format="PNG", pnginfo=xmp_in_png(o, True)), 0),
            ("exif.webp", saved(RGB, format="WEBP", lossless=True, exif=exif), 0),
            ("big.webp", saved(RGB, format="WEBP", lossless=True, exif=big), 0),
            ("alpha.webp", saved(rgba, format="WEBP", lossless=True, exact=True, exif=exif), 1),
            ("xmp.webp", saved(RGB, format="WEBP", lossless=True, xmp=packet(o, True).encode()), 0),
            ("moving.webp", saved(RGB, format="WEBP", lossless=True, exif=exif, save_all=True,
                                  append_images=[RGB.rotate(180)]), 0),
            ("ii.tif", saved(RGB, format="TIFF", tiffinfo={0x0112: o}), 0),
            ("mm.tif", saved(RGB, format="TIFF", tiffinfo={0x0112: o}, big_endian=True), 0),
            ("it.avif", saved(RGB, format="AVIF", quality=100, subsampling="4:4:4", exif=exif), 4),
        ]:
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
            assert o == 1 or (image.size == (H, W)) == (o >= 5), (name, o, image.size)
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            white.alpha_composite(image)
            yield {"name": name, "orientation": o, "file": data.hex(), "width": image.width, "height": image.height,
                   "tolerance": tolerance, "rgb": white.convert("RGB").tobytes().hex()}


with open(sys.argv[1], "w") as f:
    head = {"written_by": "tools/golden/orientations.py", "pillow": PIL.__version__}
    f.write(json.dumps(head)[:-1] + ', "files": [\n' + ",\n".join(json.dumps(r) for r in rows()) + "\n]}\n")
