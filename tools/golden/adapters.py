"""Writes the goldens of adapters of all kinds: tests/golden/lora/adapters.{json,safetensors}.

For a linear layer and a convolution with random weights, and for each kind of adapter as PEFT and LyCORIS make it: its
parameters, what the layers give, the gradients, the parameters after three steps of gradient descent, the merged
weights, and the file that the package writes. All computed in float64.

    PYTHONPATH=.deps/interop:LYCORIS python tools/golden/adapters.py

LYCORIS: where lycoris-lora 3.4.0 of PyPI is (pip install --no-deps --target LYCORIS lycoris-lora==3.4.0).
"""
import importlib.metadata
import json
import pathlib

import peft
import torch
from lycoris.modules.full import FullModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "lora"
STEPS, RATE = 3, 0.05


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(12, 10, bias=False)
        self.conv = torch.nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x, image):
        return self.lin(x), self.conv(image)


def grid(shape, generator, scale=1 / 32):
    return (torch.randint(-32, 33, shape, generator=generator) * scale).double()


G = torch.Generator().manual_seed(3)
WEIGHTS = {name: grid(p.shape, G) for name, p in Net().named_parameters()}
INPUTS = {"x": grid((3, 12), G), "image": grid((2, 6, 5, 5), G)}
DOTS = {"lin": grid((3, 10), G), "conv": grid((2, 8, 5, 5), G)}


def fresh():
    net = Net().double()
    net.load_state_dict(WEIGHTS)
    return net


def filled(parameters, kind):
    """Values that f32 holds: around 1 for factors, positive for magnitudes."""
    g = torch.Generator().manual_seed(11)
    for name, p in sorted(parameters.items()):
        value = grid(p.shape, g)
        if "ia3_l" in name or "magnitude" in name or "dora_scale" in name:
            value = 1.5 + value / 4
        p.data = value


def trained(forward, parameters):
    """Outputs, gradients, and values after a few steps."""
    start = {k: p.detach().clone() for k, p in parameters.items()}
    for step in range(STEPS):
        for p in parameters.values():
            p.grad = None
        out = dict(zip(("lin", "conv"), forward()))
        sum((out[k] * d).sum() for k, d in DOTS.items()).backward()
        if step == 0:
            outputs = {k: v.detach().clone() for k, v in out.items()}
            gradients = {k: p.grad.detach().clone() for k, p in parameters.items()}
        with torch.no_grad():
            for p in parameters.values():
                p -= RATE * p.grad
    after = {k: p.detach().clone() for k, p in parameters.items()}
    for k, p in parameters.items():
        p.data = start[k]
    return outputs, gradients, after


def of_peft(config):
    """PEFT's names of parameters have the adapter's name in them."""
    model = get_peft_model(fresh(), config)
    parameters = {n.removeprefix("base_model.model.").replace(".default", ""): p
                  for n, p in model.named_parameters() if ".default" in n}
    parameters = {n.removesuffix(".weight") if "magnitude" in n else n: p for n, p in parameters.items()}
    for n, p in model.named_parameters():
        p.requires_grad_(".default" in n)
    filled(parameters, config.peft_type)
    file = {k: v.detach().clone() for k, v in get_peft_model_state_dict(model).items()}
    values = {k: p.detach().clone() for k, p in parameters.items()}
    results = trained(lambda: model(**INPUTS), parameters)
    options = {k: v for k, v in config.to_dict().items() if k in OPTIONS and v not in (None, {}, [])}
    options = {k: sorted(v) if isinstance(v, set) else v for k, v in options.items()}
    options["peft_type"] = config.peft_type.value
    return values, results, file, dict(model.merge_and_unload().named_parameters()), options


OPTIONS = {"r", "lora_alpha", "alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "target_modules",
           "decompose_both", "decompose_factor", "feedforward_modules"}


def changed_weight(m, weight):
    """As forward() computes with it; get_merged_weight() of LyCORIS 3.4's LoHa and LoKr has the scale twice."""
    if isinstance(m, FullModule):
        return m.weight
    if not isinstance(m, (LohaModule, LokrModule)):
        return m.get_merged_weight(shape=weight.shape)[0].reshape(weight.shape)
    new = weight + m.get_weight(m.shape).reshape(weight.shape) * m.scalar
    return m.apply_weight_decompose(new, 1) if m.wd else new


