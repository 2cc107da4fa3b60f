"""Writes the goldens of LoRA: tests/golden/lora/.

  files.json, files.safetensors   Small matrices for modules of the tiny models in tests/golden, and for each layout of
      LoRA files the keys under which they stand, its metadata, and by which factor of up @ down diffusers (or PEFT)
      changes each weight when it loads such a file. Every layout is written, loaded and compared here: each weight of
      each model must change by that factor times the product, or not at all, and no key may be left over.
  <case>.safetensors              Gradients of a tiny model with PEFT's LoRA layers, from a float64 run, for the loss of
      tests/golden/<case>: A/<weight>, B/<weight> (matrices), grad.A/…, grad.B/…, out.*; metadata: rank, alpha, targets,
      noise floors.

    python tools/golden/lora.py
"""

import json
import logging
import pathlib
import tempfile

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"

_BLOCK = "attentions.0.transformer_blocks."
MODULES = {
    "sdxl": {
        "unet": ["conv_in", "time_embedding.linear_2", "down_blocks.0.resnets.0.conv1",
                 "down_blocks.0.resnets.0.time_emb_proj", "down_blocks.0.downsamplers.0.conv",
                 "down_blocks.1.resnets.0.conv_shortcut", "down_blocks.1.attentions.0.proj_in",
                 f"down_blocks.2.{_BLOCK}1.attn1.to_q", f"down_blocks.2.{_BLOCK}0.attn2.to_k",
                 f"mid_block.{_BLOCK}1.attn1.to_out.0", f"mid_block.{_BLOCK}0.ff.net.0.proj", "mid_block.resnets.1.conv2",
                 "up_blocks.0.attentions.1.transformer_blocks.1.attn2.to_v", "up_blocks.0.upsamplers.0.conv",
                 f"up_blocks.1.{_BLOCK}0.ff.net.2", "up_blocks.2.resnets.1.conv1", "conv_out"],
        "text_encoder": ["encoder.layers.0.self_attn.q_proj", "encoder.layers.1.self_attn.out_proj"],
        "text_encoder_2": ["encoder.layers.1.self_attn.k_proj", "encoder.layers.1.self_attn.out_proj"],
    },
    "sd15": {
        "unet": ["down_blocks.0.attentions.0.proj_in", f"down_blocks.1.{_BLOCK}0.attn2.to_v",
                 f"mid_block.{_BLOCK}0.attn1.to_out.0", "up_blocks.3.attentions.1.proj_out"],
        "text_encoder": ["encoder.layers.2.self_attn.v_proj", "encoder.layers.0.self_attn.out_proj"],
    },
}
CASES = {"sdxl": {"unet": "unet_sdxl", "text_encoder": "clip_legacy", "text_encoder_2": "clip_projection"},
         "sd15": {"unet": "unet_sd15", "text_encoder": "clip_legacy"}}
# Names of the original SDXL UNet, written out from its module list: what kohya's trainers use for SDXL.
ORIGINAL = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_2": "time_embed.2",
    "down_blocks.0.resnets.0.conv1": "input_blocks.1.0.in_layers.2",
    "down_blocks.0.resnets.0.time_emb_proj": "input_blocks.1.0.emb_layers.1",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op",
    "down_blocks.1.resnets.0.conv_shortcut": "input_blocks.3.0.skip_connection",
    "down_blocks.1.attentions.0.proj_in": "input_blocks.3.1.proj_in",
    f"down_blocks.2.{_BLOCK}1.attn1.to_q": "input_blocks.5.1.transformer_blocks.1.attn1.to_q",
    f"down_blocks.2.{_BLOCK}0.attn2.to_k": "input_blocks.5.1.transformer_blocks.0.attn2.to_k",
    f"mid_block.{_BLOCK}1.attn1.to_out.0": "middle_block.1.transformer_blocks.1.attn1.to_out.0",
    f"mid_block.{_BLOCK}0.ff.net.0.proj": "middle_block.1.transformer_blocks.0.ff.net.0.proj",
    "mid_block.resnets.1.conv2": "middle_block.2.out_layers.3",
    "up_blocks.0.attentions.1.transformer_blocks.1.attn2.to_v": "output_blocks.1.1.transformer_blocks.1.attn2.to_v",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.1.2.conv",
    f"up_blocks.1.{_BLOCK}0.ff.net.2": "output_blocks.2.1.transformer_blocks.0.ff.net.2",
    "up_blocks.2.resnets.1.conv1": "output_blocks.5.0.in_layers.2", "conv_out": "out.2",
}
GRADIENTS = {
    # Has repeated layers, so that it also runs as loops.
    "unet_no_mid": (2, 3.0, ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "ff.net.0.proj", "conv1", "conv_in"]),
    "unet_plain": (3, 2.0, ["conv", "conv2", "conv_shortcut", "time_emb_proj", "linear_1", "conv_out"]),
    "clip_projection": (2, 2.0, ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "text_projection"]),
}


