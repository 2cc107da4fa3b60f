"""Writes the goldens of tiny autoencoders that diffusers does not have, run by their authors' programs: taehv.py of
github.com/madebyollin/taehv (TAEW2.1, TAEW2.2) and taesd.py of github.com/madebyollin/taesd (TAEF2), with a part of the
channels.

tests/golden/taehv/, taehv_patched/, taef2/ get a golden each, as of models.py.
tests/golden/previews/ gets
  taew2_1.safetensors, taew2_2.safetensors, taef2.safetensors   weights as published, random bf16 numbers
  tiny.safetensors  <case>.noise   what diffusers' pipeline starts from, NC(F)HW, standard normal
                    <case>.tiny.<k>  u8 [N, H, W, 3], the prediction at step k, from 0, decoded; of a video the frame that
                                     the middle latent frame ends with
                    <case>.images    f32 [N, (F,) H, W, 3] in [0, 1], the result with the tiny autoencoder as the pipeline's
All in float32 on the CPU.

    python tools/golden/tiny_autoencoders.py FOLDER_OF_TAEHV_PY FOLDER_OF_TAESD_PY
"""

import contextlib
import sys

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, QwenImagePipeline, WanPipeline
from safetensors.torch import save_file
from torch import nn

sys.path[:0] = sys.argv[1:3]
import taehv  # noqa: E402
import taesd  # noqa: E402

from flux_pipelines import kept_precision  # noqa: E402
from models import ROOT as GOLDEN  # noqa: E402
from models import randomize, write  # noqa: E402

ROOT = GOLDEN / "previews"
PART = 16  # of the channels


class Attributes(dict):
    __getattr__ = dict.__getitem__


