"""Writes the goldens of video to video: results of diffusers' WanVideoToVideoPipeline with the folder of another golden.

tests/golden/video_to_video/ gets
  golden.safetensors  video   u8 [F, H, W, 3], what the samples begin with
                      <case>.noise  f32 [N, C, F', h, w], the noise that it gets; <case>.latents
                      metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU.

    python tools/golden/video_to_video.py
"""

import pathlib
import sys

import torch
from diffusers import WanVideoToVideoPipeline
from PIL import Image
from safetensors.torch import save_file

from flux_pipelines import kept_precision
from pipelines import scheduler_of

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "video_to_video"
FRAMES, HEIGHT, WIDTH = 9, 32, 48
# name: (scheduler's members, arguments)
CASES = {
    "unipc": ({}, dict(strength=0.6)),
    "euler": (dict(_class_name="FlowMatchEulerDiscreteScheduler", shift=3.0), dict(strength=0.8,
                                                                                negative_prompt="grey")),
}


def main():
    pipe = WanVideoToVideoPipeline.from_pretrained(GOLDEN / "wan" / "t2v", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    saved = pipe.scheduler
    generator = torch.Generator().manual_seed(11)
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 3, 4, 5, generator=generator), (FRAMES, HEIGHT, WIDTH),
                                             mode="trilinear")[0]
    video = (smooth * 255).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()
    arrays, metadata = {"video": video}, {}
    scale, spatial = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
    for case, (members, extra) in CASES.items():
        noise = torch.randn(1, pipe.vae.config.z_dim, 1 + (FRAMES - 1) // scale, HEIGHT // spatial, WIDTH // spatial,
                            generator=torch.Generator().manual_seed(sum(map(ord, case))))
        module = sys.modules[type(pipe).__module__]
        module.randn_tensor = lambda shape, dtype=None, **_: noise.reshape(shape).to(dtype)
        results = []
        for dtype in (torch.float32, torch.float64):
            pipe.to(dtype)
            pipe.scheduler = saved
            pipe.scheduler = scheduler_of(pipe, members)
            with kept_precision():
                results.append(pipe(
                    video=[Image.fromarray(frame.numpy()) for frame in video], prompt="a red heart", height=HEIGHT,
                    width=WIDTH, num_inference_steps=5, guidance_scale=3.0, max_sequence_length=12,
                    output_type="latent", **extra).frames)
        floor = ((results[0] - results[1]).norm() / results[1].norm()).item()
        print(case, list(results[0].shape), f"noise floor {floor:.2g}")
        arrays |= {f"{case}.noise": noise, f"{case}.latents": results[0].float().contiguous()}
        metadata[f"noise_floor.{case}"] = f"{floor:.2g}"
    ROOT.mkdir(parents=True, exist_ok=True)
    save_file(arrays, ROOT / "golden.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()
