"""LightningModules that the command line trains."""

from lightning_nd.recipes.causal_lm import CausalLM
from lightning_nd.recipes.lora import LoRA
from lightning_nd.recipes.optim import WarmupDecay

__all__ = ["CausalLM", "LoRA", "WarmupDecay"]
