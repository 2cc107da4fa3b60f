"""Writes the goldens of ESRGAN's network, RRDBNet, in PyTorch after the papers: Wang et al. 2018 (ESRGAN, section 3.1 and
figure 4: dense blocks of five convolutions in residual blocks of three, residuals scaled by 0.2, LeakyReLU of 0.2, nearest
neighbour before each convolution that doubles the size), Wang et al. 2021 (Real-ESRGAN, section 3.2: pixels unshuffled to
channels for smaller scales).

tests/golden/upscalers/ gets, for each case
  <case>.safetensors  weights of random bf16 numbers, by the names of one program's files
  golden.safetensors  image  u8 [H, W, 3]; <case>  u8 [scale·H, scale·W, 3], the image enlarged
                      latents f32 [N, h, w, C] and latents.up, the same by torch's interpolate, bilinear, to 7 × 9

    python tools/golden/upscalers.py
"""

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "upscalers"
WIDTH, GROWTH, BLOCKS = 8, 4, 2
# name: (doublings, sides of unshuffled squares, names of the layers)
CASES = {"x4": (2, 1, "new"), "x2": (2, 2, "new"), "x4_old": (2, 1, "old"), "x2_old": (1, 1, "old"),
         "x4_trunk": (2, 1, "trunk")}


def layers(doublings, unshuffle):
    """Sizes of the convolutions by their newer names: outputs, inputs."""
    sizes = {"conv_first": (WIDTH, 3 * unshuffle**2)}
    for n in range(BLOCKS):
        for d in (1, 2, 3):
            for k in range(1, 6):
                sizes[f"body.{n}.rdb{d}.conv{k}"] = (WIDTH if k == 5 else GROWTH, WIDTH + (k - 1) * GROWTH)
    sizes["conv_body"] = (WIDTH, WIDTH)
    sizes |= {f"conv_up{k}": (WIDTH, WIDTH) for k in range(1, doublings + 1)}
    return sizes | {"conv_hr": (WIDTH, WIDTH), "conv_last": (3, WIDTH)}


def respelled(name, doublings, names):
    if names == "new":
        return name
    if name.startswith("body."):
        rest = name[len("body."):].replace("rdb", "RDB")
        return f"model.1.sub.{rest}.0" if names == "old" else f"RRDB_trunk.{rest}"
    old = {"conv_first": "model.0", "conv_body": f"model.1.sub.{BLOCKS}", "conv_hr": f"model.{2 + 3 * doublings}",
           "conv_last": f"model.{4 + 3 * doublings}"} | {f"conv_up{k}": f"model.{3 * k}" for k in (1, 2)}
    trunk = {"conv_body": "trunk_conv", "conv_hr": "HRconv", "conv_up1": "upconv1", "conv_up2": "upconv2"}
    return old[name] if names == "old" else trunk.get(name, name)


def enlarged(w, x, doublings, unshuffle):
    conv = lambda name, x: F.conv2d(x, w[name + ".weight"], w[name + ".bias"], padding=1)
    leaky = lambda x: F.leaky_relu(x, 0.2)
    first = conv("conv_first", F.pixel_unshuffle(x, unshuffle))
    h = first
    for n in range(BLOCKS):
        block = h
        for d in (1, 2, 3):
            parts = [h]
            for k in range(1, 5):
                parts.append(leaky(conv(f"body.{n}.rdb{d}.conv{k}", torch.cat(parts, 1))))
            h = h + 0.2 * conv(f"body.{n}.rdb{d}.conv5", torch.cat(parts, 1))
        h = block + 0.2 * h
    h = first + conv("conv_body", h)
    for k in range(1, doublings + 1):
        h = leaky(conv(f"conv_up{k}", F.interpolate(h, scale_factor=2, mode="nearest")))
    return conv("conv_last", leaky(conv("conv_hr", h)))


def main():
    ROOT.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    smooth = F.interpolate(torch.rand(1, 3, 5, 6, generator=generator), (18, 26), mode="bicubic").clamp(0, 1)
    image = (smooth * 255).round()
    arrays = {"image": image[0].movedim(0, -1).to(torch.uint8).contiguous()}
    for case, (doublings, unshuffle, names) in CASES.items():
        weights = {}
        for name, (out, of) in layers(doublings, unshuffle).items():
            weights[name + ".weight"] = torch.randn(out, of, 3, 3, generator=generator) * (
                (0.2 if name == "conv_last" else 1.4) / (9 * of) ** 0.5)
            weights[name + ".bias"] = torch.randn(out, generator=generator) * 0.05 + (0.5 if name == "conv_last" else 0)
        weights = {k: v.to(torch.bfloat16) for k, v in weights.items()}
        spelled = {respelled(k.rsplit(".", 1)[0], doublings, names) + "." + k.rsplit(".", 1)[1]: v
                   for k, v in weights.items()}
        save_file(spelled, ROOT / f"{case}.safetensors")
        out = enlarged({k: v.float() for k, v in weights.items()}, image / 255, doublings, unshuffle)
        print(case, out.shape, out.min().item(), out.max().item(), out.std().item())
        arrays[case] = (out[0].clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).contiguous()
    latents = torch.randn(2, 4, 4, 6, generator=generator)
    up = F.interpolate(latents, (7, 9), mode="bilinear")
    arrays |= {"latents": latents.movedim(1, -1).contiguous(), "latents.up": up.movedim(1, -1).contiguous()}
    save_file(arrays, ROOT / "golden.safetensors")


if __name__ == "__main__":
    main()
