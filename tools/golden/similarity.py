"""Prints scikit-image's similarity of two synthetic images and videos, for metrics/similarity_test.cc.

    python tools/golden/similarity.py
"""

import numpy
import skimage
from skimage.metrics import peak_signal_noise_ratio, structural_similarity


def made(dims, seed):
    i = numpy.arange(numpy.prod(dims), dtype=numpy.uint64)
    return ((i * i * 7 + i * (31 + seed) + (i // 5) * 13 * seed) % 251).astype(numpy.uint8).reshape(dims)


print("scikit-image", skimage.__version__)
for dims in ((12, 9, 3), (9, 10, 8, 3)):
    a = made(dims, 0)
    near = numpy.where(made(dims, 2) < 60, made(dims, 5), a)
    for b in (a, near, made(dims, 3)):
        ssim = structural_similarity(a, b, channel_axis=-1, data_range=255)
        print(dims, repr(ssim), repr(peak_signal_noise_ratio(a, b, data_range=255)) if (a != b).any() else "inf")