def grid(shape, generator):
    """Numbers that are exact in bf16 and f16, and whose products with few terms are exact in f32."""
    return torch.randint(-32, 33, shape, generator=generator).float() / 32


def load_component(name, case):
    config = json.loads((ROOT / case / "config.json").read_text())
    weights = load_file(ROOT / case / "weights.safetensors")
    if name == "unet":
        model = UNet2DConditionModel.from_config(config)
    else:
        kind = CLIPTextModelWithProjection if "Projection" in config["architectures"][0] else CLIPTextModel
        model = kind(CLIPTextConfig(**config))
        if kind is CLIPTextModel:  # flat in transformers 5
            weights = {k.removeprefix("text_model."): v for k, v in weights.items()}
    model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=True)
    return model.eval()


def pipeline(which):
    parts = {name: load_component(name, case) for name, case in CASES[which].items()}
    rest = dict(vae=AutoencoderKL(block_out_channels=[8], norm_num_groups=2), tokenizer=None,
                scheduler=DDPMScheduler())
    if which == "sdxl":
        return StableDiffusionXLPipeline(**parts, **rest, tokenizer_2=None)
    return StableDiffusionPipeline(**parts, **rest, safety_checker=None, feature_extractor=None,
                                   requires_safety_checker=False)


def weights_of(model):
    """By published name, whatever wraps the layers."""
    out = {}
    for name, p in model.named_parameters():
        if "lora_" in name:
            continue
        name = name.removeprefix("base_model.model.").replace("base_layer.", "")
        text = not isinstance(model, (UNet2DConditionModel, PeftModel)) and not name.startswith(("text_"))
        out["text_model." + name if text else name] = p.detach().clone()
    return out


def published(component, module):
    return module if component == "unet" else "text_model." + module


class Complaints(logging.Handler):
    """Warnings of diffusers and PEFT about keys are failures here."""

    def emit(self, record):
        message = record.getMessage()
        if "No LoRA keys associated" not in message and "kept in float32" not in message:
            raise AssertionError(message)


def factors(before, after, pairs):
    """The multiple of up @ down by which each weight changed; all others must be unchanged."""
    out = {}
    for component, weights in before.items():
        for path, w in weights.items():
            delta = after[component][path].double() - w.double()
            pair = pairs[component].get(path.removesuffix(".weight"))
            if pair is None:
                assert not delta.any(), (component, path)
                continue
            product = (pair[1].flatten(1).double() @ pair[0].flatten(1).double()).reshape(w.shape)
            factor = (delta * product).sum() / (product * product).sum()
            assert (delta - factor * product).norm() < 1e-6 * delta.norm(), (component, path)
            out[f"{component}/{path}"] = round(factor.item(), 7)
    return out


def peft_state(pairs, prefix=""):
    return {f"{prefix}{m}.lora_{x}.weight": t for m, (a, b) in pairs.items() for x, t in (("A", a), ("B", b))}


