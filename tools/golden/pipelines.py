"""Writes the goldens of sampling: tiny random Stable Diffusion folders, and the samples of diffusers' pipelines.

tests/golden/pipelines/ gets
  sd/, sd2/, sdxl/, controlnet/, controlnet_sdxl/   model folders as diffusers saves them; weights are bf16 numbers
  lora_peft.safetensors     LoRA of the sdxl folder's UNet and text encoders, as PEFT's names
  lora_kohya.safetensors    another of its UNet, as kohya's
  cases.json                name, folder, and the words of the command that should give the same
  golden.safetensors        <case>.noise  what the pipeline starts from, NCHW, standard normal
                            <case>.latents, before the autoencoder, NCHW; <case>.images, NHWC in [0, 1]
                            control  u8 [H, W, 3], the image that ControlNets get
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU.

    python tools/golden/pipelines.py
"""

import json
import pathlib
import shutil

import diffusers
import numpy
import torch
from diffusers import (AutoencoderKL, ControlNetModel, DDIMScheduler, EulerDiscreteScheduler, PNDMScheduler,
                       StableDiffusionControlNetPipeline, StableDiffusionPipeline, StableDiffusionXLControlNetPipeline,
                       StableDiffusionXLPipeline, UNet2DConditionModel)
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "pipelines"
CROSS_DOWN, CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
# As published with SD 1.x and SDXL.
PNDM = dict(beta_end=0.012, beta_schedule="scaled_linear", beta_start=0.00085, num_train_timesteps=1000,
            set_alpha_to_one=False, skip_prk_steps=True, steps_offset=1, trained_betas=None, clip_sample=False)
EULER = dict(beta_end=0.012, beta_schedule="scaled_linear", beta_start=0.00085, num_train_timesteps=1000,
             interpolation_type="linear", prediction_type="epsilon", sample_max_value=1.0, set_alpha_to_one=False,
             skip_prk_steps=True, steps_offset=1, timestep_spacing="leading", trained_betas=None,
             use_karras_sigmas=False, clip_sample=False)


