"""The training step of bench/model_bench.cc in PyTorch with diffusers, timed the same way, from the process's start.

python bench/peers.py unet|vae|wan|z_image|qwen_image f32|bf16 eager|compile [--steps N]      prints one JSON line
python bench/peers.py wan|z_image|qwen_image|qwen3 f32|bf16 eager|compile --work predict      the model alone

Same sizes (bench/models/*.json), batch, optimizer, clipping and noise; bf16 is autocast: weights f32, activations bf16.
To predict, weights and activations have the type.
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


def wan(torch, config, dtype):
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_config(config)
    text = torch.randn(1, 512, config["text_dim"], dtype=dtype)
    return model, (1, 16, 5, 32, 32), lambda x, sigma: model(x, 1000 * sigma, text, return_dict=False)[0]


def z_image(torch, config, dtype):
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel.from_config(config)
    text = torch.randn(512, config["cap_feat_dim"], dtype=dtype)
    return model, (16, 1, 64, 64), lambda x, sigma: -model([x], 1 - sigma, [text], return_dict=False)[0][0]


def qwen_image(torch, config, dtype):
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel.from_config(config)
    text, shapes = torch.randn(1, 512, config["joint_attention_dim"], dtype=dtype), [[(1, 32, 32)]]
    # Latents are packed into tokens by the pipeline, which costs no time to speak of.
    return model, (1, 1024, 64), lambda x, sigma: model(x, text, None, sigma.to(dtype), shapes, return_dict=False)[0]


TRANSFORMERS = {"wan": wan, "z_image": z_image, "qwen_image": qwen_image}


def transformer_step(torch, name, config):
    model, shape, predict = TRANSFORMERS[name](torch, config, torch.float32)
    mean, deviation = torch.randn(shape), torch.randn(shape)

    def loss():
        latents = mean + deviation * torch.randn_like(mean)
        noise, sigma = torch.randn_like(latents), torch.rand(1)
        prediction = predict((1 - sigma) * latents + sigma * noise, sigma)
        return torch.nn.functional.mse_loss(prediction.float(), noise - latents)

    return model, loss


def prediction(torch, name, config, dtype):
    """The model, with weights of this type, and a function that runs it once."""
    if name == "qwen3":
        from transformers import Qwen3Config, Qwen3Model

        model = Qwen3Model(Qwen3Config(**config)).to(dtype).eval()
        ids = torch.zeros(1, 512, dtype=torch.long)
        return model, lambda: model(input_ids=ids, use_cache=False).last_hidden_state
    model, shape, predict = TRANSFORMERS[name](torch, config, dtype)
    model.to(dtype).eval()
    x, sigma = torch.randn(shape, dtype=dtype), torch.rand(1)
    return model, lambda: predict(x, sigma)


STEPS = {"unet": unet_step, "vae": vae_step}


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


def training(torch, model, loss_of, options):
    """A function that makes one step."""
    model.train()
    if options.mode == "compile":
        loss_of = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=[*STEPS, *TRANSFORMERS, "qwen3"])
    parser.add_argument("dtype", choices=["f32", "bf16"])
    parser.add_argument("mode", choices=["eager", "compile"])
    parser.add_argument("--work", choices=["train", "predict"], default="train")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    import torch

    config = json.loads((pathlib.Path(__file__).parent / "models" / f"{options.model}.json").read_text())
    torch.manual_seed(0)
    if options.work == "predict":
        model, run = prediction(torch, options.model, config, torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    else:
        model, loss_of = (STEPS[options.model](torch, config) if options.model in STEPS else
                          transformer_step(torch, options.model, config))
        run = training(torch, model, loss_of, options)
    if options.mode == "compile" and options.work == "predict":
        run = torch.compile(run)

    def step():
        start, used = time.perf_counter(), time.process_time()
        with torch.inference_mode(options.work == "predict"):
            run()
        return time.perf_counter() - start, time.process_time() - used

    runs = [step()]
    to_first_loss = seconds_since_start()
    runs += [step() for _ in range(options.steps)]
    count = sum(p.numel() for p in model.parameters())
    report(options, f"PyTorch {torch.__version__.split('+')[0]} {options.mode}", count, runs, to_first_loss)


if __name__ == "__main__":
    main()
