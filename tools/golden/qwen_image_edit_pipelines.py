"""Writes the goldens of Qwen-Image-Edit: tiny random folders, and the samples of diffusers' pipelines.

tests/golden/qwenimage_edit/ gets
  edit/, plus/              model folders as diffusers saves them; weights are bf16 numbers. The second is of
                            QwenImageEditPlusPipeline, and its transformer gives references the time 0, as that of 2511
  cases.json                name, folder, and the words of the command that should sample the same
  golden.safetensors        <case>.noise  what the pipeline starts from, NCHW (not packed), standard normal
                            <case>.latents, before the autoencoder, NCHW, as scaled for the transformer
                            <case>.images, NHWC in [0, 1]
                            reference0, reference1, reference2, mask, white  u8 [H, W, 3], images
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. References are scaled to RESOLUTION² pixels, not 1024². Positions of an image's tokens are rows
and columns: transformers is given mm_token_type_ids, without which it counts them as text. The processor is its steps with
Pillow, since its class needs torchvision.

With a mask (QwenImageEditInpaintPipeline) the noise is what the image gets, and the image's latents are the mode of the
autoencoder's posterior, not a random latent of it.

    python tools/golden/qwen_image_edit_pipelines.py [CASE ...]   cases that are not named, and folders, stay as they are
"""

import functools
import json
import pathlib
import re
import sys

import numpy
import torch
from diffusers import (AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageEditInpaintPipeline,
                       QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImageTransformer2DModel)
from diffusers.pipelines.qwenimage import (pipeline_qwenimage_edit, pipeline_qwenimage_edit_inpaint,
                                           pipeline_qwenimage_edit_plus)
from PIL import Image
from tokenizers import AddedToken
from transformers import BatchFeature, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flux2_pipelines import reference
from flux_pipelines import kept_precision, record
from qwen_image_pipelines import SCALE, SHIFTED, tokenizer
from z_image_pipelines import LONG, randomize

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "qwenimage_edit"
RESOLUTION = 80
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
PIPELINES = {"edit": QwenImageEditPipeline, "plus": QwenImageEditPlusPipeline}

for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_inpaint, pipeline_qwenimage_edit_plus):
    original = module.calculate_dimensions
    module.calculate_dimensions = lambda area, ratio, original=original: original(
        RESOLUTION**2 if area == 1024**2 else area, ratio)


class Processor:
    def __init__(self, tokenizer):
        self.tokenizer, self.images = tokenizer, Qwen2VLImageProcessorPil(
            size={"shortest_edge": 56 * 56, "longest_edge": 12845056})

    def __call__(self, text, images, padding, return_tensors):
        inputs = self.images(images, return_tensors=return_tensors)
        counts = iter(inputs["image_grid_thw"].prod(-1) // self.images.merge_size**2)
        pad = IMAGE_TOKENS[2]
        text = [re.sub(re.escape(pad), lambda _: pad * int(next(counts)), t) for t in text]
        return BatchFeature(dict(self.tokenizer(text, padding=padding, return_tensors=return_tensors)) | dict(inputs))

    def save(self, folder):
        """As in the published folders."""
        self.images.save_pretrained(folder / "processor")
        file = folder / "model_index.json"
        index = json.loads(file.read_text()) | {"processor": ["transformers", "Qwen2VLProcessor"]}
        file.write_text(json.dumps(index, indent=2) + "\n")


def with_places(encoder, image_token):
    original = encoder.forward

    @functools.wraps(original)
    def forward(input_ids, **keywords):
        return original(input_ids=input_ids, mm_token_type_ids=(input_ids == image_token).int(), **keywords)
    encoder.forward = forward
    return encoder


def make(kind, generator):
    parts = PIPELINES[kind](scheduler=None, vae=None, text_encoder=None, tokenizer=None, processor=None, transformer=None)
    template = parts.prompt_template_encode
    words = tokenizer(template)
    words.add_tokens([AddedToken(t, special=True, normalized=False) for t in IMAGE_TOKENS])
    dropped = words(template.split("{}")[0].split(IMAGE_TOKENS[0])[0]).input_ids
    assert len(dropped) == parts.prompt_template_encode_start_idx, words.convert_ids_to_tokens(dropped)
    image_token = words.convert_tokens_to_ids(IMAGE_TOKENS[2])
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=dict(vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-6,
                         rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}),
        vision_config=dict(depth=2, hidden_size=8, intermediate_size=12, num_heads=2, out_hidden_size=16,
                           fullatt_block_indexes=[1]),
        image_token_id=image_token, vision_start_token_id=words.convert_tokens_to_ids(IMAGE_TOKENS[0])))
    transformer = QwenImageTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, axes_dims_rope=[2, 4, 2], in_channels=64, out_channels=16,
        num_layers=2, joint_attention_dim=16, zero_cond_t=kind == "plus")
    vae = AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])
    return PIPELINES[kind](
        scheduler=FlowMatchEulerDiscreteScheduler(**SHIFTED), vae=randomize(vae, generator),
        text_encoder=with_places(randomize(encoder, generator), image_token), tokenizer=words,
        processor=Processor(words), transformer=randomize(transformer, generator))