def of_lycoris(module, **options):
    """Each layer apart, under kohya's names."""
    net = fresh()
    layers = {n: module(f"lora_unet_{n}", getattr(net, n), **options).double() for n in ("lin", "conv")}
    parameters = {f"{n}.{k}": p for n, m in layers.items() for k, p in m.named_parameters() if not k.startswith("org")}
    filled(parameters, module.name)
    full = module is FullModule
    if full:  # what is trained is the sum with the weight
        for n, m in layers.items():
            m.weight.data += WEIGHTS[n + ".weight"]
            m.is_diff = False
            parameters.pop(n + ".bias", None)
    merged = {n + ".weight": changed_weight(m, WEIGHTS[n + ".weight"]).detach().clone() for n, m in layers.items()}
    file = {}
    for n, m in layers.items():
        state = {k: v for k, v in m.state_dict().items() if not k.startswith("org")}
        if full:
            state = {"diff": m.weight.data - WEIGHTS[n + ".weight"]}
        file |= {f"lora_unet_{n}.{k}": v.detach().clone() for k, v in state.items()}

    def forward():
        weights = {n: changed_weight(m, WEIGHTS[n + ".weight"]) for n, m in layers.items()}
        return (torch.nn.functional.linear(INPUTS["x"], weights["lin"]),
                torch.nn.functional.conv2d(INPUTS["image"], weights["conv"], WEIGHTS["conv.bias"], padding=1))

    values = {k: p.detach().clone() for k, p in parameters.items()}
    outputs, gradients, after = trained(forward, parameters)
    if full:
        values = {k: v - WEIGHTS[k] for k, v in values.items()}
        after = {k: v - WEIGHTS[k] for k, v in after.items()}
    return values, (outputs, gradients, after), file, merged, options


def cases():
    both = ["lin", "conv"]
    yield "peft_lora", of_peft(LoraConfig(r=2, lora_alpha=3, target_modules=both))
    yield "peft_rslora", of_peft(LoraConfig(r=3, lora_alpha=2, target_modules=both, use_rslora=True,
                                            rank_pattern={"co.*": 2}, alpha_pattern={"lin": 5}))
    yield "peft_dora", of_peft(LoraConfig(r=2, lora_alpha=3, target_modules=both, use_dora=True))
    yield "peft_loha", of_peft(LoHaConfig(r=2, alpha=3, target_modules=both))
    yield "peft_lokr", of_peft(LoKrConfig(r=1, alpha=3, target_modules=both))
    yield "peft_lokr_both", of_peft(LoKrConfig(r=1, alpha=3, target_modules=both, decompose_both=True,
                                               decompose_factor=4))
    yield "peft_ia3", of_peft(IA3Config(target_modules=both, feedforward_modules=["conv"]))
    yield "peft_ia3_bias", of_peft(IA3Config(target_modules=["conv"], feedforward_modules=[]))
    yield "lycoris_rslora", of_lycoris(LoConModule, lora_dim=2, alpha=3, rs_lora=True)
    yield "lycoris_core", of_lycoris(LoConModule, lora_dim=2, alpha=3, use_tucker=True)
    yield "lycoris_dora", of_lycoris(LoConModule, lora_dim=2, alpha=3, weight_decompose=True, wd_on_out=True)
    yield "lycoris_dora_in", of_lycoris(LoConModule, lora_dim=2, alpha=3, weight_decompose=True, wd_on_out=False)
    yield "lycoris_loha", of_lycoris(LohaModule, lora_dim=2, alpha=3)
    yield "lycoris_loha_dora", of_lycoris(LohaModule, lora_dim=2, alpha=3, weight_decompose=True, wd_on_out=True)
    yield "lycoris_lokr", of_lycoris(LokrModule, lora_dim=1, alpha=3)
    yield "lycoris_lokr_full", of_lycoris(LokrModule, lora_dim=8, alpha=3)
    yield "lycoris_ia3", of_lycoris(IA3Module)
    yield "lycoris_ia3_in", of_lycoris(IA3Module, train_on_input=True)
    yield "lycoris_full", of_lycoris(FullModule)


def main():
    arrays = {f"weights/{k}": v for k, v in WEIGHTS.items()} | {f"in/{k}": v for k, v in INPUTS.items()}
    arrays |= {f"dot/{k}": v for k, v in DOTS.items()}
    about = {"peft": peft.__version__, "lycoris": importlib.metadata.version("lycoris-lora"), "steps": STEPS,
             "rate": RATE, "cases": {}}
    for name, (values, (outputs, gradients, after), file, merged, options) in cases():
        # PEFT's IA3 scales the bias, too. In LyCORIS the length of DoRA's weight has a gradient, too; its core tensors are not trained here.
        trains = not any(word in name for word in ("core", "lycoris_dora", "loha_dora", "ia3_bias"))
        about["cases"][name] = {"options": options, "trains": trains, "file": sorted(file)}
        put = lambda kind, tensors: arrays.update({f"{name}/{kind}/{k}": v for k, v in tensors.items()})
        put("file", file)
        put("merged", merged)
        if trains:
            put("value", values), put("out", outputs), put("grad", gradients), put("after", after)
        print(name, sorted(values)[:4], "trained" if trains else "merged alone")
    keep = lambda t: t.detach().contiguous() if not t.is_floating_point() else t.detach().float().contiguous()
    save_file({k: keep(v).clone() for k, v in arrays.items()}, ROOT / "adapters.safetensors")
    (ROOT / "adapters.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
