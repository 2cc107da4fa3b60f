"""Writes the goldens of previews and of tiny autoencoders in place of a model's: what diffusers' pipelines predict at each
step, decoded by diffusers' AutoencoderTiny, and as colours of the latents.

tests/golden/previews/ gets
  taesd/, taef1/      folders of an AutoencoderTiny each, of random weights that are bf16 numbers
  golden.safetensors  <case>.noise     what the pipeline starts from, NCHW, standard normal
                      <case>.tiny.<k>    u8 [N, H, W, 3], the prediction at step k, from 0, decoded
                      <case>.linear.<k>  u8 [N, h, w, 3], the same by a sum of channels
                      <case>.images    f32 [N, H, W, 3] in [0, 1], the result with the tiny autoencoder as the pipeline's
                      taesd.latents    f32, of the image taesd.image u8
All in float32 on the CPU.

    python tools/golden/previews.py
"""

import pathlib

import torch
from diffusers import AutoencoderTiny, FluxPipeline, StableDiffusionPipeline
from safetensors.torch import save_file
from transformers import CLIPTextModel

from flux_pipelines import kept_precision
from pipelines import scheduler_of

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "previews"
# ComfyUI, comfy/latent_formats.py: bias and factors of red, green and blue.
SD = [[0, 0, 0], [0.3512, 0.2297, 0.3227], [0.3250, 0.4974, 0.2350], [-0.2829, 0.1762, 0.2721],
      [-0.2120, -0.2616, -0.7177]]
FLUX = [[-0.0329, -0.0718, -0.0851], [-0.0346, 0.0244, 0.0681], [0.0034, 0.0210, 0.0687], [0.0275, -0.0668, -0.0433],
        [-0.0174, 0.0160, 0.0617], [0.0859, 0.0721, 0.0329], [0.0004, 0.0383, 0.0115], [0.0405, 0.0861, 0.0915],
        [-0.0236, -0.0185, -0.0259], [-0.0245, 0.0250, 0.1180], [0.1008, 0.0755, -0.0421], [-0.0515, 0.0201, 0.0011],
        [0.0428, -0.0012, -0.0036], [0.0817, 0.0765, 0.0749], [-0.1264, -0.0522, -0.1103],
        [-0.0280, -0.0881, -0.0499], [-0.1262, -0.0982, -0.0778]]
# name: (folder, tiny autoencoder, factors, scheduler's members)
CASES = {
    "ddim": ("pipelines/sd", "taesd", SD, dict(_class_name="DDIMScheduler")),
    "euler": ("pipelines/sd", "taesd", SD, dict(_class_name="EulerDiscreteScheduler")),
    "euler_v": ("pipelines/sd", "taesd", SD,
                dict(_class_name="EulerDiscreteScheduler", prediction_type="v_prediction")),
    "ddim_x0": ("pipelines/sd", "taesd", SD, dict(_class_name="DDIMScheduler", prediction_type="sample")),
    "flux": ("flux/dev", "taef1", FLUX, {}),
}
SIZES = {"pipelines/sd": dict(height=16, width=24, num_inference_steps=4, guidance_scale=7.5),
         "flux/dev": dict(height=32, width=48, num_inference_steps=3, guidance_scale=3.5, max_sequence_length=24)}


def tiny(channels, seed):
    generator = torch.Generator().manual_seed(seed)
    model = AutoencoderTiny(encoder_block_out_channels=[6, 6], decoder_block_out_channels=[6, 6],
                            num_encoder_blocks=[1, 2], num_decoder_blocks=[2, 1], latent_channels=channels)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = (noise * 0.1 if p.ndim == 1 else noise * (1.2 / p[0].numel() ** 0.5)).to(torch.bfloat16).float()
    return model.eval()


def to_u8(x):
    return ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).contiguous()


def run(case, tinies):
    folder, name, factors, members = CASES[case]
    flux = folder.startswith("flux")
    pipe = (FluxPipeline if flux else StableDiffusionPipeline).from_pretrained(GOLDEN / folder,
                                                                              torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = scheduler_of(pipe, members)
    a = SIZES[folder]
    count, channels, h, w = 2, 16 if flux else 4, a["height"] // 2, a["width"] // 2
    noise = torch.randn(count, channels, h, w, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    predicted, step = [], pipe.scheduler.step

    def watched(output, t, sample, **more):
        if flux:
            index = pipe.scheduler.step_index
            sigma = pipe.scheduler.sigmas[0 if index is None else index]
            x0 = FluxPipeline._unpack_latents(sample - sigma * output, a["height"], a["width"], 2)
            out = step(output, t, sample, **more)
        else:
            out = step(output, t, sample, **{**more, "return_dict": True})
            x0 = out.pred_original_sample
            out = (out.prev_sample,)
        predicted.append(x0)
        return out

    pipe.scheduler.step = watched
    latents = FluxPipeline._pack_latents(noise, count, channels, h, w) if flux else noise
    pipe.vae = tinies[name]
    with kept_precision(), torch.no_grad():
        images = pipe(prompt="a red heart", num_images_per_prompt=count, latents=latents, output_type="pt", **a).images
        factors = torch.tensor(factors)
        out = {"noise": noise, "images": images.movedim(1, -1).float()}
        for k, x0 in enumerate(predicted):
            out[f"tiny.{k}"] = to_u8(tinies[name].decode(x0).sample)
            colours = torch.einsum("nchw,cd->ndhw", x0, factors[1:]) + factors[0][None, :, None, None]
            out[f"linear.{k}"] = to_u8(colours)
    return out


def main():
    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)
    tinies = {"taesd": tiny(4, 1), "taef1": tiny(16, 2)}
    for name, model in tinies.items():
        model.save_pretrained(ROOT / name)
    arrays = {}
    for case in CASES:
        arrays |= {f"{case}.{k}": v.contiguous() for k, v in run(case, tinies).items()}
        print(case, {k: list(v.shape) for k, v in arrays.items() if k.startswith(case + ".")})
    image = (torch.rand(1, 3, 16, 24, generator=torch.Generator().manual_seed(3)) * 255).round()
    with torch.no_grad():
        arrays["taesd.latents"] = tinies["taesd"].encode(image / 127.5 - 1).latents.movedim(1, -1).contiguous()
    arrays["taesd.image"] = image[0].movedim(0, -1).to(torch.uint8).contiguous()
    save_file(arrays, ROOT / "golden.safetensors")


if __name__ == "__main__":
    main()
