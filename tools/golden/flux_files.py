"""Writes the goldens of Flux's files of other programs, for the tiny folder tests/golden/flux/dev.

tests/golden/flux/ gets
  original/flux1.safetensors   the transformer as the original program has it; diffusers' converter is checked to make
                               the folder's weights of it, and original/ae.safetensors likewise of the autoencoder
  lora/<layout>.safetensors    LoRA files in every layout. All but xlabs hold the same matrices, by which diffusers is
                               checked to change the weights in the same way
  lora/changes.safetensors     what diffusers' loader adds to the weights for lora/diffusers.safetensors ("all.…") and
                               for lora/xlabs.safetensors ("xlabs.…"), scale 1, and for the text encoder ("clip.…")

    python tools/golden/flux_files.py
"""

import inspect
import json
import pathlib
import shutil

import diffusers
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import lora_conversion_utils, lora_pipeline, single_file_utils
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "flux"
RANK, ALPHA = 2, 1.0
ATTENTION = {"img": ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k"),
             "txt": ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k")}


def of_these_sizes(module, function, width):
    """The converter, which is written for the published width."""
    source = inspect.getsource(getattr(module, function)).replace("3072", str(width)).replace("12288", str(4 * width))
    space = dict(vars(module))
    exec(source, space)
    return space[function]


def originals(config):
    """Maps each original module to the diffusers modules it combines."""
    out = {"img_in": ["x_embedder"], "txt_in": ["context_embedder"], "final_layer.linear": ["proj_out"],
           "final_layer.adaLN_modulation.1": ["norm_out.linear"]}
    for a, b in (("time_in", "timestep"), ("guidance_in", "guidance"), ("vector_in", "text")):
        for x, y in (("in_layer", "linear_1"), ("out_layer", "linear_2")):
            out[f"{a}.{x}"] = [f"time_text_embed.{b}_embedder.{y}"]
    for i in range(config.num_layers):
        a, b = f"double_blocks.{i}", f"transformer_blocks.{i}"
        for kind, context in (("img", ""), ("txt", "_context")):
            q, k, v, o, nq, nk = (f"{b}.attn.{n}" for n in ATTENTION[kind])
            out |= {f"{a}.{kind}_mod.lin": [f"{b}.norm1{context}.linear"], f"{a}.{kind}_attn.qkv": [q, k, v],
                    f"{a}.{kind}_attn.proj": [o], f"{a}.{kind}_attn.norm.query_norm": [nq],
                    f"{a}.{kind}_attn.norm.key_norm": [nk], f"{a}.{kind}_mlp.0": [f"{b}.ff{context}.net.0.proj"],
                    f"{a}.{kind}_mlp.2": [f"{b}.ff{context}.net.2"]}
    for i in range(config.num_single_layers):
        a, b = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        out |= {f"{a}.modulation.lin": [f"{b}.norm.linear"], f"{a}.linear2": [f"{b}.proj_out"],
                f"{a}.linear1": [f"{b}.attn.to_q", f"{b}.attn.to_k", f"{b}.attn.to_v", f"{b}.proj_mlp"],
                f"{a}.norm.query_norm": [f"{b}.attn.norm_q"], f"{a}.norm.key_norm": [f"{b}.attn.norm_k"]}
    return out


def swapped(t):
    return torch.cat(t.chunk(2)[::-1])


def single_files(transformer, vae):
    folder = ROOT / "original"
    folder.mkdir()
    weights, left = {}, set(transformer.state_dict())
    for original, modules in originals(transformer.config).items():
        for kind in ("weight", "bias"):
            names = [f"{m}.{kind}" for m in modules]
            if names[0] not in left:
                continue
            t = torch.cat([transformer.state_dict()[n] for n in names])
            left -= set(names)
            t = swapped(t) if "adaLN" in original else t
            weights[f"{original}.{'scale' if original.endswith('_norm') else kind}"] = t.to(torch.bfloat16)
    assert not left, left
    save_file(weights, folder / "flux1.safetensors")
    convert = of_these_sizes(single_file_utils, "convert_flux_transformer_checkpoint_to_diffusers",
                             transformer.config.num_attention_heads * transformer.config.attention_head_dim)
    back = convert({"model.diffusion_model." + k: v for k, v in load_file(folder / "flux1.safetensors").items()})
    assert set(back) == set(transformer.state_dict())
    assert all(torch.equal(v.float(), transformer.state_dict()[k]) for k, v in back.items())
    print(f"flux1: {len(weights)} tensors")

    # ae.safetensors: by the inverse of diffusers' table.
    config = dict(vae.config)
    mapping, weights = {}, {}
    names = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out",
             "conv_shortcut": "nin_shortcut"}
    levels = len(config["block_out_channels"])
    for name, t in vae.state_dict().items():
        original = name.replace("conv_norm_out", "norm_out").replace("mid_block.resnets.0", "mid.block_1")
        original = original.replace("mid_block.resnets.1", "mid.block_2").replace("mid_block.attentions.0", "mid.attn_1")
        for i in range(levels):
            original = original.replace(f"down_blocks.{i}.resnets", f"down.{i}.block")
            original = original.replace(f"down_blocks.{i}.downsamplers.0", f"down.{i}.downsample")
            original = original.replace(f"up_blocks.{i}.resnets", f"up.{levels - 1 - i}.block")
            original = original.replace(f"up_blocks.{i}.upsamplers.0", f"up.{levels - 1 - i}.upsample")
        for a, b in names.items():
            original = original.replace(f".{a}.", f".{b}.")
        if "attn_1" in original and t.ndim == 2:
            t = t[:, :, None, None]
        mapping[original], weights[original] = name, t.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "ae.safetensors")
    back = single_file_utils.convert_ldm_vae_checkpoint(load_file(folder / "ae.safetensors"), config)
    assert set(back) == set(vae.state_dict())
    assert all(torch.equal(v.float().reshape(vae.state_dict()[k].shape), vae.state_dict()[k]) for k, v in back.items())
    print(f"ae: {len(weights)} tensors")


