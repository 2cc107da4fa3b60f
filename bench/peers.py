"""The training step of bench/model_bench.cc in PyTorch with diffusers, timed the same way, from the process's start.

python bench/peers.py unet|vae|wan|z_image f32|bf16 eager|compile [--steps N]      prints one JSON line

Same sizes (bench/models/*.json), batch, optimizer, clipping and noise; bf16 is autocast: weights f32, activations bf16.
"""

import argparse
import json
import os
import pathlib
import resource
import time


def seconds_since_start():
    fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - float(fields[19]) / os.sysconf("SC_CLK_TCK")


def unet_step(torch, config):
    from diffusers import DDPMScheduler, UNet2DConditionModel

    model = UNet2DConditionModel.from_config(config)
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    text = torch.randn(2, 77, config["cross_attention_dim"])
    added = {"text_embeds": torch.randn(2, pooled), "time_ids": torch.tensor([[512.0, 512, 0, 0, 512, 512]] * 2)}
    mean, deviation = torch.randn(2, 4, 64, 64), torch.randn(2, 4, 64, 64)

    def loss():
        latents = mean + deviation * torch.randn_like(mean)
        noise, t = torch.randn_like(latents), torch.randint(0, 1000, (2,))
        noisy = scheduler.add_noise(latents, noise, t)
        prediction = model(noisy, t, text, added_cond_kwargs=added, return_dict=False)[0]
        return torch.nn.functional.mse_loss(prediction.float(), noise)

    return model, loss


def vae_step(torch, config):
    from diffusers import AutoencoderKL

    model = AutoencoderKL.from_config(config)
    pixels = torch.randint(0, 256, (2, 3, 128, 128)).float() / 127.5 - 1

    def loss():
        posterior = model.encode(pixels).latent_dist
        decoded = model.decode(posterior.sample()).sample
        return (decoded.float() - pixels).abs().mean() + 1e-6 * posterior.kl().mean() / pixels[0].numel()

    return model, loss


def wan_step(torch, config):
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_config(config)
    text = torch.randn(1, 512, config["text_dim"])
    mean, deviation = torch.randn(1, 16, 5, 32, 32), torch.randn(1, 16, 5, 32, 32)

    def loss():
        latents = mean + deviation * torch.randn_like(mean)
        noise, sigma = torch.randn_like(latents), torch.rand(1)
        noisy = (1 - sigma) * latents + sigma * noise
        prediction = model(noisy, 1000 * sigma, text, return_dict=False)[0]
        return torch.nn.functional.mse_loss(prediction.float(), noise - latents)

    return model, loss


def z_image_step(torch, config):
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel.from_config(config)
    text = torch.randn(512, config["cap_feat_dim"])
    mean, deviation = torch.randn(16, 1, 64, 64), torch.randn(16, 1, 64, 64)

    def loss():
        latents = mean + deviation * torch.randn_like(mean)
        noise, sigma = torch.randn_like(latents), torch.rand(1)
        noisy = (1 - sigma) * latents + sigma * noise
        prediction = -model([noisy], 1 - sigma, [text], return_dict=False)[0][0]
        return torch.nn.functional.mse_loss(prediction.float(), noise - latents)

    return model, loss


STEPS = {"unet": unet_step, "vae": vae_step, "wan": wan_step, "z_image": z_image_step}


def report(options, program, parameters, runs, to_first_loss, **extra):
    """Prints a row; runs: wall and CPU seconds of each step, the first step separately."""
    times, processor = (sorted(run[i] for run in runs[1:]) for i in (0, 1))
    row = {
        "program": program,
        "model": options.model,
        "dtype": options.dtype,
        "parameters": parameters,
        "first_step_s": runs[0][0],
        "to_first_loss_s": to_first_loss,
        "step_s": times[len(times) // 2] if times else 0,
        "fastest_s": times[0] if times else 0,
        "processor_s": processor[len(processor) // 2] if times else 0,
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }
    print(json.dumps(row | extra))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=STEPS)
    parser.add_argument("dtype", choices=["f32", "bf16"])
    parser.add_argument("mode", choices=["eager", "compile"])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    import torch

    config = json.loads((pathlib.Path(__file__).parent / "models" / f"{options.model}.json").read_text())
    torch.manual_seed(0)
    model, loss_of = STEPS[options.model](torch, config)
    model.train()
    if options.mode == "compile":
        loss_of = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        start, used = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - start, time.process_time() - used

    runs = [step()]
    to_first_loss = seconds_since_start()
    runs += [step() for _ in range(options.steps)]
    count = sum(p.numel() for p in model.parameters())
    report(options, f"PyTorch {torch.__version__.split('+')[0]} {options.mode}", count, runs, to_first_loss)


if __name__ == "__main__":
    main()