def byte_letters():
    """The printable letters of CLIP's byte-level alphabet, in the order of its vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]


def write_tokenizer(folder):
    merges = ["r e", "re d</w>", "h e", "he a", "hea r", "hear t</w>", "b l", "bl u", "blu e</w>"]
    letters = byte_letters()
    words = letters + [c + "</w>" for c in letters] + [m.replace(" ", "") for m in merges]
    words += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return len(words)


def randomize(model, generator):
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim == 1:
            value = noise * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        elif "embedding" in name and not isinstance(model, (UNet2DConditionModel, ControlNetModel)):
            value = noise * 0.5
        else:
            value = noise / p[0].numel() ** 0.5
        p.data = value.to(torch.bfloat16).to(torch.float32)
    return model.eval()


def text(kind, width, words, tokens=77, projection=16, activation=None):
    return kind(CLIPTextConfig(
        vocab_size=words, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=tokens, projection_dim=projection, bos_token_id=words - 2, eos_token_id=words - 1,
        pad_token_id=words - 1, hidden_act=activation or ("quick_gelu" if kind is CLIPTextModel else "gelu")))


def vae(scale):
    return AutoencoderKL(block_out_channels=[8, 16], down_block_types=["DownEncoderBlock2D"] * 2,
                         up_block_types=["UpDecoderBlock2D"] * 2, layers_per_block=1, norm_num_groups=4,
                         latent_channels=4, sample_size=16, scaling_factor=scale)


def make_sd(generator):
    tokenizer_folder = ROOT / "tokenizer"
    words = write_tokenizer(tokenizer_folder)  # saved with each model; this copy is removed
    tokenizer = CLIPTokenizer(str(tokenizer_folder / "vocab.json"), str(tokenizer_folder / "merges.txt"),
                              model_max_length=77)
    unet = UNet2DConditionModel(
        block_out_channels=[8, 16], down_block_types=[CROSS_DOWN, "DownBlock2D"], up_block_types=["UpBlock2D", CROSS_UP],
        layers_per_block=1, attention_head_dim=2, cross_attention_dim=16, norm_num_groups=4, sample_size=8)
    pipe = StableDiffusionPipeline(
        vae=randomize(vae(0.18215), generator), unet=randomize(unet, generator),
        text_encoder=randomize(text(CLIPTextModel, 16, words), generator), tokenizer=tokenizer,
        scheduler=PNDMScheduler.from_config(PNDM), safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    shutil.rmtree(tokenizer_folder)
    return pipe


def make_sd2(generator):
    """As Stable Diffusion 2.1 differs: OpenCLIP's text encoder (exact GELU, its last layer left out when it was
    converted), a pad token that is a letter, heads of two sizes, projections by products, and the prediction of v."""
    tokenizer_folder = ROOT / "tokenizer_2"
    words = write_tokenizer(tokenizer_folder)
    tokenizer = CLIPTokenizer(str(tokenizer_folder / "vocab.json"), str(tokenizer_folder / "merges.txt"),
                              model_max_length=77, pad_token="!")
    unet = UNet2DConditionModel(
        block_out_channels=[8, 16], down_block_types=[CROSS_DOWN, "DownBlock2D"], up_block_types=["UpBlock2D", CROSS_UP],
        layers_per_block=1, attention_head_dim=[1, 4], cross_attention_dim=16, norm_num_groups=4, sample_size=8,
        use_linear_projection=True, upcast_attention=True)
    pipe = StableDiffusionPipeline(
        vae=randomize(vae(0.18215), generator), unet=randomize(unet, generator),
        text_encoder=randomize(text(CLIPTextModel, 16, words, activation="gelu"), generator), tokenizer=tokenizer,
        scheduler=DDIMScheduler(beta_end=0.012, beta_schedule="scaled_linear", beta_start=0.00085, clip_sample=False,
                                set_alpha_to_one=False, steps_offset=1, prediction_type="v_prediction"),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    shutil.rmtree(tokenizer_folder)
    return pipe


def make_sdxl(sd, generator):
    words = len(sd.tokenizer)
    unet = UNet2DConditionModel(
        block_out_channels=[8, 16], down_block_types=["DownBlock2D", CROSS_DOWN], up_block_types=[CROSS_UP, "UpBlock2D"],
        layers_per_block=1, attention_head_dim=[1, 2], transformer_layers_per_block=[1, 2], cross_attention_dim=24,
        use_linear_projection=True, norm_num_groups=4, addition_embed_type="text_time", addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=52, sample_size=8)
    return StableDiffusionXLPipeline(
        vae=randomize(vae(0.13025), generator), unet=randomize(unet, generator),
        text_encoder=randomize(text(CLIPTextModel, 8, words), generator),
        text_encoder_2=randomize(text(CLIPTextModelWithProjection, 16, words), generator), tokenizer=sd.tokenizer,
        tokenizer_2=sd.tokenizer, scheduler=EulerDiscreteScheduler.from_config(EULER), add_watermarker=False)


def save(pipe, name):
    """In bf16, in which the weights are exact."""
    pipe.save_pretrained(ROOT / name, safe_serialization=True)
    for file in (ROOT / name).rglob("*.safetensors"):
        save_file({k: v.to(torch.bfloat16) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})


def scheduler_of(pipe, members):
    """As the command does it: members of the folder's config replaced; an absent class keeps the folder's."""
    if not members:
        return pipe.scheduler
    config = {k: v for k, v in pipe.scheduler.config.items() if not k.startswith("_")}
    name = members.get("_class_name", type(pipe.scheduler).__name__).removeprefix("Flax")
    spelled = {"rescale_zero_terminal_snr": "rescale_betas_zero_snr"}
    config |= {spelled.get(k, k): v for k, v in members.items() if k != "_class_name"}
    kind = getattr(diffusers, name)
    return kind.from_config(config)


# name: (folder, scheduler members, arguments of the pipeline, whether images are decoded)
NEGATIVE = dict(negative_prompt="purple")
CASES = {
    "sd_as_published": ("sd", {}, NEGATIVE, True),
    "sd_without_negative": ("sd", {}, dict(guidance_scale=3.5), False),
    "sd_unguided": ("sd", dict(_class_name="DDIMScheduler"), dict(guidance_scale=1.0), False),
    "sd_ddim_zero_snr_v": ("sd", dict(_class_name="FlaxDDIMScheduler", prediction_type="v_prediction",
                                      timestep_spacing="trailing", rescale_zero_terminal_snr=True),
                           dict(NEGATIVE, guidance_rescale=0.7), False),
    "sd_two_prompts_oblong": ("sd", dict(_class_name="EulerDiscreteScheduler", timestep_spacing="linspace"),
                              dict(prompt=["red heart", "blue"], negative_prompt=["purple", ""],
                                   num_images_per_prompt=2, height=16, width=24), True),
    "sd_clip_skip": ("sd", dict(_class_name="DDIMScheduler"), dict(NEGATIVE, clip_skip=1), False),
    "sd_long_prompt": ("sd", dict(_class_name="DDIMScheduler"), dict(prompt="a b c d e f g h " * 12), False),
    "sd_tiled": ("sd", dict(_class_name="DDIMScheduler"), dict(height=40, width=48, vae_tiling=True), True),
    "sd_lms": ("sd", dict(_class_name="LMSDiscreteScheduler"), NEGATIVE, False),
    "sd_dpm": ("sd", dict(_class_name="DPMSolverMultistepScheduler", use_karras_sigmas=True), NEGATIVE, False),
    "sd_unipc": ("sd", dict(_class_name="UniPCMultistepScheduler"), NEGATIVE, False),
    "sd2_as_published": ("sd2", {}, NEGATIVE, True),
    "sd2_exclaims": ("sd2", dict(_class_name="EulerDiscreteScheduler"), dict(prompt="red heart!! blue", clip_skip=1), False),
    "sd_controlnet": ("sd", {}, dict(NEGATIVE, controlnet=True, controlnet_conditioning_scale=0.7,
                                     control_guidance_start=0.2, control_guidance_end=0.8), True),
    "sdxl_controlnet": ("sdxl", {}, dict(NEGATIVE, controlnet=True), False),
    # As Hyper-SD's model card says: LoRA, trailing DDIM, no guidance.
    "sdxl_hyper_with_loras": ("sdxl", dict(_class_name="DDIMScheduler", timestep_spacing="trailing"),
                              dict(guidance_scale=0.0, num_inference_steps=4, loras=[0.8, 0.5]), False),
    "sdxl_as_published": ("sdxl", {}, NEGATIVE, True),
    "sdxl_without_negative": ("sdxl", {}, {}, False),
    "sdxl_empty_negative": ("sdxl", {}, dict(negative_prompt=""), False),
    "sdxl_rescaled_and_sized": ("sdxl", dict(timestep_spacing="trailing"),
                                dict(NEGATIVE, guidance_rescale=0.5, original_size=[48, 64],
                                     crops_coords_top_left=[3, 5], target_size=[32, 16]), False),
    "sdxl_clip_skip": ("sdxl", {}, dict(NEGATIVE, clip_skip=1), False),
    "sdxl_second_prompt": ("sdxl", {}, dict(NEGATIVE, prompt_2="blue"), False),
    "sdxl_second_negative": ("sdxl", {}, dict(prompt=["a red heart", "blue"], negative_prompt=["purple", "red"],
                                              negative_prompt_2=["blue heart", "blue"]), False),
    "sdxl_lightning": ("sdxl", dict(_class_name="EulerDiscreteScheduler", timestep_spacing="trailing"),
                       dict(guidance_scale=0.0, num_inference_steps=4), False),
}
# Samplers by name, in place of the members of scheduler_config.json.
NAMED = {"sd_unguided": "ddim", "sd_lms": "lms", "sd_dpm": "DPM++ 2M Karras", "sd_unipc": "unipc",
         "sd_as_published": "pndm", "sdxl_as_published": "euler"}

LORAS = [ROOT / "lora_peft.safetensors", ROOT / "lora_kohya.safetensors"]


def make_loras(sdxl, generator):
    """Rank 2, random; the second on attention alone, of another alpha, in kohya's form with its alphas."""
    def matrices(model, targets, alpha):
        model.add_adapter(LoraConfig(r=2, lora_alpha=alpha, target_modules=targets), "made")
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = (torch.randn(p.shape, generator=generator) * 0.3).to(torch.bfloat16).float()
        state = get_peft_model_state_dict(model, adapter_name="made")
        (model.delete_adapters if hasattr(model, "delete_adapters") else model.delete_adapter)("made")
        return state
    attention = ["to_q", "to_k", "to_v", "to_out.0"]
    layers = {"unet_lora_layers": matrices(sdxl.unet, attention + ["conv1"], 2)}
    for part in ("text_encoder", "text_encoder_2"):
        layers[part + "_lora_layers"] = convert_state_dict_to_diffusers(
            matrices(getattr(sdxl, part), ["q_proj", "out_proj"], 2))
    StableDiffusionXLPipeline.save_lora_weights(LORAS[0].parent, weight_name=LORAS[0].name, **layers)
    kohya = {}
    for key, value in matrices(sdxl.unet, attention, 2).items():
        module, side = key.removesuffix(".weight").rsplit(".", 1)
        name = "lora_unet_" + module.replace(".", "_")
        kohya[name + {"lora_A": ".lora_down.weight", "lora_B": ".lora_up.weight"}[side]] = value.contiguous()
        kohya[name + ".alpha"] = torch.tensor(1.0)
    save_file(kohya, LORAS[1])


