"""The optimizer of a run and the precision it computes in."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from perception.config import RunConfig
from perception.errors import UserError
from perception.large_batch import Lamb, Lars


def build_optimizer(config: RunConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """As `config.optim` names it; weight decay, and trust ratios, on matrices and kernels, not on biases and norms."""
    optim = config.optim
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = {"weight_decay": 0.0} if optim.name == "adamw" else {"weight_decay": 0.0, "adapted": False}
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], **plain},
    ]
    groups = [group for group in groups if group["params"]]
    match optim.name:
        case "adamw":
            return AdamW(groups, lr=optim.lr, fused=True)
        case "lamb":
            return Lamb(groups, lr=optim.lr)
        case "lars":
            return Lars(groups, lr=optim.lr, trust_coefficient=optim.trust_coefficient)
    raise UserError(f'optim.name = "{optim.name}": must be adamw, lamb or lars')


def use_bf16(precision: str, device: torch.device) -> bool:
    """auto: bf16 on GPUs that have it and on processors with AVX512_BF16 or AMX; it is slower elsewhere."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
