"""Writes optim.json, results of torch.optim.AdamW, clip_grad_norm_ and transformers' schedules, loraplus.json, results of PEFT's
create_loraplus_optimizer, for tests/train_optim.rs, and outer.json, results of torch.optim.SGD, for tests/train_islands.rs.

Run: ATEN_CPU_CAPABILITY=default python make_optim.py   (torch 2.15.0, transformers 5.23.0, peft 0.21.2)
Without that variable torch fuses a multiply-add inside lerp, and in add with alpha, and the last bit differs.
"""
import json
import os
import pathlib

assert os.environ.get("ATEN_CPU_CAPABILITY") == "default", "set ATEN_CPU_CAPABILITY=default"
import torch
from transformers import (get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup,
                          get_linear_schedule_with_warmup, get_wsd_schedule)

# On some processors torch's square root of f32 comes from a library that does not round correctly.
square_root = torch.Tensor.sqrt
torch.Tensor.sqrt = lambda x: square_root(x.double()).to(x.dtype)

N, STEPS = 37, 12


def case(seed, decay, warmup, weight_decay, magnitude, max_grad_norm, floor=0.0, decay_steps=0, betas=(0.9, 0.999)):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(N, generator=generator)
    p = torch.nn.Parameter(draw())
    start = p.detach().clone()
    optimizer = torch.optim.AdamW([p], lr=2e-3, betas=betas, weight_decay=weight_decay, foreach=False, fused=False)
    schedule = {
        "cosine": lambda: get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, STEPS, min_lr_rate=floor) if floor
        else get_cosine_schedule_with_warmup(optimizer, warmup, STEPS),
        "wsd": lambda: get_wsd_schedule(optimizer, warmup, decay_steps, STEPS, min_lr_ratio=floor),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, warmup, STEPS),
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, warmup),
    }[decay]()
    steps = []
    for _ in range(STEPS):
        # several orders of magnitude within one vector, and exact zeros
        gradient = draw() * magnitude * 10 ** (draw() * 1.5)
        gradient[::9] = 0
        p.grad = gradient.clone()
        norm = float("nan")
        if max_grad_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_([p], max_grad_norm).item()
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        steps.append({
            "gradient": gradient.tolist(), "clipped": p.grad.tolist(), "norm": norm if norm == norm else None,
            "rate": rate, "parameters": p.detach().tolist(),
        })
    state = optimizer.state[p]
    return {
        "decay": decay, "warmup": warmup, "total": STEPS, "peak": 2e-3, "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm, "floor": floor, "decay_steps": decay_steps, "betas": betas, "start": start.tolist(), "steps": steps,
        "exp_avg": state["exp_avg"].tolist(), "exp_avg_sq": state["exp_avg_sq"].tolist(),
    }


cases = [
    case(1, "cosine", 3, 0.0, 1e-2, 0.0),
    case(2, "linear", 0, 0.1, 1.0, 1.0),
    case(3, "constant", 2, 0.01, 1e-6, 0.0),
    case(4, "cosine", 0, 0.0, 30.0, 0.3),
    case(5, "cosine", 2, 0.0, 1.0, 1.0, floor=0.1, betas=(0.9, 0.95)),
    case(6, "wsd", 3, 0.0, 1.0, 1.0, floor=0.05, decay_steps=4),
    case(7, "wsd", 0, 0.01, 1e-2, 0.0, decay_steps=7, betas=(0.8, 0.99)),
]
path = pathlib.Path(__file__).with_name("optim.json")
path.write_text(json.dumps(cases, indent=None, separators=(",", ":")) + "\n")


def loraplus():
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer
    generator = torch.Generator().manual_seed(8)
    base = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 4))
    model = get_peft_model(base, LoraConfig(r=3, target_modules=["0", "1"]))
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=2e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1,
                                          foreach=False, fused=False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for _, p in named:
        p.data = torch.randn(p.shape, generator=generator)
    start = {name: p.detach().flatten().tolist() for name, p in named}
    steps = []
    for _ in range(4):
        for _, p in named:  # multiples of 1/1024: sums in fixed point are exact
            p.grad = torch.randint(-4096, 4096, p.shape, generator=generator) / 1024
        gradient = {name: p.grad.flatten().tolist() for name, p in named}
        optimizer.step()
        steps.append({"gradient": gradient, "parameters": {name: p.detach().flatten().tolist() for name, p in named}})
    return {"rate": 2e-3, "ratio": 16.0, "weight_decay": 0.1, "start": start, "steps": steps}


path.with_name("loraplus.json").write_text(json.dumps(loraplus(), separators=(",", ":")) + "\n")


def outer(rate, momentum):
    generator = torch.Generator().manual_seed(9)
    p = torch.nn.Parameter(torch.randn(N, generator=generator))
    start = p.detach().tolist()
    optimizer = torch.optim.SGD([p], lr=rate, momentum=momentum, nesterov=momentum > 0, foreach=False, fused=False)
    steps = []
    for _ in range(6):
        # Odd multiples of 2^-20: sums in fixed point and the mean of two are exact.
        change = (2 * torch.randint(-4096, 4096, (N,), generator=generator) + 1) * 2.0 ** -20
        p.grad = -change
        optimizer.step()
        steps.append({"change": change.tolist(), "parameters": p.detach().tolist()})
    velocity = [-v for v in optimizer.state[p]["momentum_buffer"].tolist()] if momentum else []
    return {"rate": rate, "momentum": momentum, "start": start, "steps": steps, "velocity": velocity}


cases = [outer(0.7, 0.9), outer(1.0, 0.5), outer(0.3, 0.0), outer(1.0, 0.0)]
path.with_name("outer.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