def grid(shape, generator, size=0.5):
    """Numbers that are exact in bf16 and f16, and whose products with few terms are exact in f32."""
    return torch.randint(-32, 33, shape, generator=generator).float() / 32 * size


def chosen(config):
    """Original modules that get matrices: those of the first double and the last single block, and some others."""
    last = config.num_single_layers - 1
    return {o: d for o, d in originals(config).items()
            if (o.startswith(("double_blocks.0.", f"single_blocks.{last}.")) or o in ("img_in", "final_layer.linear",
                                                                                    "final_layer.adaLN_modulation.1"))
            and not o.endswith("_norm") and o != f"single_blocks.{last}.modulation.lin"}


def files(pipe):
    generator = torch.Generator().manual_seed(5)
    weights = pipe.transformer.state_dict()
    # Parts of one tensor share the down matrix.
    pairs, fused = {}, {}
    for original, modules in chosen(pipe.transformer.config).items():
        down = grid((RANK, weights[modules[0] + ".weight"].shape[1]), generator)
        ups = [grid((weights[m + ".weight"].shape[0], RANK), generator) for m in modules]
        pairs |= {m: (down, up) for m, up in zip(modules, ups)}
        fused[original] = (down, swapped(ups[0]) if "adaLN" in original else torch.cat(ups), ups)
    clip = {f"text_model.encoder.layers.{i}.self_attn.{n}": (grid((RANK, 16), generator), grid((16, RANK), generator))
            for i in range(2) for n in ("q_proj", "out_proj")}
    alpha, halves = torch.tensor(ALPHA), ALPHA / RANK

    def named(source, prefix, rename=lambda n: n, ends=("lora_A", "lora_B"), factor=1.0, alphas=False):
        out = {}
        for name, (down, up, *_) in source.items():
            out[f"{prefix}{rename(name)}.{ends[0]}.weight"] = down.clone()
            out[f"{prefix}{rename(name)}.{ends[1]}.weight"] = up * factor
            if alphas:
                out[f"{prefix}{rename(name)}.alpha"] = alpha.clone()
        return out

    def sparse():
        """Gives each part of a tensor a disjoint part of the rank."""
        out = {}
        for original, (down, up, ups) in fused.items():
            n, name = len(ups), "lora_unet_" + original.replace(".", "_")
            out[f"{name}.lora_down.weight"] = torch.cat([down] * n)
            out[f"{name}.lora_up.weight"] = up if n == 1 else torch.block_diag(*ups)
            out[f"{name}.alpha"] = alpha * n
        return out

    xlabs = {}
    add_pair = lambda name, rows, columns: xlabs.update({f"{name}.down.weight": grid((RANK, columns), generator),
                                                     f"{name}.up.weight": grid((rows, RANK), generator)})
    width = pipe.transformer.inner_dim
    for i in (1, 2):
        add_pair(f"double_blocks.1.processor.qkv_lora{i}", 3 * width, width)
        add_pair(f"double_blocks.1.processor.proj_lora{i}", width, width)
    add_pair("single_blocks.0.processor.qkv_lora", 3 * width, width)
    add_pair("single_blocks.0.processor.proj_lora", width, 5 * width)

    adapter = {"r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(pairs), "peft_type": "LORA"}
    kohya, under = ("lora_down", "lora_up"), lambda n: n.replace(".", "_")
    return {
        "diffusers": (named(pairs, "transformer."),
                      {"lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in adapter.items()})}),
        "toolkit": (named(pairs, "transformer.", factor=halves), {}),
        "kohya": (named(fused, "lora_unet_", under, kohya, alphas=True) | named(clip, "lora_te1_", under, kohya,
                                                                             alphas=True), {}),
        "kohya_sparse": (sparse(), {}),
        "kohya_transformer": (named(pairs, "lora_transformer_", under, kohya, alphas=True), {}),
        "comfyui": (named(fused, "diffusion_model.", ends=kohya, alphas=True), {}),
        "comfyui_peft": (named(fused, "diffusion_model.", alphas=True), {}),
        "original_peft": (named(fused, "base_model.model.", factor=halves), {}),
        "xlabs": (xlabs, {}),
    }


def changes(pipe, tensors_or_path):
    """The change that a LoRA makes to the weights of transformer and text encoder."""
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (pipe.transformer, pipe.text_encoder)]
    origin = (dict(pretrained_model_name_or_path_or_dict=tensors_or_path) if isinstance(tensors_or_path, dict) else
             dict(pretrained_model_name_or_path_or_dict=tensors_or_path.parent, weight_name=tensors_or_path.name))
    pipe.load_lora_weights(**origin)
    pipe.fuse_lora(components=["transformer", "text_encoder"] if hasattr(pipe.text_encoder, "peft_config") else
                   ["transformer"])
    pipe.unload_lora_weights()
    out = []
    for model, old in zip((pipe.transformer, pipe.text_encoder), before):
        new = {k.replace(".base_layer", ""): v for k, v in model.state_dict().items()}
        assert set(new) == set(old)
        out.append({k: new[k] - v for k, v in old.items() if not torch.equal(new[k], v)})
        model.load_state_dict(old)
    return out


def main():
    diffusers.logging.set_verbosity_error()
    for name in ("original", "lora"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    pipe = FluxPipeline.from_pretrained(ROOT / "dev").to(torch.float64)
    width = pipe.transformer.inner_dim
    for name in ("_convert_kohya_flux_lora_to_diffusers", "_convert_fal_kontext_lora_to_diffusers"):
        setattr(lora_pipeline, name, of_these_sizes(lora_conversion_utils, name, width))
    single_files(FluxTransformer2DModel.from_pretrained(ROOT / "dev" / "transformer"),
                 AutoencoderKL.from_pretrained(ROOT / "dev" / "vae"))

    folder = ROOT / "lora"
    folder.mkdir()
    record, all_files = {}, files(pipe)
    for name, (tensors, metadata) in all_files.items():
        path = folder / f"{name}.safetensors"
        save_file({k: v.contiguous() if k.endswith("alpha") else v.to(torch.bfloat16).contiguous()
                   for k, v in tensors.items()}, path, metadata=metadata or None)
        try:
            transformer, clip = changes(pipe, path)
        except Exception as e:  # layouts that diffusers does not read; they are of the same matrices by construction
            print(f"{name}: {len(tensors)} tensors; diffusers: {type(e).__name__}: {str(e)[:100]}")
            continue
        if name in ("diffusers", "xlabs"):
            record |= {("all." if name == "diffusers" else "xlabs.") + k: v for k, v in transformer.items()}
        else:
            want = {k[4:]: v for k, v in record.items() if k.startswith("all.")}
            missing = {k for k in want if k not in transformer}
            # diffusers does not read alpha of the last layers, nor some beginnings of names.
            differing = {k for k in transformer if k not in want or not torch.allclose(transformer[k], want[k], rtol=1e-6)}
            print(f"{name}: not changed by diffusers: {sorted(missing)}; otherwise: {sorted(differing)}")
        record |= {"clip." + k: v for k, v in clip.items()}
        print(f"{name}: {len(tensors)} tensors, {len(transformer)} weights, {len(clip)} of the text encoder")
    save_file({k: v.float().contiguous() for k, v in record.items()}, folder / "changes.safetensors")


if __name__ == "__main__":
    main()