def layouts(which, pairs):
    """Name → (tensors, metadata of the file, text of adapter_config.json or None)."""
    targets = {c: sorted(m.removeprefix("text_model.") for m in modules) for c, modules in pairs.items()}
    rank = {c: 2 for c in pairs}
    special = "mid_block.resnets.1.conv2" if which == "sdxl" else None  # of rank 3
    rank_pattern = {"unet": {special: 3} if special else {}}

    def saved(metadata):
        """As diffusers writes it."""
        with tempfile.TemporaryDirectory() as folder:
            pipe = StableDiffusionXLPipeline if which == "sdxl" else StableDiffusionPipeline
            pipe.save_lora_weights(
                folder, **{f"{c}_lora_layers": peft_state(p) for c, p in pairs.items()},
                **{f"{c}_lora_adapter_metadata": metadata[c] for c in pairs if c in metadata})
            file = pathlib.Path(folder) / "pytorch_lora_weights.safetensors"
            with safe_open(file, "pt") as f:
                return load_file(file), f.metadata(), None

    def config(c, alpha, whole=False, **extra):
        options = LoraConfig(r=rank[c], lora_alpha=alpha, target_modules=targets[c],
                             rank_pattern=rank_pattern.get(c, {}), **extra).to_dict()
        options["target_modules"] = targets[c]  # sorted
        return {k: v for k, v in options.items() if whole or k == "peft_type" or v not in (None, False, {}, "none")}

    yield "peft", saved({c: config(c, 3.0 if c == "unet" else 1.0, whole=which == "sdxl") for c in pairs})
    if which == "sdxl":
        yield "peft_patterns", saved({
            "unet": config("unet", 4.0, alpha_pattern={min(pairs["unet"]): 1.0, "attn1.*": 8.0}),
            "text_encoder": config("text_encoder", 2.0, use_rslora=True),
            "text_encoder_2": config("text_encoder_2", 2.0)})
        yield "peft_plain", saved({})

    processor = lambda m: m.replace("attn1.", "attn1.processor.").replace("attn2.", "attn2.processor.")
    old, linear = {}, {}
    for c, modules in pairs.items():
        for m, (down, up) in modules.items():
            for part, tensor in (("down", down), ("up", up)):
                if ".attn" in m:
                    old[f"{c}.{processor(m).replace('to_out.0', 'to_out')}_lora.{part}.weight"] = tensor
                elif "_attn" in m:
                    n = m.replace("q_proj", "to_q").replace("k_proj", "to_k").replace("v_proj", "to_v")
                    old[f"{c}.{n.replace('out_proj', 'to_out')}_lora.{part}.weight"] = tensor
                else:
                    old[f"{c}.{m}.lora.{part}.weight"] = tensor
                linear[f"{c}.{m}.{'lora' if c == 'unet' else 'lora_linear_layer'}.{part}.weight"] = tensor
    yield "diffusers_old", (old, {}, None)
    yield "diffusers", (linear, {}, None)

    def kohya(rename, te):
        state = {}
        for c, modules in pairs.items():
            named = {rename(m) if c == "unet" else m: p for m, p in modules.items()}
            state |= convert_state_dict_to_kohya(peft_state(named, c + "."))
        state = {k.replace("lora_te1_", te): v for k, v in state.items()}
        alpha = lambda k: torch.tensor(3.0 if "_unet_" in k else 1.0)
        return {k: alpha(k) if k.endswith(".alpha") else v for k, v in state.items()}, {}, None

    yield "kohya", kohya(lambda m: m, "lora_te1_" if which == "sdxl" else "lora_te_")
    if which == "sdxl":
        yield "kohya_original", kohya(ORIGINAL.get, "lora_te1_")
    # PEFT's own folder of one model: no component, alpha in adapter_config.json.
    adapter_config = config("unet", 5.0, alpha_pattern={"to_out.0": 1.0})
    yield "peft_folder", (peft_state(pairs["unet"], "base_model.model."), {}, json.loads(json.dumps(adapter_config)))


def record_files():
    arrays, golden = {}, {}
    for seed, which in enumerate(MODULES):
        generator = torch.Generator().manual_seed(seed)
        clean = {c: weights_of(load_component(c, case)) for c, case in CASES[which].items()}
        pairs = {}
        for c, modules in MODULES[which].items():
            pairs[c] = {}
            for m in (published(c, m) for m in modules):
                w, r = clean[c][m + ".weight"], 3 if m == "mid_block.resnets.1.conv2" else 2
                down, up = grid((r, *w.shape[1:]), generator), grid((w.shape[0], r, *[1] * (w.ndim - 2)), generator)
                pairs[c][m] = (down, up)
                arrays[f"{which}/{c}/{m}/down"], arrays[f"{which}/{c}/{m}/up"] = down.bfloat16(), up.bfloat16()
        values = {f"{c}/{m}/{part}": t for c, modules in pairs.items() for m, pair in modules.items()
                  for part, t in zip(("down", "up"), pair)}
        golden[which] = {}
        for layout, (tensors, metadata, config) in layouts(which, pairs):
            with tempfile.TemporaryDirectory() as folder:
                if config is None:
                    save_file({k: v.contiguous() for k, v in tensors.items()}, f"{folder}/a.safetensors", metadata=metadata)
                    pipe = pipeline(which)
                    pipe.load_lora_weights(folder, weight_name="a.safetensors")
                    pipe.fuse_lora(components=list(pairs))
                    after = {c: weights_of(getattr(pipe, c)) for c in pairs}
                else:
                    save_file(tensors, f"{folder}/adapter_model.safetensors")
                    pathlib.Path(folder, "adapter_config.json").write_text(json.dumps(config))
                    model = PeftModel.from_pretrained(load_component("unet", CASES[which]["unet"]), folder)
                    after = {"unet": weights_of(model.merge_and_unload())}
            used = {c: pairs[c] for c in after}
            changed = factors({c: clean[c] for c in after}, after, used)
            keys = {}
            for key, t in tensors.items():
                if key.endswith(".alpha"):
                    keys[key] = t.item()
                else:  # the matrix with the same numbers
                    same = [n for n, v in values.items() if v.shape == t.shape and torch.equal(v, t)]
                    assert len(same) == 1, (key, same)
                    keys[key] = same[0]
            assert len(changed) == sum(map(len, used.values())), layout
            golden[which][layout] = {"keys": keys, "metadata": metadata, "adapter_config": config, "factors": changed}
            print(f"{which}/{layout}: {len(tensors)} tensors, factors {sorted(set(changed.values()))}")
    return arrays, golden


