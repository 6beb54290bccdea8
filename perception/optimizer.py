"""The optimizer of a run and the precision it computes in."""

from __future__ import annotations

import torch
from torch import nn

from perception.config import RunConfig


def build_optimizer(config: RunConfig, model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices and kernels only, not on biases and norms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.optim.lr, fused=True)


def use_bf16(precision: str, device: torch.device) -> bool:
    """auto: bf16 on GPUs that have it and on processors with AVX512_BF16 or AMX; it is slower elsewhere."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