# Pillow 13 scales rows before columns, not after, if rows shrink and columns grow; these sizes avoid that.
SIZES = {"reference0": (60, 72), "reference1": (101, 70), "reference2": (64, 96)}
# A gradient, and the same area in white, with the sizes of samples from reference0 and reference2.
MASKS = {"mask": torch.zeros(64, 96, 3, dtype=torch.uint8)}
MASKS["mask"][9:41, 20:77] = (torch.arange(57) * 4 + 20).to(torch.uint8)[None, :, None]
MASKS["white"] = (MASKS["mask"] > 0).to(torch.uint8) * 255
BOTH = ["reference0", "reference1"]
OWN = dict(height=None, width=None)
# name: (folder, arguments of the pipeline, whether images are decoded)
CASES = {
    "qwen_edit": ("edit", dict(image=BOTH[:1], true_cfg_scale=1.0), True),
    "qwen_edit_guided": ("edit", dict(image=BOTH[:1], negative_prompt="grey, 灰色", true_cfg_scale=4.0), True),
    # Two images, with more columns than rows.
    "qwen_edit_pair": ("edit", dict(image=BOTH[1:], width=48, num_images_per_prompt=2, negative_prompt=" ",
                                    true_cfg_scale=2.0), False),
    # A long text; the sample has the size of the scaled image.
    "qwen_edit_long": ("edit", dict(image=BOTH[1:], prompt=LONG + LONG, height=None, width=None, num_inference_steps=2,
                                    negative_prompt="", true_cfg_scale=2.0), False),
    "qwen_plus": ("plus", dict(image=BOTH[:1], negative_prompt="grey", true_cfg_scale=3.0), True),
    "qwen_plus_two": ("plus", dict(image=BOTH, prompt="the heart of Picture 2 in Picture 1", negative_prompt=" ",
                                   true_cfg_scale=4.0), True),
    "qwen_plus_three": ("plus", dict(image=BOTH + BOTH[:1], height=None, width=None, num_inference_steps=2,
                                     num_images_per_prompt=2, true_cfg_scale=1.0), False),
    # With a mask.
    "qwen_edit_masked": ("edit", dict(image=BOTH[:1], mask_image="mask", negative_prompt="grey", true_cfg_scale=3.0, **OWN),
                         True),
    "qwen_edit_masked_strong": ("edit", dict(image=BOTH[:1], mask_image="mask", strength=1.0, true_cfg_scale=1.0,
                                             num_images_per_prompt=2, **OWN), False),
    "qwen_edit_masked_crop": ("edit", dict(image=["reference2"], mask_image="white", padding_mask_crop=4, negative_prompt=" ",
                                           true_cfg_scale=2.0, **OWN), True),
}


def arguments(case):
    return dict(dict(prompt="a red heart", num_inference_steps=4, height=32, width=32), **CASES[case][1])


def run(pipes, case, dtype):
    folder, _, decodes = CASES[case]
    pipe, a = pipes[folder], arguments(case)
    if "mask_image" in a:
        return run_masked(pipe, case, dtype)
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    last = SIZES[a["image"][-1]]
    default = pipeline_qwenimage_edit.calculate_dimensions(1024**2, last[1] / last[0])
    height, width = (requested or size for requested, size in zip((a["height"], a["width"]), (default[1], default[0])))
    a["image"] = [Image.fromarray(reference(name, SIZES).numpy()) for name in a["image"]]
    if folder == "edit":
        a["image"] = a["image"][0]  # for a list, the text encoder would see the image before scaling
    count = a.get("num_images_per_prompt", 1)
    noise = torch.randn(count, 16, height // SCALE, width // SCALE,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    packed = pipe._pack_latents(noise.to(dtype), count, 16, height // SCALE, width // SCALE)
    out = {"noise": noise}
    with kept_precision():
        latents = pipe(**a, latents=packed, output_type="latent").images
        out["latents"] = pipe._unpack_latents(latents, height, width, SCALE).squeeze(2).float()
        if decodes:
            out["images"] = pipe(**a, latents=packed, output_type="pt").images.movedim(1, -1).float()
    return out


def run_masked(whole, case, dtype):
    a = arguments(case)
    pipe = QwenImageEditInpaintPipeline(**whole.components)
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    mask = MASKS[a["mask_image"]]
    height, width = mask.shape[:2]
    del a["height"], a["width"]
    a["image"] = Image.fromarray(reference(a["image"][0], SIZES).numpy())
    a["mask_image"] = Image.fromarray(mask.numpy())
    noise = torch.randn(a.get("num_images_per_prompt", 1), 16, height // SCALE, width // SCALE,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    module = pipeline_qwenimage_edit_inpaint
    module.randn_tensor = lambda shape, dtype=None, **_: noise.reshape(shape).to(dtype)
    module.retrieve_latents = lambda out, generator=None, sample_mode=None: out.latent_dist.mode()
    last, out = {}, {"noise": noise}
    kind = "pil" if "padding_mask_crop" in a else "pt"  # whole images with the part put back are PIL's alone
    with kept_precision():
        images = pipe(**a, output_type=kind, callback_on_step_end=lambda p, step, t, state: last.update(state) or {}).images
    out["latents"] = pipe._unpack_latents(last["latents"], height, width, SCALE).squeeze(2).float()
    if CASES[case][2]:
        out["images"] = (torch.from_numpy(numpy.array(images[0])[None]).float() / 255 if kind == "pil" else
                         images.movedim(1, -1).float())
    return out


def words_of(case):
    def one(key, v):
        if key == "image":
            return ",".join(f"{{}}/{name}.png" for name in v)
        if key == "mask_image":
            return f"{{}}/{v}.png"
        return v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
    keywords = arguments(case) | {"reference_resolution": RESOLUTION}
    return {"name": case, "folder": CASES[case][0],
            "words": [f"{k}={one(k, v)}" for k, v in keywords.items()]}


def main():
    pipes = {kind: make(kind, torch.Generator().manual_seed(31 + len(kind))) for kind in PIPELINES}
    record(ROOT, pipes, CASES, lambda case, dtype: run(pipes, case, dtype), words_of,
           {name: reference(name, SIZES) for name in SIZES} | MASKS)
    for kind, pipe in pipes.items():
        if not sys.argv[1:]:
            pipe.processor.save(ROOT / kind)


if __name__ == "__main__":
    main()