def last(t):
    return t.permute(0, 2, 3, 1).contiguous() if t.ndim == 4 else t.contiguous()


def first(t):
    return t.permute(0, 3, 1, 2).contiguous() if t.ndim == 4 else t.contiguous()


def forward(case, model, i):
    if case.startswith("clip"):
        y = model(i["ids"], output_hidden_states=True)
        return {f"hidden.{k}": h for k, h in enumerate(y.hidden_states)} | {
            "last": y.last_hidden_state, "text_embeds": y.text_embeds}
    down = [i[k] for k in sorted(i) if k.startswith("down_residual")]
    return {"sample": model(i["sample"], i["timestep"], i["encoder_hidden_states"],
                            down_block_additional_residuals=down or None,
                            mid_block_additional_residual=i.get("mid_residual")).sample}


def record_gradients(case, rank, alpha, targets):
    generator = torch.Generator().manual_seed(7)
    component = "text_encoder_2" if case.startswith("clip") else "unet"
    golden = load_file(ROOT / case / "golden.safetensors")
    pick = lambda kind: {k.removeprefix(kind): first(v) for k, v in golden.items() if k.startswith(kind)}
    inputs, dots = pick("in."), pick("dot.")
    model = inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets),
                                    load_component(component, case), "default")
    found = {}
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_" in name:
            p.data = grid(p.shape, generator) / 2
            module, matrix = name.removesuffix(".default.weight").rsplit(".lora_", 1)
            found[f"{matrix}/{module}.weight"] = p
    missing = [t for t in targets if not any(f".{k}".endswith(f".{t}.weight") for k in
                                             (n.split("/")[1] for n in found))]
    assert not missing, missing

    def run(dtype, autocast=False):
        model.to(dtype).zero_grad(set_to_none=True)
        live = {k: v.to(dtype) if v.is_floating_point() else v.long() for k, v in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = forward(case, model, live)
        sum((out[k] * d.to(dtype)).sum() for k, d in dots.items()).backward()
        return {k: v.detach().double() for k, v in out.items()}, {k: p.grad.double().clone() for k, p in found.items()}

    single, narrow, wanted = run(torch.float32), run(torch.float32, autocast=True), run(torch.float64)
    relative = lambda a, b: [((a[k] - b[k]).norm() / b[k].norm()).item() for k in b]
    together = lambda g: torch.cat([g[k].flatten() for k in wanted[1]])
    outputs = [k for k in wanted[0] if k in ("sample", "text_embeds")]
    print(f"{case}: in bf16 outputs {max(relative(narrow[0], {k: wanted[0][k] for k in outputs})):.3g}, gradients "
          f"{max(relative(narrow[1], wanted[1])):.3g}, together "
          f"{((together(narrow[1]) - together(wanted[1])).norm() / together(wanted[1]).norm()).item():.3g}")
    floors = [max(relative(a, b)) for a, b in zip(single, wanted)]
    arrays = {k: p.detach().bfloat16() for k, p in found.items()}
    arrays |= {"grad." + k: g.float().contiguous() for k, g in wanted[1].items()}
    arrays |= {"out." + k: last(v.float()) for k, v in wanted[0].items() if k in ("sample", "text_embeds")}
    save_file(arrays, ROOT / "lora" / f"{case}.safetensors", metadata={
        "rank": str(rank), "alpha": str(alpha), "targets": ",".join(targets),
        "noise_floor_outputs": f"{floors[0]:.3g}", "noise_floor_gradients": f"{floors[1]:.3g}"})
    print(f"{case}: {len(found)} matrices, noise floor of outputs {floors[0]:.2g}, of gradients {floors[1]:.2g}")


def main():
    torch.use_deterministic_algorithms(True)
    for library in ("diffusers", "peft"):
        logging.getLogger(library).addHandler(Complaints())
    (ROOT / "lora").mkdir(exist_ok=True)
    arrays, golden = record_files()
    save_file(arrays, ROOT / "lora" / "files.safetensors")
    golden["versions"] = {"diffusers": diffusers.__version__, "transformers": transformers.__version__}
    (ROOT / "lora" / "files.json").write_text(json.dumps(golden, indent=0) + "\n")
    for case, options in GRADIENTS.items():
        record_gradients(case, *options)


if __name__ == "__main__":
    main()