def word(key, value):
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def run(pipes, case, dtype, control):
    folder, members, arguments, decodes = CASES[case]
    pipe = pipes["controlnet_" + folder] if arguments.get("controlnet") else pipes[folder]
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    saved, pipe.scheduler = pipe.scheduler, scheduler_of(pipe, members)
    a = dict(dict(prompt="a red heart", num_inference_steps=8, guidance_scale=7.5, height=16, width=16), **arguments)
    tiling = a.pop("vae_tiling", False)
    pipe.vae.enable_tiling() if tiling else pipe.vae.disable_tiling()
    if a.pop("controlnet", False):
        a["image"] = Image.fromarray(control)
    scales = a.pop("loras", None)
    if scales:
        names = [name.stem for name in LORAS]
        for file, name in zip(LORAS, names):
            pipe.load_lora_weights(ROOT, weight_name=file.name, adapter_name=name)
        pipe.set_adapters(names, scales)
        pipe.to(dtype)
    count = (len(a["prompt"]) if isinstance(a["prompt"], list) else 1) * a.get("num_images_per_prompt", 1)
    noise = torch.randn(count, 4, a["height"] // 2, a["width"] // 2,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    for key in ("original_size", "crops_coords_top_left", "target_size"):
        if key in a:
            a[key] = tuple(a[key])
    out = {"noise": noise}
    out["latents"] = pipe(**a, latents=noise.to(dtype), output_type="latent").images.float()
    if decodes:
        images = pipe(**a, latents=noise.to(dtype), output_type="np").images
        out["images"] = torch.from_numpy(numpy.ascontiguousarray(images)).float()
    pipe.scheduler = saved
    if scales:
        pipe.unload_lora_weights()
    return out


def words_of(case):
    folder, members, arguments, _ = CASES[case]
    a = dict(dict(prompt="a red heart", num_inference_steps=8, guidance_scale=7.5, height=16, width=16), **arguments)
    control = a.pop("controlnet", False)
    scales = a.pop("loras", None)
    words = [word(k, v) for k, v in a.items()]
    if scales:
        words += ["lora_files=" + ",".join("{}/" + file.name for file in LORAS),
                  "lora_scales=" + ",".join(map(str, scales))]
    if members:
        words.append("diffusion_scheduler_config=" + json.dumps(members))
    return {"name": case, "folder": folder, "control": control, "words": words}


def named(case, sampler):
    """The same case with its sampler by name."""
    words = words_of(case)
    words["words"] = [w for w in words["words"] if not w.startswith("diffusion_scheduler_config=")]
    return words | {"name": f"{case}_by_name", "same_as": case, "words": words["words"] + [f"scheduler={sampler}"]}


def write_cases():
    cases = [words_of(c) for c in CASES] + [named(c, s) for c, s in NAMED.items()]
    (ROOT / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


def main():
    if not hasattr(CLIPTextModel, "text_model"):  # transformers 5 dropped the level that diffusers' clip_skip names
        CLIPTextModel.text_model = property(lambda self: self)
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    generator = torch.Generator().manual_seed(7)
    pipes = {"sd": make_sd(generator)}
    pipes["sdxl"] = make_sdxl(pipes["sd"], generator)
    pipes["sd2"] = make_sd2(torch.Generator().manual_seed(8))
    controlnet = randomize(ControlNetModel(
        block_out_channels=[8, 16], down_block_types=[CROSS_DOWN, "DownBlock2D"], layers_per_block=1,
        attention_head_dim=2, cross_attention_dim=16, norm_num_groups=4,
        conditioning_embedding_out_channels=[4, 6]), generator)
    for name, pipe in [*pipes.items()]:
        save(pipe, name)
    save(controlnet, "controlnet")
    sd, sdxl = pipes["sd"], pipes["sdxl"]
    pipes["controlnet_sd"] = StableDiffusionControlNetPipeline(
        vae=sd.vae, unet=sd.unet, text_encoder=sd.text_encoder, tokenizer=sd.tokenizer, scheduler=sd.scheduler,
        controlnet=controlnet, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    control = torch.randint(0, 256, (16, 16, 3), generator=generator, dtype=torch.uint8).numpy()
    controlnet_sdxl = randomize(ControlNetModel(
        block_out_channels=[8, 16], down_block_types=["DownBlock2D", CROSS_DOWN], layers_per_block=1,
        attention_head_dim=[1, 2], transformer_layers_per_block=[1, 2], cross_attention_dim=24,
        use_linear_projection=True, norm_num_groups=4, addition_embed_type="text_time", addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=52, conditioning_embedding_out_channels=[4, 6]), generator)
    save(controlnet_sdxl, "controlnet_sdxl")
    pipes["controlnet_sdxl"] = StableDiffusionXLControlNetPipeline(
        vae=sdxl.vae, unet=sdxl.unet, text_encoder=sdxl.text_encoder, text_encoder_2=sdxl.text_encoder_2,
        tokenizer=sdxl.tokenizer, tokenizer_2=sdxl.tokenizer_2, scheduler=sdxl.scheduler, controlnet=controlnet_sdxl,
        add_watermarker=False)
    make_loras(sdxl, generator)
    arrays, metadata = {"control": torch.from_numpy(control)}, {"diffusers": diffusers.__version__}
    for case in CASES:
        narrow = run(pipes, case, torch.float32, control)
        wide = run(pipes, case, torch.float64, control)
        floor = ((narrow["latents"] - wide["latents"]).norm() / wide["latents"].norm()).item()
        metadata[f"noise_floor.{case}"] = f"{floor:.2g}"
        arrays |= {f"{case}.{k}": v.contiguous() for k, v in narrow.items()}
        print(case, {k: list(v.shape) for k, v in narrow.items()}, f"noise floor {floor:.2g}")
    save_file(arrays, ROOT / "golden.safetensors", metadata=metadata)
    write_cases()


if __name__ == "__main__":
    main()