@contextlib.contextmanager
def narrow(module, names):
    """Divides the widths with which a program's layers are made."""
    kept = {n: getattr(module, n) for n in names}
    inits = {n: c.__init__ for n, c in kept.items() if isinstance(c, type)}

    def narrowed(made, method, widths):
        def make(*a, **k):
            a = a[:method] + tuple(n // PART if n >= 64 else n for n in a[method:method + widths]) + a[method + widths:]
            return made(*a, **k)
        return make

    for n, c in kept.items():
        if n in inits:
            c.__init__ = narrowed(inits[n], 1, 1 if n in ("TPool", "TGrow") else 2)
        else:
            setattr(module, n, narrowed(c, 0, 2))
    try:
        yield
    finally:
        for n, c in kept.items():
            if n in inits:
                c.__init__ = inits[n]
            setattr(module, n, c)


def video_model(channels, patch):
    with narrow(taehv, ("conv", "MemBlock", "TPool", "TGrow")):
        model = taehv.TAEHV(None, latent_channels=channels, patch_size=patch).eval()
    # As the file's name would have set.
    model.config = dict(latent_channels=channels, patch_size=patch, encoder_width=64 // PART,
                        decoder_widths=[n // PART for n in (256, 128, 64, 64)],
                        encoder_time_downscale=[True, True, False], decoder_time_upscale=[False, True, True])
    return model


class AutoencoderTiny(nn.Module):
    """TAEF2 with the names of its published file: diffusers', whose decoder has no layer for the clamp."""

    def __init__(self, channels):
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        with narrow(taesd, ("conv", "Block")):
            self.encoder.layers = taesd.Encoder(channels, use_midblock_gn=True)
            self.decoder.layers = nn.Sequential(*list(taesd.Decoder(channels, use_midblock_gn=True))[1:])
        self.config = dict(encoder_block_out_channels=[64 // PART] * 4, decoder_block_out_channels=[64 // PART] * 4,
                           latent_channels=channels, use_midblock_gn=True, patch_size=2)

    def encode(self, x):
        return self.encoder.layers(x * 0.5 + 0.5)

    def decode(self, x):
        return self.decoder.layers(taesd.Clamp()(x)) * 2 - 1


def run_video(m, i):
    frames = lambda x: x.transpose(1, 2)
    return {"latents": frames(m.encode_video(frames(i["pixels"]) * 0.5 + 0.5, show_progress_bar=False)),
            "pixels": frames(m.decode_video(frames(i["latents"]), show_progress_bar=False) * 2 - 1)}


def write_models():
    for case, model, size, side, seed in (("taehv", video_model(5, 1), (9, 24, 8), 8, 8100),
                                          ("taehv_patched", video_model(6, 2), (5, 16, 32), 16, 8200)):
        generator = torch.Generator().manual_seed(seed + 1)
        latent = [2, model.latent_channels, 1 + size[0] // 4, size[1] // side, size[2] // side]
        inputs = {"pixels": torch.rand(2, 3, *size, generator=generator) * 2 - 1,
                  "latents": torch.randn(*latent, generator=generator) * 2}
        write(case, model, inputs, run_video, seed)
    generator = torch.Generator().manual_seed(8301)
    inputs = {"pixels": torch.rand(2, 3, 24, 8, generator=generator) * 2 - 1,
              "latents": torch.randn(2, 5, 3, 1, generator=generator) * 2}
    write("taef2", AutoencoderTiny(5), inputs,
          lambda m, i: {"latents": m.encode(i["pixels"]), "pixels": m.decode(i["latents"])}, 8300)


class Coder(nn.Module):
    """What diffusers' pipelines ask of an autoencoder: latents are the denoiser's."""

    def __init__(self, model, channels):
        super().__init__()
        self.model, self.dtype, self.device = model, torch.float32, torch.device("cpu")
        self.temperal_downsample = [True] * 3
        self.bn = nn.BatchNorm2d(4 * channels, affine=False, eps=0.0)
        self.config = Attributes(latents_mean=[0.0] * channels, latents_std=[1.0] * channels, z_dim=channels,
                                 batch_norm_eps=0.0, scaling_factor=1.0)

    def decode(self, x, return_dict=True):
        if isinstance(self.model, AutoencoderTiny):
            return (self.model.decode(x),)
        return (self.model.decode_video(x.transpose(1, 2), show_progress_bar=False).transpose(1, 2) * 2 - 1,)


# name: (folder, class, file, channels of its latents, noise, the step's share of the noise, arguments)
WAN = dict(prompt="a red heart", negative_prompt="grey", num_inference_steps=3, num_frames=9, guidance_scale=4.0,
           max_sequence_length=12)
CASES = {
    "wan": ("wan/t2v", WanPipeline, "taew2_1", (1, 4, 3, 4, 2), dict(WAN, height=32, width=16)),
    "wan_patched": ("wan/ti2v", WanPipeline, "taew2_2", (1, 6, 3, 2, 4), dict(WAN, height=32, width=64)),
    "qwen_image": ("qwenimage/base", QwenImagePipeline, "taew2_1_images", (1, 16, 4, 6),
                   dict(prompt="a red heart", num_inference_steps=3, height=32, width=48, true_cfg_scale=1.0)),
    "flux2": ("flux2/base", Flux2KleinPipeline, "taef2", (1, 16, 2, 3),
              dict(prompt="a red heart", num_inference_steps=3, height=32, width=48, guidance_scale=4.0,
                   text_encoder_out_layers=[1, 2, 3])),
}


def to_u8(x):
    return ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).contiguous()


def run(case, coders):
    folder, kind, file, size, a = CASES[case]
    coder, noise = coders[file], torch.randn(*size, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    pipe = kind.from_pretrained(GOLDEN / folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae, count = coder, size[0]
    if kind is WanPipeline:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        unpack = pack = lambda x: x
    elif kind is QwenImagePipeline:
        pipe.vae_scale_factor = 8
        pack = lambda x: QwenImagePipeline._pack_latents(x, count, *size[1:])
        unpack = lambda x: QwenImagePipeline._unpack_latents(x, a["height"], a["width"], 8)
    else:
        pipe.vae_scale_factor = 8
        rows, columns = size[2:]
        pack = lambda x: x
        unpack = lambda x: Flux2KleinPipeline._unpatchify_latents(
            x.transpose(1, 2).reshape(count, size[1], rows, columns))
    if kind is not WanPipeline:
        pipe.image_processor.config.vae_scale_factor = 16
        pipe.image_processor.register_to_config(vae_scale_factor=16)
    predicted, step = [], pipe.scheduler.step

    def watched(output, t, sample, **more):
        index = pipe.scheduler.step_index
        sigma = pipe.scheduler.sigmas[0 if index is None else index]
        predicted.append(unpack(sample - sigma * output))
        return step(output, t, sample, **more)

    pipe.scheduler.step = watched
    with kept_precision(), torch.no_grad():
        made = pipe(**a, latents=pack(noise), output_type="pt")
        images = made.frames.movedim(2, -1) if kind is WanPipeline else made.images.movedim(1, -1)
        out = {"noise": noise, "images": images.float()}
        for k, x0 in enumerate(predicted):
            decoded = coder.decode(x0)[0]
            if decoded.ndim == 5:
                decoded = decoded[:, :, x0.shape[2] // 2 * 4]
            out[f"tiny.{k}"] = to_u8(decoded)
    return out


def main():
    write_models()
    models = {"taew2_1": (video_model(4, 1), 4), "taew2_2": (video_model(6, 2), 6),
              "taew2_1_images": (video_model(16, 1), 16), "taef2": (AutoencoderTiny(4), 4)}
    coders = {}
    for seed, (name, (model, channels)) in enumerate(models.items()):
        randomize(model, torch.Generator().manual_seed(900 + seed))
        save_file({k: p.detach().to(torch.bfloat16).contiguous() for k, p in model.named_parameters()},
                  ROOT / f"{name}.safetensors")
        coders[name] = Coder(model, channels).eval()
    arrays = {}
    for case in CASES:
        arrays |= {f"{case}.{k}": v.contiguous() for k, v in run(case, coders).items()}
        print(case, {k: list(v.shape) for k, v in arrays.items() if k.startswith(case + ".")})
    save_file(arrays, ROOT / "tiny.safetensors")


if __name__ == "__main__":
    main()
