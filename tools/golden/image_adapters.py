"""Records adapters to images: PYTHONPATH=.deps/interop:tools/golden python3 tools/golden/image_adapters.py

tests/golden/adapters/ gets random IP-Adapters (plain and plus, in the published layout of one file, with their image
encoders) and T2I-Adapters for the models of tools/golden/pipelines.py, and cases.json and golden.safetensors as
pipelines.py writes them: samples of diffusers' pipelines with them.
"""

import json
import pathlib
import shutil

import diffusers
import torch
from diffusers import (StableDiffusionAdapterPipeline, StableDiffusionPipeline, StableDiffusionXLAdapterPipeline,
                       StableDiffusionXLPipeline, T2IAdapter)
from PIL import Image
from pipelines import randomize
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
OUT = ROOT / "adapters"
ENCODER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=20,
               patch_size=10, projection_dim=12, hidden_act="gelu")
CASES = {  # name: (folder, IP-Adapter and its scale or None, T2I-Adapter and its scale or None)
    "sd_ip": ("sd", ("sd_ip", 0.7), None),
    "sd_ip_plus": ("sd", ("sd_ip_plus", 1.0), None),
    "sdxl_ip": ("sdxl", ("sdxl_ip", 0.6), None),
    "sd_t2i": ("sd", None, ("sd_t2i", 0.8)),
    "sd_t2i_light": ("sd", None, ("sd_t2i_light", 1.0)),
    "sdxl_t2i": ("sdxl", None, ("sdxl_t2i", 0.9)),
}


def base(folder, dtype):
    kind = StableDiffusionXLPipeline if folder == "sdxl" else StableDiffusionPipeline
    return kind.from_pretrained(ROOT / "pipelines" / folder, torch_dtype=dtype)


def ip_file(unet, plus, generator):
    randn = lambda *shape: torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
    width, out = unet.config.cross_attention_dim, {}
    if plus:
        hidden = 24
        out |= {"image_proj.latents": randn(1, 3, hidden), "image_proj.proj_in.weight": randn(hidden, ENCODER["hidden_size"]),
                "image_proj.proj_in.bias": randn(hidden), "image_proj.proj_out.weight": randn(width, hidden),
                "image_proj.proj_out.bias": randn(width), "image_proj.norm_out.weight": 1 + randn(width),
                "image_proj.norm_out.bias": randn(width)}
        for i in range(4):  # what diffusers expects
            at = f"image_proj.layers.{i}"
            for norm in ("0.norm1", "0.norm2", "1.0"):
                out |= {f"{at}.{norm}.weight": 1 + randn(hidden), f"{at}.{norm}.bias": randn(hidden)}
            out |= {f"{at}.0.to_q.weight": randn(64, hidden), f"{at}.0.to_kv.weight": randn(128, hidden),
                    f"{at}.0.to_out.weight": randn(hidden, 64), f"{at}.1.1.weight": randn(4 * hidden, hidden),
                    f"{at}.1.3.weight": randn(hidden, 4 * hidden)}
    else:
        out |= {"image_proj.proj.weight": randn(4 * width, ENCODER["projection_dim"]), "image_proj.proj.bias": randn(4 * width),
                "image_proj.norm.weight": 1 + randn(width), "image_proj.norm.bias": randn(width)}
    number = 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            attention = unet.get_submodule(name.removesuffix(".processor"))
            rows = attention.to_k.weight.shape[0]
            out |= {f"ip_adapter.{number}.to_k_ip.weight": randn(rows, width), f"ip_adapter.{number}.to_v_ip.weight": randn(rows, width)}
            number += 2
    return out


