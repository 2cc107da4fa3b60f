#!/usr/bin/env python3
"""A training step of a denoiser with diffusers' modules, for `maxdiffusion accelerator_check`: prints one JSON line.

accelerator_peer.py CONFIG.json --batch N --height H --width W [--frames F] [--mode eager|compile] [--optimizer adamw|sgd]
                    [--lora RANK] [--attention any|without_cudnn] [--steps N] [--device cuda|cpu]

Random weights in bf16, latents and text embeddings of noise, the loss of the published recipe, clipping, the optimizer.
--lora trains peft's matrices for attention's projections only. --attention without_cudnn uses PyTorch's other kernels:
cuDNN's gradient fails for FLUX.1 (an illegal memory access, with PyTorch 2.11 on an H200).
"""

import argparse
import json
import pathlib
import statistics
import time


def loss_of(o, config, torch):
    import diffusers

    kind = torch.bfloat16
    with torch.device(o.device):
        net = getattr(diffusers, config["_class_name"]).from_config(config).to(kind)
    net.train()
    net.enable_gradient_checkpointing()
    if o.lora:
        import peft

        net.requires_grad_(False)
        net.add_adapter(peft.LoraConfig(r=o.lora, lora_alpha=o.lora, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    height, width = o.height // 8, o.width // 8
    normal = lambda *sizes: torch.randn(o.batch, *sizes, dtype=kind, device=o.device)

    def of_unet(latent, noise):
        alpha = torch.rand(o.batch, 1, 1, 1, device=o.device, dtype=kind)
        noisy = alpha.sqrt() * latent + (1 - alpha).sqrt() * noise
        t = torch.randint(0, 1000, (o.batch,), device=o.device)
        named = {}
        if config.get("addition_embed_type") == "text_time":
            pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
            named = dict(added_cond_kwargs=dict(text_embeds=normal(pooled), time_ids=normal(6)))
        return net(noisy, t, normal(77, config["cross_attention_dim"]), return_dict=False, **named)[0], noise

    def flow(latent, noise):
        sigma = torch.rand(o.batch, device=o.device, dtype=kind)
        wide = sigma.view(-1, *[1] * (latent.dim() - 1))
        return (1 - wide) * latent + wide * noise, sigma

    def of_wan(latent, noise):
        noisy, sigma = flow(latent, noise)
        return net(noisy, 1000 * sigma, normal(512, config["text_dim"]), return_dict=False)[0], noise - latent

    def of_flux(latent, noise):
        noisy, sigma = flow(latent, noise)
        places = torch.zeros(latent.shape[1], 3, device=o.device)
        guidance = torch.full((o.batch,), 3.5, device=o.device) if config.get("guidance_embeds") else None
        return net(noisy, normal(512, config["joint_attention_dim"]), normal(config["pooled_projection_dim"]), sigma, places,
                   torch.zeros(512, 3, device=o.device), guidance=guidance, return_dict=False)[0], noise - latent

    def of_z_image(latent, noise):
        noisy, sigma = flow(latent, noise)
        text = [normal(512, config["cap_feat_dim"])[0] for _ in range(o.batch)]
        prediction = net(list(noisy), 1 - sigma, text, return_dict=False)[0]
        return -torch.stack(prediction), noise - latent

    if config["_class_name"].startswith("Wan"):
        sizes, f = (config["in_channels"], 1 + (o.frames - 1) // 4, height, width), of_wan
    elif config["_class_name"].startswith("Flux"):
        sizes, f = (height * width // 4, config["in_channels"]), of_flux
    elif config["_class_name"].startswith("ZImage"):
        sizes, f = (config["in_channels"], 1, height, width), of_z_image
    else:
        sizes, f = (config["in_channels"], height, width), of_unet

    def loss():
        prediction, target = f(normal(*sizes), normal(*sizes))
        return torch.nn.functional.mse_loss(prediction.float(), target.float())

    return net, loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--attention", choices=["any", "without_cudnn"], default="any")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    o = parser.parse_args()

    import torch

    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(o.attention == "any")
    net, loss = loss_of(o, json.loads(pathlib.Path(o.config).read_text()), torch)
    if o.mode == "compile":
        net.compile()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = (torch.optim.AdamW if o.optimizer == "adamw" else torch.optim.SGD)(parameters, lr=1e-5)
    seconds = []
    for _ in range(o.steps + 2):
        start = time.perf_counter()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if o.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    steps = seconds[2:] or seconds
    peak = torch.cuda.max_memory_allocated() if o.device == "cuda" else None
    print(json.dumps(dict(torch=torch.__version__, mode=o.mode, attention=o.attention, lora=o.lora, batch=o.batch, first_s=seconds[0],
                          step_s=statistics.median(steps), images_s=o.batch / statistics.median(steps), peak_bytes=peak)))


if __name__ == "__main__":
    main()