def make(generator):
    shutil.rmtree(OUT, ignore_errors=True)
    for name, plus in (("sd_ip", False), ("sd_ip_plus", True), ("sdxl_ip", False)):
        (OUT / name).mkdir(parents=True)
        save_file(ip_file(base(name.split("_")[0], torch.float32).unet, plus, generator), OUT / name / "ip-adapter.safetensors")
        encoder = randomize(CLIPVisionModelWithProjection(CLIPVisionConfig(**ENCODER)), generator)
        encoder.save_pretrained(OUT / name / "image_encoder")
    for name, kind, channels, factor in (("sd_t2i", "full_adapter", [8, 16], 2), ("sd_t2i_light", "light_adapter", [8, 16], 2),
                                         ("sdxl_t2i", "full_adapter_xl", [8, 16], 4)):
        adapter = T2IAdapter(in_channels=3, channels=channels, num_res_blocks=2, downscale_factor=factor, adapter_type=kind)
        randomize(adapter, generator).save_pretrained(OUT / name)


def run(case, dtype, image):
    folder, ip, t2i = CASES[case]
    pipe, extra = base(folder, dtype), {}
    if t2i:
        adapter = T2IAdapter.from_pretrained(OUT / t2i[0], torch_dtype=dtype)
        parts = {k: v for k, v in pipe.components.items() if k not in ("image_encoder",)}
        kind = StableDiffusionXLAdapterPipeline if folder == "sdxl" else StableDiffusionAdapterPipeline
        if folder != "sdxl":
            parts |= {"requires_safety_checker": False}
            parts.pop("image_encoder", None)
        pipe = kind(**parts, adapter=adapter)
        extra = {"image": Image.fromarray(image.numpy()), "adapter_conditioning_scale": t2i[1]}
    if ip:
        at = OUT / ip[0]
        pipe.register_modules(image_encoder=CLIPVisionModelWithProjection.from_pretrained(at / "image_encoder", torch_dtype=dtype),
                              feature_extractor=CLIPImageProcessor(size={"shortest_edge": 20}, crop_size={"height": 20, "width": 20}))
        state = {"image_proj": {}, "ip_adapter": {}}
        for key, value in load_file(at / "ip-adapter.safetensors").items():
            kind, rest = key.split(".", 1)
            state[kind][rest] = value
        pipe.load_ip_adapter(state, subfolder=None, weight_name=None, image_encoder_folder=None, low_cpu_mem_usage=False)
        pipe.set_ip_adapter_scale(ip[1])
        pipe.unet.to(dtype)
        extra = {"ip_adapter_image": Image.fromarray(image.numpy())}
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    latents = pipe(prompt="a red heart", negative_prompt="purple", num_inference_steps=8, guidance_scale=7.5, height=16,
                   width=16, latents=noise.to(dtype), output_type="latent", **extra).images
    return {"noise": noise, "latents": latents.float()}


@torch.no_grad()
def main():
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(41)
    make(generator)
    image = torch.randint(0, 256, (24, 20, 3), generator=generator, dtype=torch.uint8)
    arrays, metadata, cases = {"shown": image}, {"diffusers": diffusers.__version__}, []
    for case, (folder, ip, t2i) in CASES.items():
        exact, single = run(case, torch.float64, image), run(case, torch.float32, image)
        off = (exact["latents"] - single["latents"]).double()
        metadata[f"noise_floor.{case}"] = str((off.norm() / exact["latents"].double().norm()).item())
        arrays |= {f"{case}.{name}": value for name, value in single.items()}
        words = ["prompt=a red heart", "negative_prompt=purple", "num_inference_steps=8", "guidance_scale=7.5", "height=16",
                 "width=16"]
        if ip:
            words += [f"ip_adapter={{}}/{ip[0]}", "ip_adapter_image={}/shown.png", f"ip_adapter_scale={ip[1]}"]
        if t2i:
            words += [f"t2i_adapter={{}}/{t2i[0]}", "t2i_adapter_image={}/shown.png", f"t2i_adapter_conditioning_scale={t2i[1]}"]
        cases.append({"name": case, "folder": f"../pipelines/{folder}", "control": False, "words": words})
        print(case, metadata[f"noise_floor.{case}"])
    (OUT / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    save_file(arrays, OUT / "golden.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()
